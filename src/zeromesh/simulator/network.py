"""Lanes of communication that share the links of a hierarchy, on a virtual clock.

A lane carries out its jobs in the order of issue, one at a time. A job is latency, then a transfer that by itself keeps
each level's links busy for a known time. Jobs of different lanes run at once. If together they ask for more than all of
a level's links, they slow down in proportion. Compute slows down by the share of the device that the running jobs take
together. As far as it waits for memory, it also slows down by the bytes that they move there
(`zeromesh.cost.contention`). If the processor that computes also moves the bytes (`cores`), it is a resource like a
level's links, and compute asks for one core: together they slow down in proportion.

[Note: Launch order] NCCL may keep the collectives of all communicators of a device in the order in which the host
launched them (NCCL_LAUNCH_ORDER_IMPLICIT): each begins once all before it have begun. A collective that waits for its
lane then holds up collectives of other lanes. NCCL does not handle copies to and from the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from zeromesh.cost.collective import HOST, CollectiveCost
from zeromesh.cost.contention import slowdown
from zeromesh.errors import InternalError
from zeromesh.schedule.transfer import COPIES

Load = dict[int, float]

InLane = tuple[str, list[tuple[object, ...]]]
"""A lane, with the progress of each of its jobs."""

_SHORTEST_S = 1e-9
"""Shortest latency that computation stretches."""


@dataclass(frozen=True, slots=True)
class Work:
    """One collective: its names for the trace, and its cost by itself."""

    name: str
    axes: tuple[str, ...]
    cost: CollectiveCost
    sent_bytes: tuple[float, ...]  # by axis
    transfer_s: float = field(init=False)
    latency_s: float = field(init=False)
    stretch: float = field(init=False)  # factor on the latency while the device computes
    shares: tuple[tuple[int, float], ...] = field(init=False)  # shares of each level's links while it transfers

    def __post_init__(self) -> None:
        busy_latency_s, transfer_s = self.cost.busy_latency_s, self.cost.transfer_s
        latency_s = max(self.cost.latency_s, _SHORTEST_S if busy_latency_s else 0.0)
        shares = tuple((level, busy / transfer_s if transfer_s else 0.0) for level, busy in self.cost.busy)
        object.__setattr__(self, "transfer_s", transfer_s)
        object.__setattr__(self, "latency_s", latency_s)
        object.__setattr__(self, "stretch", 1.0 + busy_latency_s / latency_s if latency_s else 1.0)
        object.__setattr__(self, "shares", shares)


@dataclass(slots=True, eq=False)
class Job:
    """A chain of collectives in a lane. It is the ticket that the interpreter waits for."""

    chain: tuple[Work, ...]
    unit: int
    micro_batch: int
    kind: str
    after: Job | None = None  # must end first
    lane: str = ""
    position: int = 0
    work: Work = field(init=False)  # the collective that has begun
    latency_left: float = 0.0
    share_left: float = 1.0
    started_s: float = 0.0
    begun: bool = False
    done_s: float | None = None


@dataclass(slots=True)
class Network:
    """All lanes, and the time up to which they have been simulated."""

    finished: Callable[[Job, Work, float, float], None]  # called with start and end when a collective ends
    cores: float | None = None  # cores of the device, if it moves the bytes itself; the computation can use one
    implicit: bool = False  # collectives begin in the order of their launch: [Note: Launch order]
    now_s: float = 0.0
    lanes: dict[str, deque[Job]] = field(default_factory=dict)
    launched: deque[Job] = field(default_factory=deque)  # jobs with collectives that have not begun, if `implicit`

    def submit(self, job: Job, lane: str) -> Job:
        """Queues `job`. An empty chain ends when it could start."""
        job.lane = lane
        self.lanes.setdefault(lane, deque()).append(job)
        if self.implicit and job.chain and lane not in COPIES:
            self.launched.append(job)
        return job

    def compute(self, seconds: float, moving: float = 0.0) -> None:
        """Lets `seconds` of undisturbed compute pass, of which the share `moving` waits for memory. It takes longer if
        jobs run meanwhile."""
        while seconds > 0:
            seconds -= self.go_on(seconds, moving=moving)

    def go_on(self, compute_s: float, most_s: float = inf, moving: float = 0.0) -> float:
        """Lets time pass until a job's next event, until `compute_s` of undisturbed compute is done (inf: nothing
        computes), or for `most_s`. Returns how much compute was done."""
        running, load = self._running(computing=compute_s < inf)
        slow = self._slowness(running, load, moving)
        whole = compute_s * slow
        step = min(whole, _next_event(running), most_s)
        self._advance(running, step)
        return compute_s if step == whole else step / slow

    def idle(self, seconds: float) -> None:
        """Lets time pass in which the device does nothing."""
        end = self.now_s + seconds
        while self.now_s < end:
            running, _ = self._running(computing=False)
            left_s = end - self.now_s
            step = min(left_s, _next_event(running))
            self._advance(running, step)
            if step == left_s:
                return

    def wait_for(self, job: Job) -> None:
        """Lets time pass until `job` has ended."""
        while True:
            running, _ = self._running(computing=False)
            if job.done_s is not None:
                return
            step = _next_event(running)
            if step == inf:
                raise InternalError(f"{job.kind} of unit {job.unit} waits for something that never ends")
            self._advance(running, step)

    def signature(self, name: Callable[[int], object]) -> list[InLane]:
        """Returns the traffic in flight relative to now, units named by `name`. Equal signatures have equal futures."""
        queues = [*sorted(self.lanes.items()), ("launched", self.launched)]
        return [(lane, [_progress(job, name) for job in queue]) for lane, queue in queues if queue]

    # ---- one event at a time

    def _running(self, *, computing: bool) -> tuple[list[tuple[Job, float]], Load]:
        """Returns the running jobs, each with the total seconds of its latency or transfer, whichever runs, at its
        present pace. If several share resources, also the demand on each level's links: above 1, all its users slow
        down."""
        active = self._active()
        load: Load = {}
        transferring = [job.work for job in active if job.latency_left <= 0]
        if self.cores is not None and computing and active:
            load[HOST] = min(1.0, self.cores) / self.cores
        if load or len(transferring) > 1:
            for work in transferring:
                for level, share in work.shares:
                    load[level] = load.get(level, 0.0) + share
        running = []
        for job in active:
            work = job.work
            if job.latency_left > 0:
                pace = work.stretch if computing else 1.0
            else:
                pace = work.transfer_s
                if load:
                    pace *= max([1.0, *[load[level] for level, _ in work.shares]])
            running.append((job, pace))
        return running, load

    def _slowness(self, running: list[tuple[Job, float]], load: Load, moving: float) -> float:
        """Seconds that a second of compute takes now."""
        if self.cores is not None:
            return max(1.0, load.get(HOST, 0.0))
        taken = 0.0
        for job, pace in running:
            cost = job.work.cost
            taken += cost.taken
            if job.latency_left <= 0 and pace > 0:
                taken += moving * cost.memory_s / pace  # in proportion to the transfer's present pace
        return slowdown(taken) if taken else 1.0

    def _active(self) -> list[Job]:
        """Returns the head of each lane that may run now. Ends heads with nothing left to do."""
        held = len(self.launched)
        active = self._heads()
        while len(self.launched) < held:  # those that begin may have held up an earlier lane
            held = len(self.launched)
            active = self._heads()
        return active

    def _heads(self) -> list[Job]:
        active = []
        for queue in self.lanes.values():
            while queue:
                head = queue[0]
                if head.after is not None and head.after.done_s is None:
                    break
                if head.position == len(head.chain):
                    head.done_s = self.now_s
                    queue.popleft()
                    continue
                if not head.begun:
                    if self.implicit and head.lane not in COPIES and not self._is_next(head):
                        break
                    self._begin(head)
                active.append(head)
                break
        return active

    def _is_next(self, job: Job) -> bool:
        """Whether all collectives that were launched before the job's next one have begun."""
        if self.launched[0] is not job:
            return False
        if job.position == len(job.chain) - 1:
            self.launched.popleft()
        return True

    def _begin(self, job: Job) -> None:
        job.begun, job.started_s, job.share_left = True, self.now_s, 1.0
        job.work = job.chain[job.position]
        job.latency_left = job.work.latency_s

    def _advance(self, running: list[tuple[Job, float]], step: float) -> None:
        self.now_s += step
        for job, pace in running:
            if job.latency_left > 0:
                job.latency_left -= step / pace
                if job.latency_left <= 1e-15:
                    job.latency_left = 0.0
                    if job.work.transfer_s == 0.0:
                        self._finish(job)
                continue
            job.share_left -= step / pace if pace > 0 else 1.0
            if job.share_left <= 1e-12:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        self.finished(job, job.work, job.started_s, self.now_s)
        job.position += 1
        job.begun = False
        if job.position == len(job.chain):
            job.done_s = self.now_s
            self.lanes[job.lane].popleft()


def _next_event(running: list[tuple[Job, float]]) -> float:
    """Seconds until a latency or a transfer ends."""
    least = inf
    for job, pace in running:
        left = pace * (job.latency_left if job.latency_left > 0 else job.share_left)
        if left < least:
            least = left
    return least


def _progress(job: Job, name: Callable[[int], object]) -> tuple[object, ...]:
    before = job.after if job.after is not None and job.after.done_s is None else None
    waits = before and (name(before.unit), before.kind)
    return (name(job.unit), job.kind, job.position, round(job.share_left, 9), round(job.latency_left, 12), waits)
