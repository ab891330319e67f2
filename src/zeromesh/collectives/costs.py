"""Costs of collectives over several levels: all levels in one ring, or one level after the other."""

from __future__ import annotations

from zeromesh.cost.collective import CollectiveCost, JointCost, Operation, collective_cost, one_after_another
from zeromesh.cost.constants import Constants
from zeromesh.cost.group import Group


class FlatCost(JointCost):
    """Costs of one ring over all ranks; for an all-reduce, of a ring or a tree."""

    def joint_cost(self, group: Group, operation: Operation, full_bytes: float, constants: Constants) -> CollectiveCost:
        return collective_cost(group, operation, full_bytes, constants)


class HierarchicalCost(JointCost):
    """Costs of level after level. The outermost level carries pieces of 1/(ranks inside)."""

    def joint_cost(self, group: Group, operation: Operation, full_bytes: float, constants: Constants) -> CollectiveCost:
        if len(group.hops) <= 1:
            return collective_cost(group, operation, full_bytes, constants)
        inner, outer = group.inner(), group.outermost()
        piece = full_bytes if operation == "broadcast" else full_bytes / inner.size
        across = collective_cost(outer, operation, piece, constants)
        # An all-reduce scatters inside, all-reduces the pieces across, and gathers inside.
        inside: tuple[Operation, ...] = ("reduce_scatter", "all_gather") if operation == "all_reduce" else (operation,)
        return one_after_another(across, *(self.joint_cost(inner, op, full_bytes, constants) for op in inside))
