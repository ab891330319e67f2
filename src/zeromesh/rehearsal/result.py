"""The results of a rehearsal, as values, and the failures on any rank. Torch-free: one process makes them, and another
shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from zeromesh.errors import short_repr
from zeromesh.trace import MemoryLine, Trace, TrafficLine
from zeromesh.units import format_bytes

Phase = Literal["build", "shard", "forward", "recompute", "backward", "optimizer", "other"]

COMPUTE = "compute"
"""The lane of all that is on no lane of the engine: the model's own kernels, and others issued beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something happens, in a step or before it; `unit` is a name, "" for the root, None where it belongs to
    none."""

    phase: Phase
    unit: str | None = None

    def __str__(self) -> str:
        match self.phase:
            case "build":
                return "building the model"
            case "shard":
                return "zm.shard"
            case "other":
                return "the step, outside of forward and backward"
            case "optimizer":
                return "the optimizer's step"
            case "recompute":
                return f"the recomputation of {self.unit or 'the root'}"
            case phase:
                return f"the {phase} of {self.unit or 'the root'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most that is in use, and that the allocator has reserved, while one place lasts."""

    place: Place
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """A rehearsed rank's share of its machine's memory: the model's state by kind, and the most that is in use. A
    machine has so many `ranks`, 0 without a cluster, which together may take `limit_bytes`; None if it is unknown."""

    kinds: tuple[MemoryLine, ...]
    peak_bytes: int
    ranks: int = 0
    limit_bytes: float | None = None

    @property
    def failure(self) -> str | None:
        """The failure, if a machine has too little memory for its ranks."""
        wanted = self.ranks * self.peak_bytes
        if self.limit_bytes is None or wanted <= self.limit_bytes:
            return None
        return (
            f"{self.ranks} ranks of a machine keep {format_bytes(wanted)} in its memory, of which "
            f"{format_bytes(self.limit_bytes)} are usable"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the rehearsed rank's device.

    `retries`: how often a step has no room for a further segment, so that the allocator waits for the device and gives
    free ones back.
    """

    kinds: tuple[MemoryLine, ...]  # of the model's state
    rest_bytes: int  # in use between two steps, state and all else
    peaks: tuple[Peak, ...]  # by place, each place once, in the order in which they are first come to
    growth: tuple[Peak, ...] = ()  # in which the allocator has reserved more than ever before, in the order of time
    overhead_bytes: float = 0.0  # of a process beside its tensors: context, communicators; 0 without a cluster
    limit_bytes: float | None = None  # of the device, its margin off; None without a cluster
    retries: int = 0
    host: HostMemory | None = None  # where shards lie in the host's memory

    @property
    def predicted_bytes(self) -> int:
        return sum(kind.predicted_bytes for kind in self.kinds)

    @property
    def allocated_bytes(self) -> int:
        return sum(kind.allocated_bytes for kind in self.kinds)

    @property
    def peak(self) -> Peak:
        """Where most is in use; the first such place."""
        return max(self.peaks, key=lambda peak: peak.allocated_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        return max((peak.reserved_bytes for peak in self.growth), default=0)

    @property
    def activations_bytes(self) -> int:
        """At the peak, beside the memory in use between steps."""
        return max(0, self.peak.allocated_bytes - self.rest_bytes)

    @property
    def peak_bytes(self) -> float:
        return self.peak.allocated_bytes + self.overhead_bytes

    @property
    def needed_bytes(self) -> float:
        """Bytes of the device that the process reserves at most."""
        return self.peak_reserved_bytes + self.overhead_bytes

    @property
    def fails_at(self) -> Peak | None:
        """The first place at which the device's memory does not suffice."""
        limit = self.limit_bytes
        if limit is None:
            return None
        return next((peak for peak in self.growth if peak.reserved_bytes + self.overhead_bytes > limit), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Kernels and collectives of one unit in a step, of one kind of transfers or of the computation."""

    unit: str
    kind: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRead:
    """A place in the code at which the host waits for the device, and how often in a step."""

    what: str
    where: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective, as all ranks of its group must call it."""

    axis: str
    operation: str
    sent_bytes: int

    def __str__(self) -> str:
        return f"{self.operation} over {self.axis} that sends {self.sent_bytes:,} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    model: str
    strategy: str
    mesh: tuple[tuple[str, int], ...]  # (axis, size), outermost first
    world: int  # how many ranks there would be
    rank: int  # the one that was rehearsed
    micro_batches: int  # of a step
    cluster: str  # whose device and links the timeline is of; empty without one
    memory: Memory  # of the device
    axes: tuple[TrafficLine, ...] = ()
    launches: tuple[Launches, ...] = ()  # by unit and kind, of a step
    blocks: tuple[str, ...] = ()  # names of the block units
    races: tuple[str, ...] = ()  # found by the checker, as the next
    early_frees: tuple[str, ...] = ()
    host_reads: tuple[HostRead, ...] = ()  # by line of code
    calls: tuple[Call, ...] = ()  # the collectives of a step, in order
    failures: tuple[str, ...] = ()  # errors to come, and where
    host_s: float = 0.0  # of a step: the host's work on this machine, whose kernels compute shapes alone
    step_s: float | None = None  # of a step on the cluster; None without one
    exposed_s: float | None = None  # of that, while the computation waits for communication
    trace: Trace | None = None  # of the step

    __repr__ = short_repr

    def launches_per_unit(self) -> dict[str, int]:
        """By kind, the most of any block; of any unit where the model has no blocks."""
        units = set(self.blocks) or {line.unit for line in self.launches}
        most: dict[str, int] = {}
        for line in self.launches:
            if line.unit in units:
                most[line.kind] = max(most.get(line.kind, 0), line.count)
        return most

    def to_json(self) -> dict[str, Any]:
        """The output of `--json` for one rank."""
        memory = self.memory
        return {
            "model": self.model,
            "strategy": self.strategy,
            "mesh": dict(self.mesh),
            "world": self.world,
            "rank": self.rank,
            "micro_batches": self.micro_batches,
            "cluster": self.cluster or None,
            "memory": {
                "predicted_bytes": memory.predicted_bytes,
                "allocated_bytes": memory.allocated_bytes,
                "peak_allocated_bytes": memory.peak.allocated_bytes,
                "peak_reserved_bytes": memory.peak_reserved_bytes,
                "allocator_retries": memory.retries,
                "peak_at": str(memory.peak.place),
                "activations_bytes": memory.activations_bytes,
                "rest_bytes": memory.rest_bytes,
                "overhead_bytes": round(memory.overhead_bytes),
                "limit_bytes": None if memory.limit_bytes is None else round(memory.limit_bytes),
                "fits": None if memory.limit_bytes is None else memory.fails_at is None,
                "fails_at": None if memory.fails_at is None else str(memory.fails_at.place),
                "kinds": _kinds(memory.kinds),
            },
            "host_memory": None
            if memory.host is None
            else {
                "peak_allocated_bytes": memory.host.peak_bytes,
                "ranks": memory.host.ranks or None,
                "machine_limit_bytes": None if memory.host.limit_bytes is None else round(memory.host.limit_bytes),
                "fits": None if memory.host.limit_bytes is None else memory.host.failure is None,
                "kinds": _kinds(memory.host.kinds),
            },
            "bytes_by_axis": {axis.label: axis.sent_bytes for axis in self.axes},
            "collectives_by_axis": {axis.label: axis.collectives for axis in self.axes},
            "predicted_bytes_by_axis": {axis.label: axis.predicted_bytes for axis in self.axes},
            "launches_per_unit": self.launches_per_unit(),
            "races": list(self.races),
            "early_frees": list(self.early_frees),
            "host_reads": [{"what": read.what, "where": read.where, "count": read.count} for read in self.host_reads],
            "failures": list(self.failures),
            "host_s": self.host_s,
            "step_s": self.step_s,
            "exposed_s": self.exposed_s,
        }


def _kinds(lines: Sequence[MemoryLine]) -> dict[str, dict[str, int]]:
    return {one.kind: {"predicted_bytes": one.predicted_bytes, "allocated_bytes": one.allocated_bytes} for one in lines}


def failures_of(rehearsals: Sequence[Rehearsal]) -> tuple[str, ...]:
    """One line each, that of the first rank first."""
    several = len(rehearsals) > 1
    found = []
    for rehearsal in rehearsals:
        on = f"rank {rehearsal.rank}: " if several else ""
        found += [f"{on}{failure}" for failure in (*rehearsal.failures, *_memory(rehearsal))]
        found += [f"{on}race: {race}" for race in rehearsal.races]
        found += [f"{on}memory freed too early: {free}" for free in rehearsal.early_frees]
    return (*found, *_order(rehearsals))


def _memory(rehearsal: Rehearsal) -> list[str]:
    memory, fails = rehearsal.memory, rehearsal.memory.fails_at
    if fails is None or memory.limit_bytes is None:
        return []
    return [
        f"{rehearsal.strategy} does not fit: it needs {format_bytes(memory.needed_bytes)} of a device of "
        f"{rehearsal.cluster}, and {format_bytes(memory.limit_bytes)} are usable; it runs out in {fails.place}. "
        f"Recompute activations, take smaller micro-batches, or shard over more ranks (`zeromesh plan` finds what fits)"
    ]


def _order(rehearsals: Sequence[Rehearsal]) -> list[str]:
    first, found = rehearsals[0], []
    for other in rehearsals[1:]:
        pairs = enumerate(zip_longest(first.calls, other.calls), 1)
        apart = next(((number, *pair) for number, pair in pairs if pair[0] != pair[1]), None)
        if apart is not None:
            number, here, there = apart
            found.append(
                f"ranks {first.rank} and {other.rank} issue different collectives, of which each would wait for the "
                f"other: as number {number} of a step {here or 'none'} on rank {first.rank}, {there or 'none'} on rank "
                f"{other.rank}"
            )
    return found
