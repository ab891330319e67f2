"""HO-Ring (PaRO, arXiv 2310.06003): the bytes of level after level, with two levels at work at once.

As soon as one level delivers a slice the other passes it on, while the first fetches the next: the time is that of the
slower level plus one slice of the other, instead of the sum of both. How it does that is in `ring.py`: of messages,
which cost little. Elsewhere a slice would be a launch, and its sum several: there the levels follow each other, each as
the backend's own collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeromesh.collectives.hierarchical import Hierarchical

if TYPE_CHECKING:
    from torch import Tensor

    from zeromesh.comm import AxisGroup
    from zeromesh.schedule import Route, Transfer


class HoRing(Hierarchical):
    """Two levels at once; the values are those of level after level to the bit."""

    name = "ho_ring"
    pairs = True
    costs = "zeromesh.collectives.ho_ring.cost:HoRingCost"

    def grouped(self, route: Route) -> tuple[tuple[Transfer, ...], ...]:
        """A step has a partner where both scatter, or both gather, lossless and in the dtype of the region, so that
        nothing is copied between them. A chain of gathers with any other wire is staged as a whole, and has none:
        whether one of its regions lies inside the next would depend on the rank.
        """
        groups: list[tuple[Transfer, ...]] = []
        staged = any(step.wire != route.held for step in route.steps)
        alone = staged and all(step.operation == "all_gather" for step in route.steps)
        for step in route.steps:
            before = groups[-1][0] if groups and len(groups[-1]) == 1 and not alone else None
            if before is None or route.copied in (before.axis, step.axis) or not _at_once(before, step, route.held):
                groups.append((step,))
            else:
                groups[-1] = (before, step)
        return tuple(groups)

    def all_gather(self, region: Tensor, major: AxisGroup, minor: AxisGroup, *, reduced: bool) -> None:
        from zeromesh.collectives.ho_ring.ring import ho_ring_all_gather

        if not minor.transport.messages:
            super().all_gather(region, major, minor, reduced=reduced)
        else:
            ho_ring_all_gather(region, major, minor, reduced=reduced)

    def reduce_scatter(self, region: Tensor, out: Tensor, major: AxisGroup, minor: AxisGroup, **options: Any) -> None:
        from zeromesh.collectives.ho_ring.ring import ho_ring_reduce_scatter

        if not minor.transport.messages:
            super().reduce_scatter(region, out, major, minor, **options)
        else:
            ho_ring_reduce_scatter(region, out, major, minor, **options)


def _at_once(first: Transfer, second: Transfer, held: str) -> bool:
    return first.operation == second.operation != "all_reduce" and first.wire == second.wire == held
