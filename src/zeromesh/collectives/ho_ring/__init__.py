"""HO-Ring (PaRO, arXiv 2310.06003): sends the bytes of level after level, but with two levels at work at once.

As soon as one level delivers a slice, the other passes it on, while the first fetches the next. So it takes the time of
the slower level plus one slice of the other, instead of the sum of both. `ring.py` does this with messages, which cost
little. On other transports each slice would be a kernel launch, and summing it several. There the levels run one after
the other, each as the backend's own collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import islice
from typing import TYPE_CHECKING, Any

from zeromesh.collectives import ByLevel
from zeromesh.schedule.buffer_layout import Route
from zeromesh.schedule.transfer import Transfer

if TYPE_CHECKING:
    from torch import Tensor

    from zeromesh.comm.exchange import AxisGroup, Step


class HoRing(ByLevel):
    """Two levels at once. The values equal those of level after level to the bit.

    Two steps at once have a `major` and a `minor` axis. The region is major * minor equal shards; shard i * minor + t
    belongs to the rank with index i on major and t on minor. A gather goes over minor first, a reduction over major
    first.
    """

    name = "ho_ring"
    pairs = True
    costs = "zeromesh.collectives.ho_ring.cost:HoRingCost"

    def grouped(self, route: Route, *, messages: bool) -> tuple[tuple[Transfer, ...], ...]:
        """Pairs two steps if both scatter or both gather, lossless and in the region's dtype, so that nothing is copied
        between them."""
        groups: list[tuple[Transfer, ...]] = []
        for step in route.steps:
            before = groups[-1][0] if groups and len(groups[-1]) == 1 and messages else None
            if before is None or route.copied in (before.axis, step.axis) or not _at_once(before, step, route.held):
                groups.append((step,))
            else:
                groups[-1] = (before, step)
        return tuple(groups)

    def bind(self, route: Route, steps: Sequence[Step]) -> tuple[Step, ...]:
        left = iter(steps)
        grouped = self.grouped(route, messages=all(step.groups[0].transport.messages for step in steps))
        return tuple(reduce(self._join, islice(left, len(together))) for together in grouped)

    def _join(self, first: Step, second: Step) -> Step:
        assert first.call is not None and second.call is not None
        if first.operation == "all_gather":
            axes = (*second.groups, *first.groups)
            call = partial(self.all_gather, second.call.args[0], *axes)
        else:
            options = second.call.keywords
            axes, scales = (*first.groups, *second.groups), (first.call.keywords["scale"], options["scale"])
            rest = {"workspace": options["workspace"], "scales": scales, "accumulate": False}
            call = partial(self.reduce_scatter, first.call.args[0], second.call.args[1], *axes, **rest)
        return replace(second, groups=axes, call=call, before=first.before)

    def all_gather(self, region: Tensor, major: AxisGroup, minor: AxisGroup) -> None:
        """Fills the flat, contiguous `region`. This rank's shard in it is already filled."""
        from zeromesh.collectives.ho_ring.ring import ho_ring_all_gather

        ho_ring_all_gather(region, major, minor)

    def reduce_scatter(self, region: Tensor, out: Tensor, major: AxisGroup, minor: AxisGroup, **options: Any) -> None:
        """Sums this rank's shard of all ranks' `region`, times both scales. Writes the sum to `out`, or adds it there.

        Args:
            region: flat, contiguous; its values are lost.
            out: as long as one shard.
            major, minor: the two axes.
            options: `workspace` of the lane; `scales`, factors of the sums over major and over minor; `accumulate`,
                True to add to `out`.
        """
        from zeromesh.collectives.ho_ring.ring import ho_ring_reduce_scatter

        ho_ring_reduce_scatter(region, out, major, minor, **options)


def _at_once(first: Transfer, second: Transfer, held: str) -> bool:
    return first.operation == second.operation != "all_reduce" and first.wire == second.wire == held
