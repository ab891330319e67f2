"""One level after the other; and all levels at once, which engines issue that know of none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeromesh.strategy import Collective

if TYPE_CHECKING:
    from torch import Tensor

    from zeromesh.comm import AxisGroup


class Flat(Collective):
    """One ring over all ranks, or a tree for an all-reduce."""

    name = "flat"
    by_level = False
    costs = "zeromesh.collectives.costs:FlatCost"


class Hierarchical(Collective):
    """Level by level, the outermost one carrying pieces of 1/(ranks inside), each level waiting for the one before."""

    name = "hierarchical"
    costs = "zeromesh.collectives.costs:HierarchicalCost"

    def all_gather(self, region: Tensor, major: AxisGroup, minor: AxisGroup, *, reduced: bool) -> None:
        from zeromesh.comm import all_gather

        all_gather(region.chunk(major.size)[major.rank], minor, reduced=reduced)
        all_gather(region, major, reduced=reduced)

    def reduce_scatter(
        self,
        region: Tensor,
        out: Tensor,
        major: AxisGroup,
        minor: AxisGroup,
        *,
        scales: tuple[float, float],
        accumulate: bool,
        **options: Any,
    ) -> None:
        from zeromesh.comm import reduce_scatter

        part = region.chunk(major.size)[major.rank]
        reduce_scatter(region, part, major, scale=scales[0], **options)
        reduce_scatter(part, out, minor, scale=scales[1], accumulate=accumulate, **options)
