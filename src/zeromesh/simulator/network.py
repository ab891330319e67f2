"""Lanes of communication that share the links of a hierarchy, on a virtual clock.

A lane carries out its jobs in the order of issue, one at a time. A job is latency, then a transfer that keeps each
level's links busy for a known time if it is alone. Jobs of different lanes run at once; where together they ask for
more of a level's links than there is, they slow down in proportion. Compute slows down by what the running jobs take
of the device together (`zeromesh.cost.contention`). Where the processor that computes also moves the bytes (`cores`),
it is a resource like a level's links, of which compute asks for a core: together they slow down in proportion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from zeromesh.cost import CollectiveCost, slowdown
from zeromesh.cost.collective import HOST
from zeromesh.errors import InternalError

Load = dict[int, float]

_SHORTEST_S = 1e-9
"""Of a latency that is longer beside computation."""


@dataclass(frozen=True, slots=True)
class Work:
    """One collective: what it is for the trace, and what it costs alone."""

    name: str
    axes: tuple[str, ...]
    cost: CollectiveCost
    sent_bytes: tuple[float, ...]  # by axis
    transfer_s: float = field(init=False)
    latency_s: float = field(init=False)
    stretch: float = field(init=False)  # of the latency while the device computes

    def __post_init__(self) -> None:
        busy_latency_s = self.cost.busy_latency_s
        latency_s = max(self.cost.latency_s, _SHORTEST_S if busy_latency_s else 0.0)
        object.__setattr__(self, "transfer_s", self.cost.transfer_s)
        object.__setattr__(self, "latency_s", latency_s)
        object.__setattr__(self, "stretch", 1.0 + busy_latency_s / latency_s if latency_s else 1.0)


@dataclass(slots=True, eq=False)
class Job:
    """A chain of collectives in a lane; also the ticket that the interpreter waits for.

    Args:
        chain: carried out one after another.
        ready_s: not before.
        after: a job that must have ended first.
        unit, micro_batch: for the trace.
    """

    chain: tuple[Work, ...]
    ready_s: float
    unit: int
    micro_batch: int
    kind: str
    after: Job | None = None
    lane: str = ""
    position: int = 0
    latency_left: float = 0.0
    share_left: float = 1.0
    started_s: float = 0.0
    begun: bool = False
    done_s: float | None = None


@dataclass(slots=True)
class Network:
    """All lanes, and the time to which they have been simulated.

    Args:
        finished: called with (job, work, start, end) when a collective ends.
        cores: of the device, where it moves the bytes itself; the computation can use one.
    """

    finished: Callable[[Job, Work, float, float], None]
    cores: float | None = None
    now_s: float = 0.0
    lanes: dict[str, deque[Job]] = field(default_factory=dict)

    def submit(self, job: Job, lane: str) -> Job:
        """Queues `job`; an empty chain ends when it could start."""
        job.lane = lane
        self.lanes.setdefault(lane, deque()).append(job)
        return job

    def compute(self, seconds: float) -> None:
        """Lets `seconds` of undisturbed compute pass: longer where jobs run meanwhile."""
        while seconds > 0:
            seconds -= self.go_on(seconds)

    def go_on(self, compute_s: float, most_s: float = inf) -> float:
        """Lets time pass to the next event of a job, until so much undisturbed compute is done (inf: nothing computes),
        or for `most_s`; how much compute that was."""
        active, computing = self._active(), compute_s < inf
        load = self._load(active, computing=computing)
        slow = self._slowness(active, load)
        whole = compute_s * slow
        step = min(whole, self._next_event(active, load, computing=computing), most_s)
        self._advance(active, step, load, computing=computing)
        return compute_s if step == whole else step / slow

    def idle(self, seconds: float) -> None:
        """Lets time pass in which the device does nothing."""
        end = self.now_s + seconds
        while self.now_s < end:
            active = self._active()
            load = self._load(active, computing=False)
            step = min(end - self.now_s, self._next_event(active, load, computing=False))
            if step == end - self.now_s:
                self._advance(active, step, load, computing=False)
                return
            self._advance(active, step, load, computing=False)

    def _slowness(self, active: list[Job], load: Load | None) -> float:
        """Seconds that a second of compute takes now."""
        if not active:
            return 1.0
        if self.cores is None:
            return slowdown(sum(job.chain[job.position].cost.taken for job in active))
        return 1.0 if load is None else max(1.0, load.get(HOST, 0.0))

    def _load(self, active: list[Job], *, computing: bool) -> Load | None:
        """By level: the share of its links that is asked for, above 1 where all who ask must slow down; None where a
        single job has everything to itself."""
        alone = len(active) <= 1 and not (computing and active and self.cores is not None)
        if alone:
            return None
        load: Load = {HOST: min(1.0, self.cores) / self.cores} if computing and self.cores is not None else {}
        for job in active:
            if job.latency_left <= 0:
                work = job.chain[job.position]
                whole = work.transfer_s
                for level, busy in work.cost.busy:
                    load[level] = load.get(level, 0.0) + (busy / whole if whole else 0.0)
        return load

    def wait_for(self, job: Job) -> None:
        """Lets time pass until `job` has ended."""
        while True:
            active = self._active()
            if job.done_s is not None:
                return
            load = self._load(active, computing=False)
            step = self._next_event(active, load, computing=False)
            if step == inf:
                raise InternalError(f"{job.kind} of unit {job.unit} waits for something that never ends")
            self._advance(active, step, load, computing=False)

    def signature(
        self, name: Callable[[int], object] = lambda unit: unit
    ) -> list[tuple[str, list[tuple[object, ...]]]]:
        """What is in flight, relative to now, of units as `name` has them: equal signatures have equal futures."""
        queues = sorted(self.lanes.items())
        return [(lane, [_progress(job, name) for job in queue]) for lane, queue in queues if queue]

    # ---- one event at a time

    def _active(self) -> list[Job]:
        """The head of each lane that may run now; heads with nothing to do are ended on the way."""
        active = []
        for queue in self.lanes.values():
            while queue:
                head = queue[0]
                if head.ready_s > self.now_s or (head.after is not None and head.after.done_s is None):
                    break
                if head.position == len(head.chain):
                    head.done_s = self.now_s
                    queue.popleft()
                    continue
                self._begin(head)
                active.append(head)
                break
        return active

    def _begin(self, job: Job) -> None:
        if not job.begun:
            work = job.chain[job.position]
            job.begun, job.started_s, job.share_left = True, self.now_s, 1.0
            job.latency_left = work.latency_s

    def _next_event(self, active: list[Job], load: Load | None, *, computing: bool) -> float:
        """Seconds until a latency or transfer ends or a waiting job becomes ready."""
        step = inf
        for job in active:
            if job.latency_left > 0:
                step = min(step, job.latency_left * _stretch(job, computing))
            else:
                step = min(step, job.share_left * _seconds_under(load, job))
        for queue in self.lanes.values():
            if queue and queue[0].ready_s > self.now_s:
                step = min(step, queue[0].ready_s - self.now_s)
        return step

    def _advance(self, active: list[Job], step: float, load: Load | None, *, computing: bool) -> None:
        self.now_s += step
        for job in active:
            if job.latency_left > 0:
                job.latency_left -= step / _stretch(job, computing)
                if job.latency_left <= 1e-15:
                    job.latency_left = 0.0
                    if job.chain[job.position].transfer_s == 0.0:
                        self._finish(job)
                continue
            total = _seconds_under(load, job)
            job.share_left -= step / total if total > 0 else 1.0
            if job.share_left <= 1e-12:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        self.finished(job, job.chain[job.position], job.started_s, self.now_s)
        job.position += 1
        job.begun = False
        if job.position == len(job.chain):
            job.done_s = self.now_s
            self.lanes[job.lane].popleft()


def _stretch(job: Job, computing: bool) -> float:
    return job.chain[job.position].stretch if computing else 1.0


def _seconds_under(load: Load | None, job: Job) -> float:
    """Seconds of the job's whole transfer under `load`; None: it is alone."""
    work = job.chain[job.position]
    if load is None:
        return work.transfer_s
    slow = max((load.get(level, 0.0) for level, _ in work.cost.busy), default=1.0)
    return work.transfer_s * max(1.0, slow)


def _progress(job: Job, name: Callable[[int], object]) -> tuple[object, ...]:
    before = job.after if job.after is not None and job.after.done_s is None else None
    waits = before and (name(before.unit), before.kind)
    return (name(job.unit), job.kind, job.position, round(job.share_left, 9), round(job.latency_left, 12), waits)
