"""The cost of HO-Ring: the slices in which two levels work at once, and how many of them wait to be summed."""

from __future__ import annotations

from math import prod

from zeromesh.collectives.costs import HierarchicalCost
from zeromesh.cost.collective import CollectiveCost, Operation, mean_taken, merge_busy, one_after_another, ring_cost
from zeromesh.cost.constants import Constants
from zeromesh.cost.group import Group
from zeromesh.schedule.memory import MESSAGES_BYTES, part_numel
from zeromesh.schedule.transfer import Transfer
from zeromesh.schedule.unit import ITEM_BYTES

SLICES = 16
"""Number of slices of a shard. One level starts on a slice when the other has delivered it, so the first and the last
slice do not overlap."""

SLICE_BYTES = range(1 << 18, 1 << 20)
"""Shortest and longest slice. Shorter slices would cost more CPU time than they hide."""

WINDOW = 4
"""Slices under way on each level, when two levels reduce at once."""


def slice_bytes(shard_bytes: int) -> int:
    """Returns the length of a shard's slices, a multiple of every element's size."""
    return min(max(shard_bytes // SLICES, SLICE_BYTES.start), SLICE_BYTES.stop) // 64 * 64


def sum_terms(major: int, minor: int) -> int:
    """Terms that a rank has room for while it reduces over axes of these sizes at once."""
    return WINDOW * (major * minor - 1)


class HoRingCost(HierarchicalCost):
    """Costs the time of the slower level plus one slice of the other."""

    def joint_cost(self, group: Group, operation: Operation, full_bytes: float, constants: Constants) -> CollectiveCost:
        if len(group.hops) <= 1 or operation == "broadcast":
            return super().joint_cost(group, operation, full_bytes, constants)
        if operation == "all_reduce":
            scatter, gather = (
                self.joint_cost(group, half, full_bytes, constants) for half in ("reduce_scatter", "all_gather")
            )
            return one_after_another(scatter, gather)
        inner, outer = group.inner(), group.outermost()
        slices = outer.size
        across = ring_cost(outer, operation, full_bytes / inner.size, constants)
        spread = ring_cost(inner, operation, full_bytes / slices, constants)
        # One launch for both rings: they are one kernel.
        across_s, spread_s = across.seconds - constants.launch_s, spread.seconds - constants.launch_s
        return CollectiveCost(
            seconds=constants.launch_s + max(across_s, slices * spread_s) + spread_s,
            busy=merge_busy(across.busy, *[spread.busy] * slices),
            sent_bytes=across.sent_bytes + slices * spread.sent_bytes,
        )

    def pair_cost(
        self, first: CollectiveCost, second: CollectiveCost, steps: tuple[Transfer, Transfer]
    ) -> CollectiveCost:
        sizes = [step.axis.size for step in steps]
        shard_numel = -(-max(step.numel for step in steps) // prod(sizes))
        item_bytes = ITEM_BYTES[steps[0].wire]
        longest = slice_bytes(shard_numel * item_bytes)
        if steps[0].operation == "all_gather":  # a gather passes on every shard of the ring
            rounds = -(-shard_numel // (longest // item_bytes)) * sizes[0]
        else:  # a reduction sums one slice of all shards in a round
            wide, terms = max(item_bytes, ITEM_BYTES["fp32"]), sum_terms(*sizes)
            numel = part_numel(MESSAGES_BYTES, item_bytes, wide, terms=terms, longest_bytes=longest)
            rounds = -(-shard_numel // max(1, numel))  # 0 if there are more ranks than room
        return overlapped_cost(first, second, rounds)


def overlapped_cost(first: CollectiveCost, second: CollectiveCost, slices: int) -> CollectiveCost:
    """The cost of two collectives if each works on a slice as soon as the other has delivered it: the slower one's
    time, plus one slice of the other. On the same links both take their full time."""
    slower, other = max(first.seconds, second.seconds), min(first.seconds, second.seconds)
    busy = merge_busy(first.busy, second.busy)
    seconds = max(slower + other / max(1, slices), *(share for _, share in busy))
    return CollectiveCost(
        seconds=seconds,
        busy=busy,
        sent_bytes=first.sent_bytes + second.sent_bytes,
        busy_latency_s=max(first.busy_latency_s, second.busy_latency_s),
        taken=mean_taken((first, second), seconds),
        memory_s=first.memory_s + second.memory_s,
    )
