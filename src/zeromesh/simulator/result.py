"""The results of a simulation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

from zeromesh.errors import short_repr
from zeromesh.parallel import WHOLE, Parallel
from zeromesh.simulator.memory import MemoryBytes
from zeromesh.trace import Trace
from zeromesh.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTraffic:
    """One axis of the layout, and the bytes that an average device sends on it in one step."""

    axis: str
    size: int
    stage: str
    bytes_sent_per_device: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRank:
    """Step and peak memory of rank `rank` of a pipeline. `count` ranks from there on have equal parts."""

    rank: int
    count: int
    step_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersShare:
    """Balance of one optimizer that steps by owners."""

    optimizer: str
    tensors: int
    ranks: int  # that share the tensors
    balance: float  # largest share of work, divided by the mean
    bound: float  # a lower bound on `balance` for every choice
    fullest: int  # the rank among them that holds most
    held_bytes: float  # by that rank: states, and values that it keeps
    sliced_bytes: float  # by each rank for AdamW on slices of the same tensors

    def __str__(self) -> str:
        return (
            f"{self.optimizer} by owners: {self.tensors} tensors on {self.ranks} ranks; the busiest has "
            f"{self.balance:.2f} times the mean's work (no choice is below {self.bound:.2f}); rank {self.fullest} of "
            f"them holds most, {format_bytes(self.held_bytes)} of states and values "
            f"(adamw on slices: {format_bytes(self.sliced_bytes)})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One simulated step. With a pipeline, step and traffic are the slowest rank's, memory the fullest rank's."""

    strategy: str  # in normal form
    engine: str
    world: int  # devices, all together
    micro_batches: int  # of one step on one device
    step_s: float  # from one optimizer step to the next
    tokens_per_s_per_device: float
    mfu: float  # model FLOPs over the peak in the parameters' dtype
    compute_s: float  # part of the step, including the slow-down by communication
    exposed_comm_s: float  # seconds that the device stands still for communication
    exposed: tuple[tuple[str, str, float], ...]  # (axes, collective, seconds), longest first
    memory: MemoryBytes  # at the peak
    memory_limit_bytes: float  # of the device, less the margin
    axes: tuple[AxisTraffic, ...]  # axes inside the model come last
    parallel: Parallel = WHOLE  # degrees that divide the model in addition to data parallelism
    owners: tuple[OwnersShare, ...] = ()  # of each optimizer that steps by owners
    ranks: tuple[PipelineRank, ...] = ()  # of a pipeline, one for each kind
    trace: Trace | None = None  # events of the step, if asked for
    host_memory_bytes: float = 0.0  # of each device's rank
    machine_devices: int = 1  # devices whose ranks share a machine's memory
    machine_limit_bytes: float = inf  # usable memory of a machine; infinite if it is unknown

    __repr__ = short_repr

    @property
    def named(self) -> str:
        """The degrees, if the model is divided, and the strategy."""
        return " ".join(text for text in (str(self.parallel), self.strategy) if text)

    @property
    def fits(self) -> bool:
        """Whether the peak stays within the device's memory less the margin, and shards within the machine's memory."""
        return self.memory.total <= self.memory_limit_bytes and self.machine_memory_bytes <= self.machine_limit_bytes

    @property
    def machine_memory_bytes(self) -> float:
        """Bytes that all ranks of a machine keep in its memory together."""
        return self.host_memory_bytes * self.machine_devices

    @property
    def memory_text(self) -> str:
        """Peak memory of a device, and of shards on its host, as text."""
        host, machine = format_bytes(self.host_memory_bytes), format_bytes(self.machine_memory_bytes)
        beside = f" + {host} on the host ({machine} a machine)" if self.host_memory_bytes else ""
        return f"{format_bytes(self.memory.total)}{beside}"

    def notes(self) -> list[str]:
        """Returns lines on how even owners are, and on how much memory is missing."""
        return [*map(str, self.owners), *([] if self.fits else [self._lacks()])]

    def _lacks(self) -> str:
        places = (
            ("per device", self.memory.total, self.memory_limit_bytes),
            ("of a machine's memory", self.machine_memory_bytes, self.machine_limit_bytes),
        )
        text = "does not fit: " + "; ".join(
            f"{format_bytes(needed)} {place} are needed and {format_bytes(limit)} are usable, "
            f"{format_bytes(needed - limit)} too much"
            for place, needed, limit in places
            if needed > limit
        )
        more = sum(share.held_bytes - share.sliced_bytes for share in self.owners)
        if more > 0:
            text += (
                f"; owners hold up to {format_bytes(more)} more than slices would: shard states over more ranks, or "
                f"leave adamw on slices"
            )
        return text

    def to_json(self) -> dict[str, Any]:
        """The object that `zeromesh simulate --json` prints."""
        same = ("strategy", "engine", "world", "micro_batches", "step_s", "tokens_per_s_per_device", "mfu", "compute_s")
        return {name: getattr(self, name) for name in same} | {
            "exposed_comm_s": self.exposed_comm_s,
            "exposed": [{"axis": axis, "collective": name, "seconds": s} for axis, name, s in self.exposed],
            "memory_bytes": self.memory.as_dict(),
            "host_memory_bytes": self.host_memory_bytes,
            "machine_memory_bytes": self.machine_memory_bytes,
            "machine_memory_limit_bytes": self.machine_limit_bytes if isfinite(self.machine_limit_bytes) else None,
            "fits": self.fits,
            "axes": [asdict(axis) for axis in self.axes],
            "owners": [asdict(share) for share in self.owners],
            "parallel": asdict(self.parallel),
            "pipeline": [asdict(rank) for rank in self.ranks],
        }
