"""When what a step has issued would run on a device: streams with virtual clocks, and a host that runs ahead of them.

[Note: Clocks of streams] The host issues one thing after another. A kernel or collective starts when its stream has
done all before it and the host has issued it; an event carries its stream's clock to the streams that wait for it; a
host that reads a result goes on when it is there. So a host that is slow leaves the device idle, and one that waits no
longer runs ahead. While collectives are under way a kernel takes longer by the cost model's contention, and a
collective that finds links busy with earlier ones takes longer by as much as they share: the first of two is not slowed
down in turn, so lanes end a little early where many share a link (`zeromesh simulate` divides it among them).

Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from zeromesh.cost.collective import CollectiveCost
from zeromesh.rehearsal.result import COMPUTE, Place
from zeromesh.trace import Event, Trace

OrderKind = Literal["record", "wait", "host event", "host stream", "host all"]

_REMEMBERED = 64
"""Collectives that may still be under way when another one starts: there are four lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Something that the host has launched.

    Args:
        at_s: host seconds since the recording began.
        stream: its number.
        seconds: that it takes.
        place: of the step.
        lane: where it was issued, "compute" for none.
        micro_batch: index in the step, -1 outside.
    """

    at_s: float
    stream: int
    seconds: float
    place: Place
    lane: str = COMPUTE
    micro_batch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """A collective that the host has launched.

    Args:
        cost: alone on its links.
        operation, axis, unit, sent_bytes: for the trace.
        at_s, stream, lane, micro_batch: as of a kernel.
    """

    at_s: float
    stream: int
    cost: CollectiveCost
    operation: str
    axis: str
    unit: str | None
    sent_bytes: float
    lane: str
    micro_batch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Something that comes after something else.

    Args:
        kind: an event is recorded on a stream, a stream waits for it, or the host for it, a stream or all streams.
        stream, event: their numbers.
        at_s: as of a kernel.
    """

    at_s: float
    kind: OrderKind
    stream: int = 0
    event: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The host has come to the end of a step."""

    at_s: float


Issued = Kernel | Communication | Order | StepEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step on the clocks: from where the computation has ended the one before to where it ends this one."""

    seconds: float
    trace: Trace


@dataclass(slots=True, kw_only=True)
class Clocks:
    """[Note: Clocks of streams].

    Args:
        contention: seconds of a kernel's second while collectives are under way.
        host_scale: seconds of the host for one of the recording, which takes time itself.
    """

    contention: float = 1.0
    host_scale: float = 1.0
    host_s: float = 0.0
    streams: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    events: dict[int, float] = field(default_factory=dict)
    _issued_s: float = 0.0
    _busy: list[tuple[float, float, dict[int, float]]] = field(default_factory=list)

    def issue(self, at_s: float) -> None:
        """The host has gone on to here in its recording."""
        self.host_s += (at_s - self._issued_s) * self.host_scale
        self._issued_s = at_s

    def kernel(self, stream: int, seconds: float) -> tuple[float, float]:
        """Start and end."""
        start = max(self.streams[stream], self.host_s)
        under = max((min(e, start + seconds) - max(s, start) for s, e, _ in self._busy), default=0.0)
        return self._run(stream, start, seconds + max(0.0, under) * (self.contention - 1))

    def collective(self, stream: int, cost: CollectiveCost) -> tuple[float, float]:
        """Start and end."""
        start = max(self.streams[stream], self.host_s)
        moves, whole = start + cost.latency_s, cost.transfer_s
        end = start + cost.seconds
        share = {level: busy / whole for level, busy in cost.busy} if whole else {}
        later = dict.fromkeys(share, 0.0)
        for begun, ended, others in self._busy:
            for level in share.keys() & others.keys():
                later[level] += max(0.0, min(ended, end) - max(begun, moves)) * min(share[level], others[level])
        found = self._run(stream, start, cost.seconds + max(later.values(), default=0.0))
        self._busy = [*self._busy[1 - _REMEMBERED :], (moves, found[1], share)]
        return found

    def order(self, order: Order) -> float:
        """Seconds for which a stream stands still."""
        match order.kind:
            case "record":
                self.events[order.event] = self.streams[order.stream] = max(self.streams[order.stream], self.host_s)
            case "wait":
                before = max(self.streams[order.stream], self.host_s)
                self.streams[order.stream] = max(before, self.events.get(order.event, 0.0))
                return self.streams[order.stream] - before
            case "host event":
                self.host_s = max(self.host_s, self.events.get(order.event, 0.0))
            case "host stream":
                self.host_s = max(self.host_s, self.streams[order.stream])
            case "host all":
                self.host_s = max(self.host_s, *self.streams.values(), 0.0)
        return 0.0

    def _run(self, stream: int, start: float, seconds: float) -> tuple[float, float]:
        self.streams[stream] = start + seconds
        return start, start + seconds


