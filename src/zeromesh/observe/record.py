"""Records the engine's steps in the same `Trace` that the simulator writes for their schedule.

Nothing here runs unless a recorder is open. An open recorder hooks in at four places:

    chains               each collective is timed where it runs, and its bytes are counted
    lanes                a job keeps the micro-batch it was submitted in; a wait for it is timed
    interpreter.watch    points cut the computation into slices: whose forward or backward runs
    torch's step hooks   the optimizer's slice

[Note: Slices] The host's time between two points (on CUDA: the current stream's) belongs to the unit whose forward or
backward runs. The root's own part lies between its children, in several slices. Waits cut slices, so computation and
waits together are the whole step. On CPU, times are taken in the thread that does the work. On CUDA they are events on
the stream that does it, read when the recorder closes; a wait is the time that the stream stood still.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zeromesh.comm.exchange import Sent, Step
from zeromesh.comm.lane import Lane, Ticket
from zeromesh.engine.api import engine_of
from zeromesh.engine.backend import UnitChains
from zeromesh.engine.chain import ByLane
from zeromesh.engine.engine import Engine
from zeromesh.engine.optim import by_engine
from zeromesh.schedule.program import PointKind
from zeromesh.schedule.transfer import COPIES
from zeromesh.strategy.stage import HOST
from zeromesh.trace import Event, Trace, row_of


class record_trace:  # used as a function that is also a context
    """Records the steps taken while the context is open, one `Trace` each.

    A step lasts from one optimizer's step to the end of the next. The first one begins with the context, so it lacks
    the refreshes of the previous optimizer's step.

    Args:
        model: a sharded model.

    Example::

        with zm.record_trace(model) as recording:
            for batch in batches:
                train_one_step(batch)
        Path("trace.json").write_text(recording.steps[-1].to_json())    # opens in Perfetto
    """

    def __init__(self, model: nn.Module) -> None:
        self._engine = engine_of(model)
        self.steps: tuple[Trace, ...] = ()

    def __enter__(self) -> record_trace:
        self._engine.at_rest(follow=True)
        self._recorder = _Recorder(self._engine)
        self._recorder.install()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # A failed collective was reported at its wait. It must not hide the error that ended the block.
        with suppress(RuntimeError):
            self._engine.at_rest(follow=kind is None)
        self._recorder.remove()
        self.steps = self._recorder.traces()


class _HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, since: Any, mark: Any) -> float:
        return float(mark - since)

    def finish(self) -> None:
        pass


class _DeviceClock:
    """A clock of events on the current stream. Nothing waits for them until the recorder closes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, since: Any, mark: Any) -> float:
        return float(since.elapsed_time(mark)) / 1e3

    def finish(self) -> None:
        torch.accelerator.synchronize(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A place in the recording: the step and the micro-batch; -1 means none."""

    step: int = 0
    micro_batch: int = -1


@dataclass(frozen=True, slots=True)
class _Timed:
    """Wraps a step of a chain to time it, and runs in its place."""

    step: Any
    name: str
    unit: str
    axis: str
    recorder: _Recorder

    def run(self, *args: Any, **kwargs: Any) -> None:
        recorder = self.recorder
        recorder.lane.sent_bytes = 0
        start = recorder.clock.mark()
        self.step.run(*args, **kwargs)
        recorder.communicated(self, start, recorder.lane.sent_bytes)


class _InLane(threading.local):
    """The running job's lane and place, and the bytes sent since the collective began."""

    name: str = ""
    place: _Place = _Place()
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _WatchedTicket:
    """Wraps a ticket to time waits for it."""

    ticket: Ticket
    recorder: _Recorder

    def wait(self) -> None:
        if (first := self.ticket.follows) is not None:
            self.recorder.waited(first.label, self.ticket.end)
        if self.ticket.done():
            self.ticket.wait()
        else:
            self.recorder.waited(self.ticket.label, self.ticket.wait)

    @property
    def error(self) -> BaseException | None:
        return self.ticket.error


@dataclass(frozen=True, slots=True)
class LaneProxy:
    """Replaces a lane, and sees its jobs as they are submitted."""

    lane: Lane

    @property
    def name(self) -> str:
        return self.lane.name

    def synchronize(self) -> None:
        self.lane.synchronize()

    def launch(self) -> None:
        self.lane.launch()


@dataclass(frozen=True, slots=True)
class _WatchedLane(LaneProxy):
    """A lane whose jobs remember where they were submitted. If it is inline, submitting counts as a wait."""

    recorder: _Recorder
    inline: bool

    def submit(
        self, job: Callable[[], object], label: str = "", *, after: Ticket | _WatchedTicket | None = None
    ) -> _WatchedTicket:
        place, recorder = self.recorder.place, self.recorder
        # A lane's wait for another is not the computation's. Jobs submitted before the recording are not watched.
        first = after.ticket if isinstance(after, _WatchedTicket) else after
        threads = isinstance(recorder.clock, _HostClock)

        def run() -> None:
            recorder.lane.name, recorder.lane.place = self.lane.name, place
            if self.lane.name == "step" and threads:  # no stream's event times it
                return _Timed(SimpleNamespace(run=job), "step", label.removeprefix("step "), HOST, recorder).run()
            job()

        if not self.inline:
            return _WatchedTicket(self.lane.submit(run, label, after=first), recorder)
        tickets: list[Ticket] = []
        recorder.waited(label, lambda: tickets.append(self.lane.submit(run, label, after=first)))
        return _WatchedTicket(tickets[0], recorder)


class _Recorder:
    """Records the calls that pass through the engine between `install` and `remove`."""

    def __init__(self, engine: Engine) -> None:
        # Weakly, since the engine holds tickets of running jobs, and these hold the recorder.
        self._engine = weakref.ref(engine)
        # Not the control's device, which is the host if there is one rank. The root may have no buffers.
        buffers = [buffer for unit in engine.backend.units for buffer in unit.buffers]
        device = buffers[0].device if buffers else engine.control.device
        self.clock = _HostClock() if device.type == "cpu" else _DeviceClock(device)
        self.place = _Place()
        self.lane = _InLane()
        self._events: list[tuple[int, Event]] = []  # each with its step; times are marks of the clock
        self._names = [unit.name for unit in engine.schedule.units]
        self._slice: tuple[str, str | None, Any] | None = None
        self._calls: list[int] = []
        self._num_micro_batches = 0
        self._between = True
        self._complete = False
        self._starts: list[Any] = [self.clock.mark()]

    @property
    def engine(self) -> Engine:
        engine = self._engine()
        assert engine is not None  # the caller holds the model that it records
        return engine

    # ---- hooking in

    def install(self) -> None:
        backend, interpreter = self.engine.backend, self.engine.interpreter
        inline = self.engine.schedule.layout.strategy.overlap == "none"
        lanes = {kind: _WatchedLane(lane, self, inline) for kind, lane in backend.lanes.items()}
        chains = [self._unit(c, u.name) for c, u in zip(backend.chains, backend.units, strict=True)]
        self._before = backend.through(lanes, chains)
        self._watch = interpreter.watched(self.point)
        self._records = {link: link.recorded(self._counting(link.record)) for link in backend.links}
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            # A step that updates none of our parameters reaches no point, so its slice ends here.
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        backend, interpreter = self.engine.backend, self.engine.interpreter
        backend.through(*self._before)
        interpreter.watched(self._watch)
        for link, record in self._records.items():
            link.recorded(record)
        for hook in self._hooks:
            hook.remove()
        self.clock.finish()

    def _counting(self, record: Callable[[Sent], None]) -> Callable[[Sent], None]:
        def count(sent: Sent) -> None:
            self.lane.sent_bytes += sent.sent_bytes
            record(sent)

        return count

    def _unit(self, chains: UnitChains, unit: str) -> UnitChains:
        def timed(by_lane: ByLane, kind: str) -> ByLane:
            return tuple((lane, self._timed(steps, kind, unit)) for lane, steps in by_lane)

        return UnitChains(
            unshard=timed(chains.unshard, "unshard"),
            unshard_kept=timed(chains.unshard_kept, "unshard"),
            refresh=timed(chains.refresh, "refresh"),
            reduce={
                index: replace(
                    own,
                    micro=timed(own.micro, "reduce"),
                    boundary=timed(own.boundary, "reduce"),
                    boundary_alone=timed(own.boundary_alone, "reduce"),
                    micro_down=timed(own.micro_down, "reduce"),
                    up=timed(own.up, "reduce"),
                    down=timed(own.down, "reduce"),
                )
                for index, own in chains.reduce.items()
            },
        )

    def _timed(self, steps: Sequence[Step], kind: str, unit: str) -> Any:
        order, timed = [axis.name for axis in self.engine.schedule.axes], list[Any]()
        for step in steps:
            axes = "+".join(sorted((group.name for group in step.groups), key=order.index))
            axes = HOST if step.operation in COPIES else axes
            timed.append(_Timed(step, f"{kind} {step.operation}", unit, axes, self) if axes else step)
        return tuple(timed)

    # ---- the recorded calls

    def communicated(self, step: _Timed, start: Any, sent_bytes: int) -> None:
        end: Any = self.clock.mark()
        kind = self.lane.name if self.lane.name in COPIES else step.name.partition(" ")[0]
        event = Event(
            name=step.name,
            kind="communicate",
            resource=row_of(kind, step.name, step.axis),
            start_s=start,
            end_s=end,
            unit=step.unit,
            micro_batch=self.lane.place.micro_batch,
            axis=step.axis,
            sent_bytes=sent_bytes,
        )
        self._events.append((self.lane.place.step, event))

    def waited(self, label: str, wait: Callable[[], None]) -> None:
        """Runs `wait`, and excludes its time from the slice that it interrupts."""
        interrupted, start = self._slice, self.clock.mark()
        self._close(start)
        try:
            wait()
        finally:
            end = self.clock.mark()
            kind, _, unit = label.partition(" ")
            self._add(f"wait for {kind}", "wait", start, end, unit)
            if interrupted is not None:
                self._slice = (*interrupted[:2], end)

    def point(self, point: PointKind, unit: int) -> None:
        """Starts or ends slices at a point: [Note: Slices]."""
        match point:
            case PointKind.PRE_FORWARD:
                if self._between:
                    self._between = False
                    self.place = replace(self.place, micro_batch=self._num_micro_batches)
                    self._num_micro_batches += 1
                self._calls.append(unit)
                self._open("forward", unit)
            case PointKind.POST_FORWARD:
                if unit in self._calls:
                    del self._calls[self._calls.index(unit) :]
                # After the root's forward the root's slice goes on: the user computes the loss.
                self._open("forward", self._calls[-1] if self._calls else unit)
            case PointKind.PRE_RECOMPUTE:
                self._open("recompute", unit)
            case PointKind.PRE_BACKWARD | PointKind.POST_RECOMPUTE:
                self._open("backward", unit)
            case PointKind.POST_BACKWARD:
                self._open("backward", 0)
            case PointKind.END_FORWARD:
                self._close()
            case PointKind.END_BACKWARD:
                self._close()
                running = self.engine.interpreter.backward
                self._between, self._complete = True, running is not None and running.last
                self._calls.clear()
            case PointKind.STEPPED:
                self._close()
                if self._complete:  # steps of further optimizers belong to the next step
                    self._complete, self._num_micro_batches = False, 0
                    self.place = _Place(step=self.place.step + 1)
                    self._starts.append(self.clock.mark())

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.engine in by_engine(optimizer):  # not an optimizer that is stepped inside another's step
            self._close()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.engine in by_engine(optimizer):
            self._close()
            self.place = replace(self.place, micro_batch=-1)
            self._slice = ("optimizer", None, self.clock.mark())

    def _open(self, name: str, unit: int) -> None:
        mark = self.clock.mark()
        self._close(mark)
        self._slice = (name, self._names[unit], mark)

    def _close(self, mark: Any = None) -> None:
        if self._slice is not None:
            (name, unit, start), self._slice = self._slice, None
            self._add(name, "compute", start, self.clock.mark() if mark is None else mark, unit)

    def _add(self, name: str, kind: Literal["compute", "wait"], start: Any, end: Any, unit: str | None) -> None:
        place, row = self.place, "compute"
        event = Event(
            name=name, kind=kind, resource=row, start_s=start, end_s=end, unit=unit, micro_batch=place.micro_batch
        )
        self._events.append((place.step, event))

    # ---- when the recording is over

    def traces(self) -> tuple[Trace, ...]:
        """Returns the steps that an optimizer has ended."""
        strategy, rank = self.engine.schedule.strategy, self.engine.control.rank
        label = f"{strategy} (measured, rank {rank})"
        found: list[list[Event]] = [[] for _ in self._starts]
        for step, event in self._events:
            start_s, end_s = (self.clock.seconds(self._starts[step], mark) for mark in (event.start_s, event.end_s))
            found[step].append(replace(event, start_s=start_s, end_s=end_s))
        complete = found[:-1]
        return tuple(
            Trace(label=label, events=tuple(sorted(events, key=lambda event: (event.start_s, event.resource))))
            for events in complete
        )
