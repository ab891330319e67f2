"""One collective over all levels, as engines issue it that know of none."""

from __future__ import annotations

from zeromesh.cost import CollectiveCost, Constants, Group, Operation, collective_cost
from zeromesh.strategy import Collective


class Flat(Collective):
    """One ring over all ranks, or a tree for an all-reduce."""

    name = "flat"
    by_level = False

    def joint_cost(self, group: Group, operation: Operation, full_bytes: float, constants: Constants) -> CollectiveCost:
        return collective_cost(group, operation, full_bytes, constants)
