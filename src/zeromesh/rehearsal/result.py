"""The results of a rehearsal, as values, and the failures on any rank. Torch-free: one process makes them, another
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
"""The lane of all kernels that are on none of the engine's lanes: the model's own, and others issued beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in a step or before it. `unit` is a name, "" for the root, None if there is no unit."""

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
    """The most memory in use, and reserved by the allocator, during one place."""

    place: Place
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """A rehearsed rank's share of its machine's memory: the model's state by kind, and the most in use. The machine has
    `ranks` ranks (0 without a cluster), which together may take `limit_bytes`; None if that is unknown."""

    kinds: tuple[MemoryLine, ...]
    peak_bytes: int
    ranks: int = 0
    limit_bytes: float | None = None

    @property
    def failure(self) -> str | None:
        """The failure, if the machine has too little memory for its ranks; else None."""
        wanted = self.ranks * self.peak_bytes
        if self.limit_bytes is None or wanted <= self.limit_bytes:
            return None
        return (
            f"{self.ranks} ranks of a machine keep {format_bytes(wanted)} in its memory, of which "
            f"{format_bytes(self.limit_bytes)} are usable"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the rehearsed rank's device.

    `retries`: how often in a step there is no room for a further segment, so that the allocator waits for the device
    and frees unused segments.
    """

    kinds: tuple[MemoryLine, ...]  # of the model's state
    rest_bytes: int  # in use between two steps: state and all else
    peaks: tuple[Peak, ...]  # by place, each place once, in the order of first visit
    growth: tuple[Peak, ...] = ()  # each time that the allocator reserves more than ever before, in order
    overhead_bytes: float = 0.0  # of a process without its tensors: context, communicators; 0 without a cluster
    limit_bytes: float | None = None  # of the device, less the margin; None without a cluster
    retries: int = 0
    host: HostMemory | None = None  # if shards lie in the host's memory

    @property
    def predicted_bytes(self) -> int:
        return sum(kind.predicted_bytes for kind in self.kinds)

    @property
    def allocated_bytes(self) -> int:
        return sum(kind.allocated_bytes for kind in self.kinds)

    @property
    def peak(self) -> Peak:
        """The peak of the place with the most memory in use; the first one if there are several."""
        return max(self.peaks, key=lambda peak: peak.allocated_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        return max((peak.reserved_bytes for peak in self.growth), default=0)

    @property
    def activations_bytes(self) -> int:
        """Bytes at the peak beyond those in use between steps."""
        return max(0, self.peak.allocated_bytes - self.rest_bytes)

    @property
    def peak_bytes(self) -> float:
        return self.peak.allocated_bytes + self.overhead_bytes

    @property
    def needed_bytes(self) -> float:
        """The most bytes of the device that the process reserves."""
        return self.peak_reserved_bytes + self.overhead_bytes

    @property
    def fails_at(self) -> Peak | None:
        """The first place at which the device's memory does not suffice; None if it always does."""
        limit = self.limit_bytes
        if limit is None:
            return None
        return next((peak for peak in self.growth if peak.reserved_bytes + self.overhead_bytes > limit), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Number of kernels and collectives that a step launches for one unit, for one kind of transfers or for
    computation."""

    unit: str
    kind: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRead:
    """A line of code at which the host waits for the device, and how often per step."""

    what: str
    where: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective; all ranks of its group must call it alike."""

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
    world: int  # number of ranks in the run
    rank: int  # the rank that was rehearsed
    micro_batches: int  # of a step
    cluster: str  # its device and links give the timeline; empty without one
    memory: Memory  # of the device
    axes: tuple[TrafficLine, ...] = ()
    launches: tuple[Launches, ...] = ()  # by unit and kind, of a step
    blocks: tuple[str, ...] = ()  # names of the block units
    races: tuple[str, ...] = ()  # found by the checker, like the next
    early_frees: tuple[str, ...] = ()
    host_reads: tuple[HostRead, ...] = ()  # by line of code
    calls: tuple[Call, ...] = ()  # the collectives of a step, in order
    failures: tuple[str, ...] = ()  # errors that will come, and where
    host_s: float = 0.0  # the host's work in a step, on this machine, whose kernels only compute shapes
    step_s: float | None = None  # on the cluster; None without one
    exposed_s: float | None = None  # part of it in which the computation waits for communication
    trace: Trace | None = None  # of the step

    __repr__ = short_repr

    def launches_per_unit(self) -> dict[str, int]:
        """By kind, the most launches of any block; of any unit if the model has no blocks."""
        units = set(self.blocks) or {line.unit for line in self.launches}
        most: dict[str, int] = {}
        for line in self.launches:
            if line.unit in units:
                most[line.kind] = max(most.get(line.kind, 0), line.count)
        return most

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints for one rank."""
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
    """Returns the failures of all ranks, one line each, the first rank's first."""
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
