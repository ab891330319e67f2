"""Seconds of the schedule's transfers: one collective over one axis of a layout, on a given cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Self, cast

from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.collective import HOST, CollectiveCost, Operation, collective_cost, one_after_another
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import Constants
from zeromesh.cost.contention import memory_passes, taken_share
from zeromesh.cost.group import Group
from zeromesh.schedule.transfer import Transfer, wire_bytes
from zeromesh.strategy import Axis
from zeromesh.wires import coded

SUMMED_NATIVELY = ("fp64", "fp32")
"""Wires on which gloo sums an all-reduce. On others, the engine scatters and gathers there, and sums in fp32 itself."""

_COMPUTE_BYTES = 2  # a quantiser reads and writes 16-bit values


@dataclass(frozen=True, slots=True)
class TransferModel:
    """A cluster with the constants, and a cache: a step repeats a few distinct transfers."""

    cluster: Cluster  # only the ranks in use; its levels are the mesh axes by name
    constants: Constants
    compute: ComputeModel  # for the quantisers
    _groups: dict[tuple[tuple[str, int], ...], Group] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    _costs: dict[tuple[object, ...], CollectiveCost] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    _busy: list[TransferModel] = field(init=False, default_factory=list, compare=False, repr=False)

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, cluster: Cluster, constants: Constants, compute: ComputeModel) -> Self:
        """Returns one shared model for equal arguments."""
        return cls(cluster, constants, compute)

    def group(self, axes: Sequence[Axis]) -> Group:
        key = tuple((axis.mesh_axis, axis.size) for axis in axes)
        if key not in self._groups:
            self._groups[key] = Group.of(self.cluster, key, self.constants)
        return self._groups[key]

    def cost(self, transfer: Transfer) -> CollectiveCost:
        """The cost of one transfer over its axis, including quantisers if its wire has any."""
        return self.joint((transfer.axis,), cast("Operation", transfer.operation), transfer.numel, transfer.wire)

    def joint(
        self, axes: Sequence[Axis], operation: Operation, numel: int, wire: str, algorithm: str = "flat"
    ) -> CollectiveCost:
        """The cost of one collective on a region of `numel` elements, over the group of several axes."""
        key = (*((axis.mesh_axis, axis.size) for axis in axes), operation, numel, wire, algorithm)
        if key not in self._costs:
            if operation == "all_reduce" and self.cluster.device.cores is not None and wire not in SUMMED_NATIVELY:
                halves = [self.joint(axes, half, numel, wire, algorithm) for half in ("reduce_scatter", "all_gather")]
                self._costs[key] = one_after_another(*halves)
            else:
                cost = self._hosted(self._joint(axes, operation, numel, wire, algorithm), axes, operation)
                cost = self._with_taken(cost, axes)
                cost = self.with_kernels(cost, self._coding_bytes(axes, operation, numel, wire))
                if beside := self._beside_compute():
                    # The cost of the same collective on links beside computation, less its own. If cores compute and
                    # move bytes, the network divides them, and only latencies are compared.
                    slower = beside.joint(axes, operation, numel, wire, algorithm)
                    longer = slower.seconds - cost.seconds
                    if self.cluster.device.cores is not None:
                        longer = slower.latency_s - cost.latency_s
                    cost = replace(cost, busy_latency_s=max(0.0, longer))
                self._costs[key] = cost
        return self._costs[key]

    def with_kernels(self, cost: CollectiveCost, moved_bytes: float) -> CollectiveCost:
        """Adds kernels that move `moved_bytes` through the device's memory, on the collective's own lane."""
        return cost.with_kernels(self.compute.memory(moved_bytes), self.cluster.device.cores) if moved_bytes else cost

    def _beside_compute(self) -> TransferModel | None:
        """The model of links as measured beside computation; None if they were not measured so."""
        levels = tuple(level.beside_computation() for level in self.cluster.levels)
        if levels == self.cluster.levels:
            return None
        if not self._busy:
            self._busy.append(replace(self, cluster=replace(self.cluster, levels=levels)))
        return self._busy[0]

    def _hosted(self, cost: CollectiveCost, axes: Sequence[Axis], operation: Operation) -> CollectiveCost:
        """Adds the time of the device's own cores, if they move the bytes. Over several axes this is at the rate of the
        slowest, with a call for each."""
        cores = self.cluster.device.cores
        levels = [self.cluster.level(axis.mesh_axis) for axis in axes]
        known = [level.host_bytes_per_s * level.share(operation) for level in levels if level.host_bytes_per_s]
        if cores is None or not known or not cost.busy:
            return cost
        calls = sum(level.host_call_s for level in levels) / cores
        moving = cost.sent_bytes / min(known) / cores
        # The measured latency includes a call's processor time.
        seconds = max(cost.latency_s, calls) + max(cost.transfer_s, moving)
        return replace(cost, seconds=seconds, busy=(*cost.busy, (HOST, calls + moving)))

    def _with_taken(self, cost: CollectiveCost, axes: Sequence[Axis]) -> CollectiveCost:
        """Adds the collective's share of a computing device; if cores move the bytes too, the network divides them."""
        if self.cluster.device.cores is not None:
            return cost
        passes = memory_passes(self.group(axes), self.constants)
        return replace(
            cost,
            taken=taken_share(self.cluster, axes, self.constants),
            memory_s=self.compute.memory(passes * cost.sent_bytes),
        )

    def _joint(
        self, axes: Sequence[Axis], operation: Operation, numel: int, wire: str, algorithm: str
    ) -> CollectiveCost:
        group = self.group(axes)
        ranks = prod(axis.size for axis in axes)
        full_bytes = ranks * wire_bytes(-(-numel // ranks), wire)
        parts = (operation,) if coded(wire) is None else _exchanges(operation)
        costs = [collective_cost(group, part, full_bytes, self.constants, algorithm=algorithm) for part in parts]
        return costs[0] if len(costs) == 1 else one_after_another(*costs)

    def _coding_bytes(self, axes: Sequence[Axis], operation: Operation, numel: int, wire: str) -> float:
        """Bytes that quantisers read and write. A scatter quantises everything, and sums into one part. A gather
        quantises one part, and restores everything. The wire's bytes count twice."""
        if coded(wire) is None or self.group(axes).size == 1:
            return 0.0
        ranks = prod(axis.size for axis in axes)
        whole, part = numel * _COMPUTE_BYTES, numel * _COMPUTE_BYTES / ranks
        once = whole + part + 2 * ranks * wire_bytes(-(-numel // ranks), wire)
        return len(_exchanges(operation)) * once


def _exchanges(operation: Operation) -> tuple[Operation, ...]:
    """The exchanges of a quantised collective. A reduction is an all-to-all with a local sum, since a ring would
    quantise at every hop."""
    if operation == "all_reduce":
        return ("all_to_all", "all_gather")
    return ("all_to_all",) if operation == "reduce_scatter" else (operation,)
