"""One level after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeromesh.cost import CollectiveCost, Constants, Group, Operation, collective_cost, one_after_another
from zeromesh.strategy import Collective

if TYPE_CHECKING:
    from torch import Tensor

    from zeromesh.comm import AxisGroup


class Hierarchical(Collective):
    """Level by level, the outermost one carrying pieces of 1/(ranks inside), each level waiting for the one before."""

    name = "hierarchical"

    def joint_cost(self, group: Group, operation: Operation, full_bytes: float, constants: Constants) -> CollectiveCost:
        if len(group.hops) <= 1:
            return collective_cost(group, operation, full_bytes, constants)
        inner, outer = group.inner(), group.outermost()
        piece = full_bytes if operation == "broadcast" else full_bytes / inner.size
        across = collective_cost(outer, operation, piece, constants)
        # An all-reduce scatters inside, sums the pieces across, and gathers inside.
        inside: tuple[Operation, ...] = ("reduce_scatter", "all_gather") if operation == "all_reduce" else (operation,)
        return one_after_another(across, *(self.joint_cost(inner, op, full_bytes, constants) for op in inside))

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
