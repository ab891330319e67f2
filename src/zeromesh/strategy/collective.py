"""How collectives over several levels are carried out: what a strategy's `collective=` names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from zeromesh.comm import AxisGroup
    from zeromesh.schedule import Route, Transfer


class Collective:
    """One way, without state. Two neighbouring steps of a route that it carries out at once have a `major` axis and a
    `minor` one: the region is major * minor equal shards, and shard i * minor + t belongs to the rank with index i on
    major and t on minor. A gather goes over minor first, a reduction over major first.

    Args:
        name: as the notation spells it.
        by_level: it sends what level after level would; others can be predicted for other engines, and not run.
        pairs: its `grouped` has two neighbouring steps run at once where both scatter or both gather, lossless and with
            no copy between them. What is replicated is then scattered over every level and gathered again. Plans try
            it unasked where ranks exchange messages.
        costs: a `zeromesh.cost.JointCost`, or "module:class" of one, which whoever only runs it never imports.
    """

    name: ClassVar[str]
    by_level: ClassVar[bool] = True
    pairs: ClassVar[bool] = False
    costs: ClassVar[str | type]

    def grouped(self, route: Route) -> tuple[tuple[Transfer, ...], ...]:
        """The steps of `route` as they are carried out: two that run at once stand together."""
        return tuple((step,) for step in route.steps)

    def all_gather(self, region: Tensor, major: AxisGroup, minor: AxisGroup, *, reduced: bool) -> None:
        """Fills `region`, of which this rank's shard is filled.

        Args:
            region: flat, contiguous.
            major, minor: the two axes.
            reduced: whether it follows a reduction, in the order of the reductions' communicators.
        """
        raise NotImplementedError(f"{self.name} carries out one step at a time")

    def reduce_scatter(
        self,
        region: Tensor,
        out: Tensor,
        major: AxisGroup,
        minor: AxisGroup,
        *,
        workspace: Tensor,
        scales: tuple[float, float],
        accumulate: bool,
    ) -> None:
        """Sums this rank's shard of all ranks' `region`, times both scales, into `out`, or adds it there.

        Args:
            region: flat, contiguous; what it holds afterwards is of no use.
            out: as long as one shard.
            major, minor: the two axes.
            workspace: of the lane.
            scales: factors of the sums over major and over minor.
            accumulate: add to `out`.
        """
        raise NotImplementedError(f"{self.name} carries out one step at a time")


HOMES = {
    "flat": "zeromesh.collectives.hierarchical:Flat",
    "hierarchical": "zeromesh.collectives.hierarchical:Hierarchical",
    "ho_ring": "zeromesh.collectives.ho_ring:HoRing",
}
"""Where each is defined; it is imported when first asked for."""

AUTO = "auto"
"""Level after level; to engines that issue one collective over several axes, that."""

_FOUND: dict[str, Collective] = {}


def collectives() -> tuple[str, ...]:
    """What the notation may name."""
    return (AUTO, *dict.fromkeys([*HOMES, *_FOUND]))


def find_collective(name: str) -> Collective:
    """The collective that a strategy names; KeyError where there is none."""
    name = "hierarchical" if name == AUTO else name
    if name not in _FOUND:
        module, _, attribute = HOMES[name].partition(":")
        _FOUND[name] = getattr(importlib.import_module(module), attribute)()
    return _FOUND[name]


@contextmanager
def registered_collective(collective: Collective) -> Iterator[None]:
    """A further collective, for as long as this is open."""
    _FOUND[collective.name] = collective
    try:
        yield
    finally:
        del _FOUND[collective.name]
