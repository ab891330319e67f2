"""HO-Ring (PaRO, arXiv 2310.06003): the bytes of level after level, with two levels at work at once.

As soon as one level delivers a slice the other passes it on, while the first fetches the next: the time is that of the
slower level plus one slice of the other, instead of the sum of both. How it does that is in `ring.py`: on gloo, where a
message costs little. On other backends a slice would be a launch, and its sum several: there the levels follow each
other, each as the backend's own collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeromesh.collectives.hierarchical import Hierarchical

if TYPE_CHECKING:
    from torch import Tensor

    from zeromesh.comm import AxisGroup


class HoRing(Hierarchical):
    """Two levels at once; the values are those of level after level to the bit."""

    name = "ho_ring"
    pairs = True
    measured = ("gloo",)
    costs = "zeromesh.collectives.ho_ring.cost:HoRingCost"

    def all_gather(self, region: Tensor, major: AxisGroup, minor: AxisGroup, *, reduced: bool) -> None:
        from zeromesh.collectives.ho_ring.ring import ho_ring_all_gather

        if minor.backend != "gloo":
            super().all_gather(region, major, minor, reduced=reduced)
        else:
            ho_ring_all_gather(region, major, minor, reduced=reduced)

    def reduce_scatter(self, region: Tensor, out: Tensor, major: AxisGroup, minor: AxisGroup, **options: Any) -> None:
        from zeromesh.collectives.ho_ring.ring import ho_ring_reduce_scatter

        if minor.backend != "gloo":
            super().reduce_scatter(region, out, major, minor, **options)
        else:
            ho_ring_reduce_scatter(region, out, major, minor, **options)
