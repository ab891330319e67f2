"""The schedule's back end on a virtual clock.

[Note: Host] The host issues the device's work in the device's order, and needs time for every transfer. As long as the
device computes for longer than that, the host is ahead and costs nothing, but at most by the launches that the device's
driver queues. If units are small, the host falls behind. The device then stands still until the host has issued the
transfer before its next computation. A step begins with host and device abreast: the step before has ended with numbers
that the host reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from zeromesh.cost.collective import CollectiveCost
from zeromesh.schedule.bucket import Bucket
from zeromesh.schedule.state import Reducing, Reduction
from zeromesh.schedule.transfer import COPIES, RouteKind
from zeromesh.simulator.chains import ByLane, Chains
from zeromesh.simulator.network import InLane, Job, Network, Work
from zeromesh.strategy.stage import HOST
from zeromesh.trace import Event, Kind, row_of

Signature = tuple[float, list[InLane]]
"""How far the host is ahead, and everything in flight."""


@dataclass(slots=True)
class Totals:
    """Running totals; additive over micro-batches."""

    compute_s: float = 0.0
    exposed_s: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))  # (axes, collective)
    sent_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by axis

    def copy(self) -> Totals:
        return Totals(self.compute_s, self.exposed_s.copy(), self.sent_bytes.copy())

    def add_difference(self, later: Totals, earlier: Totals, times: int) -> None:
        """Adds `times` times the difference of two copies."""
        self.compute_s += times * (later.compute_s - earlier.compute_s)
        for mine, new, old in (
            (self.exposed_s, later.exposed_s, earlier.exposed_s),
            (self.sent_bytes, later.sent_bytes, earlier.sent_bytes),
        ):
            for key in new:
                mine[key] += times * (new[key] - old[key])  # type: ignore[index]  # keys of the same dict


class HostSeconds(NamedTuple):
    """Host seconds to issue one transfer, and the seconds by which the host can be ahead."""

    issue: float
    ahead: float


ABREAST = HostSeconds(0.0, 0.0)
"""Issuing takes no time."""


class ClockBackend:
    """Carries out operations by letting a virtual clock run. Its tickets are jobs.

    Args:
        record: True to keep events.
        host: see [Note: Host].
        steps: by unit, for the optimizer's step on slices on the host, which runs beside the next forward: seconds, and
            bytes copied.
    """

    def __init__(
        self,
        chains: Chains,
        *,
        record: bool,
        host: HostSeconds = ABREAST,
        steps: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.chains = chains
        self.mechanics = chains.mechanics
        self.unit_names = tuple(unit.name for unit in chains.schedule.units)
        self.record = record
        cores, implicit = chains.model.cluster.device.cores, chains.mechanics.launch_order == "implicit"
        self.network = Network(self._finished, cores, implicit=implicit)
        self.host = host
        self.host_s = 0.0  # when everything that it has issued is out
        self.totals = Totals()
        self.events: list[Event] = []
        self.micro_batch = -1
        self._steps = steps
        self._stepping: dict[int, Job] = {}
        self._reducing: dict[int, Job] = {}
        self._deferred: list[Job] = []
        self._watch: tuple[str, float] | None = None
        self._seen_exposed_s = 0.0

    @property
    def now_s(self) -> float:
        return self.network.now_s

    # ---- schedule.Backend

    def refresh(self, unit: int) -> Job | None:
        return self._gather("refresh", unit, self._stepping.get(unit))

    def unshard(self, unit: int, *, from_kept: bool, after: Job | None) -> Job | None:
        job = self._gather("from_kept" if from_kept else "unshard", unit, after)
        if job is not None and not self.mechanics.overlap_gather:
            self.wait(job)
        return job

    def reduce(self, unit: int, reduction: Reduction) -> Reducing[Job]:
        after = self._reducing.get(unit)
        micro = self.chains.chain("reduce", unit) if reduction.micro else ()
        boundary = self.chains.chain("boundary", unit) if reduction.boundary else ()
        if boundary and not self.mechanics.overlap_boundary:
            first = self._submit("reduce", unit, micro, after)
            works = tuple(work for _, part in boundary for work in part)
            job = self._reducing[unit] = Job(works, unit, self.micro_batch, "reduce", first)
            self._deferred.append(job)
            return Reducing(job, job)
        stands_still = not self.mechanics.overlap_reduce and not boundary
        first = self._submit("reduce", unit, micro, after)
        if self.chains.schedule.memory.host is not None:
            return self._reduce_beside_copies(unit, reduction, boundary, first, after)
        last = self._submit("boundary", unit, boundary, first or after) or first
        if last is not None:
            self._reducing[unit] = last
        if first is not None and stands_still:
            self.wait(first)
        return Reducing(first, last)

    def wait(self, ticket: Job) -> None:
        if not ticket.lane:
            self._submit_deferred()
        if ticket.done_s is not None:
            return
        if ticket.after is not None:  # that wait is shown under its own name
            self.wait(ticket.after)
        start = self.now_s
        self._watch, self._seen_exposed_s = (ticket.lane, start), 0.0
        self.network.wait_for(ticket)
        self._watch = None
        waited = self.now_s - start
        # If the lane's own transfers do not account for all of the time, the rest was spent waiting for another lane.
        self._expose(ticket.chain[-1], waited - self._seen_exposed_s)
        if self.record and waited > 0:
            self._event(f"wait for {ticket.kind}", "wait", start, ticket.unit)

    def use(self, unit: int) -> None:
        """Does nothing: there is no model."""

    def unuse(self, unit: int) -> None:
        """Does nothing: there is no model."""

    def has_grads(self, unit: int) -> bool:
        """Returns False: each is reduced when its unit's backward ends."""
        return False

    def collect(self, bucket: Bucket) -> Job | None:
        return self._submit("boundary", -1, self.chains.shipped("boundary", bucket.there), None)

    def update(self, bucket: Bucket) -> Job | None:
        self.compute("optimizer", -1, bucket.step_s)
        return self._submit("refresh", -1, self.chains.shipped("refresh", bucket.back), None)

    # ---- the driver's side

    def compute(self, name: str, unit: int, seconds: float, moving: float = 0.0) -> None:
        """Lets the device compute. For the share `moving` of that time it waits for its memory."""
        start = self.now_s
        self.network.compute(seconds, moving)
        self.totals.compute_s += self.now_s - start
        if self.record and self.now_s > start:
            self._event(name, "compute", start, unit)

    def communicate(self, unit: int, chain: tuple[Work, ...]) -> None:
        """Runs collectives that are part of a unit's computation."""
        if chain:
            job = self._submit("within", unit, (("within", chain),), None)
            assert job is not None  # the chain is not empty
            self.wait(job)

    def idle(self, axis: str, name: str, seconds: float) -> None:
        """Lets the device wait: for other ranks of a pipeline, or for its host."""
        start = self.now_s
        self.network.idle(seconds)
        if seconds > 0:
            self.totals.exposed_s[axis, name] += seconds
            if self.record:
                self._event(name, "wait", start, -1)

    def begin_step(self) -> None:
        """Brings the host abreast of the device. The host then steps on one unit after the other."""
        self.host_s = self.now_s
        for unit in (unit for unit in self.chains.schedule.order if self._steps and any(self._steps[unit])):
            seconds, copied_bytes = self._steps[unit]
            self.totals.sent_bytes[HOST] += copied_bytes
            work = Work("step", (HOST,), CollectiveCost(seconds=seconds), (copied_bytes,))
            self._stepping[unit] = self.network.submit(Job((work,), unit, self.micro_batch, "step"), "step")

    def signature(self, name: Callable[[int], object] = lambda unit: unit) -> Signature:
        """Returns everything that the future depends on, except the interpreter's state. `name` names units."""
        lead_s = self.now_s - max(self.host_s, self._host_from()) if self.host.issue else 0.0
        return round(lead_s, 12), self.network.signature(name)

    def end_micro_batch(self) -> None:
        """Runs the reductions that the engine does not hide under the backward."""
        self._submit_deferred()

    def drain(self) -> None:
        self._submit_deferred()
        for queue in list(self.network.lanes.values()):
            while queue:
                self.wait(queue[0])

    # ---- inside

    def _issue(self, job: Job, lane: str) -> Job:
        """Submits a job to its lane as soon as the host gets there: [Note: Host]."""
        if self.host.issue:
            self.host_s = max(self.host_s, self._host_from()) + self.host.issue
            self.idle("host", "issue", self.host_s - self.now_s)
        for work in job.chain:
            for axis, size in zip(work.axes, work.sent_bytes, strict=True):
                self.totals.sent_bytes[axis] += size
        return self.network.submit(job, lane)

    def _host_from(self) -> float:
        """The earliest time at which the host can be now: it queues no launches further ahead."""
        return self.now_s - self.host.ahead

    def _submit(self, kind: RouteKind | Literal["within"], unit: int, chain: ByLane, after: Job | None) -> Job | None:
        """Submits a chain to its lanes. Returns the last job, if there is one."""
        job, name = None, "reduce" if kind == "boundary" else kind  # both are parts of one reduction
        for lane, works in chain:
            after = after if after is not None and after.done_s is None else None
            job = after = self._issue(Job(works, unit, self.micro_batch, name, after), lane)
        return job

    def _gather(self, route: Literal["refresh", "unshard", "from_kept"], unit: int, after: Job | None) -> Job | None:
        """Submits a gather, with the copies up before it and down after it."""
        kind: RouteKind = "unshard" if route == "from_kept" else route
        chain = self.chains.chain(route, unit)
        if self.chains.schedule.memory.host is None:
            return self._submit(kind, unit, chain, after)
        routes = [p.from_kept if route == "from_kept" else p.routes[route] for p in self.chains.schedule.placed[unit]]
        copies = self.chains.copied(kind, (step for each in routes for step in (each.up, each.down)))
        up, down = copies["up"], copies["down"]
        if any(each.passing for each in routes):  # through memory of the lane
            works = tuple(work for _, part in (*up, *chain, *down) for work in part)
            return self._submit(kind, unit, ((chain[0][0], works),), after)
        first = self._submit("up", unit, up, after)
        last = self._submit(kind, unit, chain, first or after) or first
        return self._submit("down", unit, down, last or after) or last or after

    def _reduce_beside_copies(
        self, unit: int, reduction: Reduction, boundary: ByLane, first: Job | None, after: Job | None
    ) -> Reducing[Job]:
        trained = [placed for placed in self.chains.schedule.placed[unit] if placed.buffer.trainable]
        kinds = {"micro": reduction.micro, "accumulate": reduction.accumulate, "boundary": reduction.boundary}
        copies = self.chains.copied("reduce", (step for placed in trained for step in placed.grad_steps(**kinds)))
        last = self._submit("up", unit, copies["up"], first or after) or first
        last = self._submit("boundary", unit, boundary, last or after) or last
        last = self._submit("down", unit, copies["down"], last or after) or last
        if last is not None:
            self._reducing[unit] = last
        return Reducing(last if any("grads" in placed.on_host_kinds for placed in trained) else first, last)

    def _submit_deferred(self) -> None:
        for job in self._deferred:
            self._issue(job, self.chains.lane("boundary", job.chain[0].axes[0]))
        self._deferred.clear()

    def _expose(self, work: Work, seconds: float) -> None:
        if seconds > 1e-12:
            self.totals.exposed_s["+".join(work.axes), work.name] += seconds

    def _finished(self, job: Job, work: Work, start: float, end: float) -> None:
        if self._watch is not None and self._watch[0] == job.lane:
            overlap = end - max(start, self._watch[1])
            self._seen_exposed_s += overlap
            self._expose(work, overlap)
        if self.record:
            axis = "+".join(work.axes)
            event = Event(
                name=work.name,
                kind="communicate",
                resource=row_of(job.lane if job.lane in COPIES else job.kind, work.name, axis),
                start_s=start,
                end_s=end,
                unit=self.unit_names[job.unit] if job.unit >= 0 else None,
                micro_batch=job.micro_batch,
                axis=axis,
                sent_bytes=sum(work.sent_bytes),
            )
            self.events.append(event)

    def _event(self, name: str, kind: Kind, start: float, unit: int) -> None:
        """Records an event on the device that ends now."""
        event = Event(
            name=name,
            kind=kind,
            resource="compute",
            start_s=start,
            end_s=self.now_s,
            unit=self.unit_names[unit] if unit >= 0 else None,
            micro_batch=self.micro_batch,
        )
        self.events.append(event)
