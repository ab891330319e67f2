"""When a step's kernels would run on a device: streams with virtual clocks, and a host that runs ahead of them.

[Note: Clocks of streams] The host issues one item after another. A kernel or collective starts when the host has issued
it and its stream has done everything before it. A stream that waits for an event goes on when the event's stream has
reached it. A host that reads a result goes on when the result exists. So a slow host leaves the device idle, and a host
that waits is no longer ahead. Collectives share links, and slow kernels down, as in `zeromesh simulate`: they are jobs
of the simulator's network, with a lane for each stream.

Torch-free.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from zeromesh.cost.collective import CollectiveCost
from zeromesh.errors import InternalError
from zeromesh.rehearsal.result import COMPUTE, Place
from zeromesh.simulator.network import Job, Network, Work
from zeromesh.trace import Event, Trace

_MOMENT_S = 1e-12
"""Times that are closer than this are equal: seconds are added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that the host has launched, `at_s` seconds after the recording began."""

    at_s: float
    stream: int
    seconds: float
    place: Place
    moving: bool = False  # whether it waits for memory
    kind: str = COMPUTE  # kind of the transfers that it is part of, or "compute"
    micro_batch: int = -1  # index in the step; -1 outside micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """A collective that the host has launched: its cost by itself on its links, and names for the trace. Other fields
    are as in `Kernel`."""

    at_s: float
    stream: int
    cost: CollectiveCost
    operation: str
    axis: str
    unit: str | None
    sent_bytes: float
    kind: str
    micro_batch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Orders something after something else: an order of `zeromesh.simdev.Order`, or the host's end of a step
    (`STEP_ENDS`)."""

    at_s: float
    kind: str
    stream: int = 0
    event: int = 0


STEP_ENDS = "step ends"

Issued = Kernel | Communication | Order


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step on the clocks, from the end of the previous step's computation to the end of its own."""

    seconds: float
    trace: Trace


@dataclass(slots=True, eq=False)
class _Mark:
    """A place in a stream, and when the stream reached it."""

    done_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Wait:
    mark: _Mark | None


@dataclass(slots=True, eq=False)
class _Queued:
    item: Kernel | Communication | _Mark | _Wait
    issued_s: float
    rows: _Rows  # of the step that issued it
    left_s: float | None = None  # of a running kernel, undisturbed
    started_s: float = 0.0
    job: Job | None = None  # of a collective that has begun


@dataclass(slots=True)
class _Stream:
    queue: deque[_Queued] = field(default_factory=deque)
    free_s: float = 0.0


class _Device:
    """A device whose streams have clocks: [Note: Clocks of streams]."""

    def __init__(self, cores: float | None) -> None:
        self.network = Network(self._sent, cores)
        self.streams: defaultdict[int, _Stream] = defaultdict(_Stream)
        self._sending: dict[Job, _Queued] = {}

    @property
    def now_s(self) -> float:
        return self.network.now_s

    def put(self, stream: int, item: Kernel | Communication | _Mark | _Wait, rows: _Rows) -> None:
        self.streams[stream].queue.append(_Queued(item, self.now_s, rows))

    def mark(self, stream: int, rows: _Rows) -> _Mark:
        """Marks the end of everything that the stream has been given so far."""
        mark = _Mark()
        self.put(stream, mark, rows)
        return mark

    def run_until(self, seconds: float) -> None:
        self.settle()
        while self.now_s < seconds - _MOMENT_S:
            self.go_on(seconds)

    def come_to(self, marks: Sequence[_Mark]) -> None:
        self.settle()
        while any(mark.done_s is None for mark in marks):
            self.go_on(inf)

    def settle(self) -> None:
        """Does everything that needs no time: finished items leave their streams, and those that may begin do."""
        moved = True
        while moved:  # the progress of one stream may let another go on
            moved = False
            for number, stream in self.streams.items():
                while stream.queue and self._is_over(number, stream, stream.queue[0]):
                    stream.queue.popleft()
                    stream.free_s, moved = self.now_s, True

    def _is_over(self, number: int, stream: _Stream, queued: _Queued) -> bool:
        match queued.item:
            case _Mark() as mark:
                mark.done_s = self.now_s
            case _Wait(mark):
                if mark is not None and mark.done_s is None:
                    return False
                since_s = max(stream.free_s, queued.issued_s)
                if number == 0 and self.now_s - since_s > _MOMENT_S:
                    queued.rows.waited(since_s, self.now_s)
            case Kernel() as kernel:
                if queued.left_s is None:
                    queued.left_s, queued.started_s = kernel.seconds, self.now_s
                if queued.left_s > 0:
                    return False
                if kernel.kind == COMPUTE:
                    queued.rows.computed(kernel, queued.started_s, self.now_s)
            case Communication() as sent:
                if queued.job is None:
                    work = Work(sent.operation, (sent.axis,), sent.cost, (sent.sent_bytes,))
                    queued.job = Job((work,), 0, sent.micro_batch, sent.kind)
                    self._sending[queued.job] = queued
                    self.network.submit(queued.job, str(number))
                return queued.job.done_s is not None
        return True

    def _sent(self, job: Job, _: Work, start: float, end: float) -> None:
        queued = self._sending.pop(job)
        assert isinstance(queued.item, Communication)
        queued.rows.communicated(queued.item, start, end)

    def go_on(self, until_s: float) -> None:
        """Goes to the next moment at which an item ends, but not beyond `until_s`."""
        heads = [stream.queue[0] for stream in self.streams.values() if stream.queue]
        running = [head for head in heads if head.left_s is not None]
        least = min((head.left_s for head in running if head.left_s is not None), default=inf)
        moving = sum(isinstance(head.item, Kernel) and head.item.moving for head in running) / max(1, len(running))
        before_s = self.now_s
        done = self.network.go_on(least, until_s - before_s, moving)
        if self.now_s == inf:
            raise InternalError(f"a timeline waits for something that never ends, {before_s} s after its beginning")
        for head in running:
            assert head.left_s is not None
            left_s = head.left_s - done
            head.left_s = left_s if left_s > _MOMENT_S else 0.0
        self.settle()