def replay(issued: Iterable[Issued], *, label: str, contention: float, host_scale: float) -> tuple[TimedStep, ...]:
    """The steps of a recording as they would run, each a trace that begins where the one before has ended.

    Args:
        issued: in the order of the host, on the default stream 0 and others.
        label: of the traces.
        contention, host_scale: as `Clocks` has them.
    """
    clocks = Clocks(contention=contention, host_scale=host_scale)
    steps: list[TimedStep] = []
    rows = _Rows(label)
    for item in issued:
        clocks.issue(item.at_s)
        match item:
            case Kernel():
                start, end = clocks.kernel(item.stream, item.seconds)
                if item.lane == COMPUTE:
                    rows.computed(item, start, end)
            case Communication():
                rows.communicated(item, *clocks.collective(item.stream, item.cost))
            case Order():
                waited = clocks.order(item)
                if waited > 0 and item.stream == 0:
                    rows.waited(clocks.streams[0] - waited, clocks.streams[0])
            case StepEnd():
                steps.append(rows.cut(max(clocks.streams[0], clocks.host_s)))
    return tuple(steps)


class _Rows:
    """Events of the step that runs; neighbouring kernels of a place are one."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._start_s = 0.0
        self._events: list[Event] = []
        self._open: tuple[Kernel, float, float] | None = None

    def computed(self, kernel: Kernel, start: float, end: float) -> None:
        if self._open is not None and self._open[0].place == kernel.place:
            self._open = (self._open[0], self._open[1], end)
            return
        self._close()
        self._open = (kernel, start, end)

    def communicated(self, job: Communication, start: float, end: float) -> None:
        self._events.append(
            Event(
                name=f"{job.lane} {job.operation}",
                kind="communicate",
                resource=f"{job.lane}/{job.axis}",
                start_s=start - self._start_s,
                end_s=end - self._start_s,
                unit=job.unit,
                micro_batch=job.micro_batch,
                axis=job.axis,
                sent_bytes=job.sent_bytes,
            )
        )

    def waited(self, start: float, end: float) -> None:
        """The computation stands still."""
        unit = self._open[0].place.unit if self._open is not None else None
        self._close()
        self._add("wait", "wait", start, end, unit, -1)

    def cut(self, end: float) -> TimedStep:
        """What there is, up to the end of a step."""
        self._close()
        events = sorted(self._events, key=lambda event: (event.start_s, event.resource))
        step = TimedStep(seconds=end - self._start_s, trace=Trace(label=self._label, events=tuple(events)))
        self._events, self._start_s = [], end
        return step

    def _close(self) -> None:
        if self._open is not None:
            (kernel, start, end), self._open = self._open, None
            self._add(kernel.place.phase, "compute", start, end, kernel.place.unit, kernel.micro_batch)

    def _add(
        self, name: str, kind: Literal["compute", "wait"], start: float, end: float, unit: str | None, micro_batch: int
    ) -> None:
        start, end = start - self._start_s, end - self._start_s
        self._events.append(
            Event(
                name=name,
                kind=kind,
                resource=COMPUTE,
                start_s=start,
                end_s=end,
                unit=unit,
                micro_batch=micro_batch,
            )
        )
