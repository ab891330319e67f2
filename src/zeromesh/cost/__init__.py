"""Seconds and bytes of an op: collectives on a hierarchy, compute, memory. Torch-free."""

from zeromesh.cost.collective import CollectiveCost, JointCost, Operation, collective_cost, one_after_another
from zeromesh.cost.compute import ComputeModel, UnitSeconds
from zeromesh.cost.constants import Constants, Provenance, default_constants, provenance
from zeromesh.cost.contention import MOST_TAKEN, memory_passes, slowdown, taken_share
from zeromesh.cost.group import Group, Hop

__all__ = [
    "MOST_TAKEN",
    "CollectiveCost",
    "ComputeModel",
    "Constants",
    "Group",
    "Hop",
    "JointCost",
    "Operation",
    "Provenance",
    "UnitSeconds",
    "collective_cost",
    "default_constants",
    "memory_passes",
    "one_after_another",
    "provenance",
    "slowdown",
    "taken_share",
]
