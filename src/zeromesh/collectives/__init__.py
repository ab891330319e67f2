"""Ways to carry out collectives over several levels. The two plain ones are here; each further one has a folder. All
have a line in `zeromesh.strategy.collective.HOMES`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeromesh.schedule.buffer_layout import Route
from zeromesh.schedule.transfer import Transfer
from zeromesh.strategy import Collective, Layout

if TYPE_CHECKING:
    from zeromesh.comm.exchange import Step  # imports torch, and simulations do without


class ByLevel(Collective):
    """A way that the engine runs: one step after the other, or two neighbours at once."""

    by_level = True

    def grouped(self, route: Route, *, messages: bool) -> tuple[tuple[Transfer, ...], ...]:
        """The steps of one flat buffer's route as they are carried out, by exchanging `messages` or not: two that run
        at once stand together."""
        return tuple((step,) for step in route.steps)

    def bind(self, route: Route, steps: Sequence[Step]) -> tuple[Step, ...]:
        """The same with those that run at once joined, of the steps of `route` bound to their tensors one by one."""
        return tuple(steps)


def runnable(layout: Layout) -> ByLevel:
    found = layout.collective
    assert isinstance(found, ByLevel)  # `Layout.require_runnable`
    return found


class Flat(Collective):
    """One ring over all ranks, or a tree for an all-reduce."""

    name = "flat"
    costs = "zeromesh.collectives.costs:FlatCost"


class Hierarchical(ByLevel):
    """Level by level, the outermost one carrying pieces of 1/(ranks inside), each level waiting for the one before."""

    name = "hierarchical"
    costs = "zeromesh.collectives.costs:HierarchicalCost"
