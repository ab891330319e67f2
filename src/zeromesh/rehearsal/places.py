"""Tracks where a step is: which unit's forward or backward runs, or which lane works for which unit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from zeromesh.comm.lane import Ticket
from zeromesh.engine.engine import Engine
from zeromesh.engine.hosted import STREAMED
from zeromesh.engine.optim import by_engine
from zeromesh.observe.record import LaneProxy
from zeromesh.rehearsal.result import COMPUTE, Phase, Place
from zeromesh.schedule.program import PointKind
from zeromesh.schedule.transfer import COPIES

_PHASES: dict[PointKind, Phase] = {
    PointKind.PRE_RECOMPUTE: "recompute",
    PointKind.POST_RECOMPUTE: "backward",
    PointKind.PRE_BACKWARD: "backward",
    PointKind.POST_BACKWARD: "backward",
}

_ASIDE = (*COPIES, *STREAMED)
"""Lanes that are reported by their names. Others are reported by the kinds of their transfers."""


class Places:
    """Follows steps, and calls `left` with each place when the step leaves it. Counts the micro-batches of the last
    step, and notes whether units were run again in the backward (`recomputes`)."""

    def __init__(self, left: Callable[[Place], None]) -> None:
        self._left = left
        self._inside: list[str] = []
        self._done = 0
        self.micro_batches, self.recomputes = 0, False
        self.now = Place(phase="build")
        self.kind, self._job_unit = COMPUTE, ""

    @property
    def unit(self) -> str | None:
        """The unit that kernels and transfers are now launched for."""
        return self.now.unit if self.kind == COMPUTE else self._job_unit

    @property
    def micro_batch(self) -> int:
        """Index in the step; -1 outside forward and backward."""
        return self._done if self.now.phase in ("forward", "recompute", "backward") else -1

    def go(self, phase: Phase, unit: str | None = None) -> None:
        place = Place(phase=phase, unit=unit)
        if place != self.now:
            self._left(self.now)
            self.now = place

    @contextmanager
    def follow(self, engine: Engine) -> Iterator[None]:
        """Follows the points and lanes of `engine`; other watchers keep working."""
        interpreter, backend = engine.interpreter, engine.backend
        names = [unit.name for unit in engine.schedule.units]

        def point(kind: PointKind, unit: int) -> None:
            watch(kind, unit)
            self._point(kind, names[unit] if unit >= 0 else "")

        def stepping(optimizer: Optimizer, *_: Any) -> None:
            if engine in by_engine(optimizer):
                self.go("optimizer")

        # Steps on the host run beside this thread, and launch nothing on the device.
        lanes = {kind: lane if kind == "step" else _FollowedLane(lane, self) for kind, lane in backend.lanes.items()}
        watch = interpreter.watched(point)
        before = backend.through(lanes, backend.chains)
        hook = register_optimizer_step_pre_hook(stepping)
        self.go("other")
        try:
            yield
        finally:
            self.go("other")
            hook.remove()
            interpreter.watched(watch)
            backend.through(*before)

    def _point(self, kind: PointKind, unit: str) -> None:
        match kind:
            case PointKind.PRE_FORWARD:
                self._inside.append(unit)
                self.go("forward", unit)
            case PointKind.POST_FORWARD if sys.exc_info()[0] is not None:
                pass  # left by an exception: keep the place where it was raised
            case PointKind.POST_FORWARD:
                if unit in self._inside:
                    del self._inside[self._inside.index(unit) :]
                # After the root's forward the root's place goes on: the user computes the loss.
                self.go("forward", self._inside[-1] if self._inside else unit)
            case PointKind.END_BACKWARD:
                self._inside.clear()
                self._done += 1
                self.go("other")
            case PointKind.STEPPED:
                self.micro_batches, self._done = self._done or self.micro_batches, 0
                self.go("other")
            case _ if kind in _PHASES:
                self.recomputes |= kind is PointKind.PRE_RECOMPUTE
                self.go(_PHASES[kind], unit)


@dataclass(frozen=True, slots=True)
class _FollowedLane(LaneProxy):
    """A lane that tells `places` the unit of each job while it is issued. On a device this happens in `submit`, or
    later in the same thread."""

    places: Places

    def submit(self, job: Callable[[], object], label: str = "", *, after: Ticket | None = None) -> Ticket:
        places, (kind, _, unit) = self.places, label.partition(" ")
        kind = self.lane.name if self.lane.name in _ASIDE else kind

        def run() -> None:
            before = places.kind, places._job_unit
            places.kind, places._job_unit = kind, unit
            try:
                job()
            finally:
                places.kind, places._job_unit = before

        return self.lane.submit(run, label, after=after)
