"""One level after the other; and all levels at once, which engines issue that know of none."""

from __future__ import annotations

from zeromesh.strategy import Collective


class Flat(Collective):
    """One ring over all ranks, or a tree for an all-reduce."""

    name = "flat"
    by_level = False
    costs = "zeromesh.collectives.costs:FlatCost"


class Hierarchical(Collective):
    """Level by level, the outermost one carrying pieces of 1/(ranks inside), each level waiting for the one before."""

    name = "hierarchical"
    costs = "zeromesh.collectives.costs:HierarchicalCost"