def replay(
    issued: Iterable[Issued], *, label: str, cores: float | None = None, host_scale: float = 1.0
) -> tuple[TimedStep, ...]:
    """Returns the steps of a recording as they would run. Each has a trace that begins where the one before has ended.

    Items are in the host's order, on the default stream 0 and others. The device's `cores`, if it has any, move the
    bytes. Recording takes time itself: for each recorded second the host needs `host_scale` seconds.
    """
    device, events = _Device(cores), dict[int, _Mark]()
    rows, ended = _Rows(), list[tuple[_Rows, _Mark, float]]()
    at_s = host_s = 0.0
    for item in issued:
        host_s += (item.at_s - at_s) * host_scale
        at_s = item.at_s
        device.run_until(host_s)
        waits: list[_Mark] = []
        match item:
            case Kernel() | Communication():
                device.put(item.stream, item, rows)
            case Order(kind="record"):
                events[item.event] = device.mark(item.stream, rows)
            case Order(kind="wait"):
                device.put(item.stream, _Wait(events.get(item.event)), rows)
            case Order(kind="host waits for event"):
                waits = [events[item.event]] if item.event in events else []
            case Order(kind="host waits for stream"):
                waits = [device.mark(item.stream, rows)]
            case Order(kind="host waits for device"):
                waits = [device.mark(stream, rows) for stream in list(device.streams)]
            case Order(kind="step ends"):
                ended.append((rows, device.mark(0, rows), host_s))
                rows = _Rows()
            case Order(kind=kind):
                raise InternalError(f"the device knows no order {kind!r}")
        if waits:
            device.come_to(waits)
            host_s = max(host_s, device.now_s)
    device.come_to([device.mark(stream, rows) for stream in device.streams])
    steps, start_s = list[TimedStep](), 0.0
    for step, mark, host_end_s in ended:
        assert mark.done_s is not None
        end_s = max(mark.done_s, host_end_s)
        steps.append(TimedStep(seconds=end_s - start_s, trace=step.cut(label, start_s)))
        start_s = end_s
    return tuple(steps)


class _Rows:
    """Events of a step, by the clock of all steps. Consecutive kernels of one place are one event."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._open: tuple[Kernel, float, float] | None = None

    def computed(self, kernel: Kernel, start: float, end: float) -> None:
        if self._open is not None and self._open[0].place == kernel.place:
            self._open = (self._open[0], self._open[1], end)
            return
        self._close()
        self._open = (kernel, start, end)

    def communicated(self, job: Communication, start: float, end: float) -> None:
        event = Event(
            name=f"{job.kind} {job.operation}",
            kind="communicate",
            resource=f"{job.kind}/{job.axis}",
            start_s=start,
            end_s=end,
            unit=job.unit,
            micro_batch=job.micro_batch,
            axis=job.axis,
            sent_bytes=job.sent_bytes,
        )
        self._events.append(event)

    def waited(self, start: float, end: float) -> None:
        """Adds an event in which the computation stands still."""
        unit = self._open[0].place.unit if self._open is not None else None
        self._close()
        self._events.append(Event(name="wait", kind="wait", resource=COMPUTE, start_s=start, end_s=end, unit=unit))

    def cut(self, label: str, start_s: float) -> Trace:
        """Returns all events, with times from the step's beginning."""
        self._close()
        moved = [replace(e, start_s=e.start_s - start_s, end_s=e.end_s - start_s) for e in self._events]
        return Trace(label=label, events=tuple(sorted(moved, key=lambda event: (event.start_s, event.resource))))

    def _close(self) -> None:
        if self._open is not None:
            (kernel, start, end), self._open = self._open, None
            event = Event(
                name=kernel.place.phase,
                kind="compute",
                resource=COMPUTE,
                start_s=start,
                end_s=end,
                unit=kernel.place.unit,
                micro_batch=kernel.micro_batch,
            )
            self._events.append(event)
