"""Ways to carry out collectives over several levels. The two plain ones are here, and others have a folder each. All
have a line in `zeromesh.strategy.collective.HOMES`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeromesh.schedule.buffer_layout import Route
from zeromesh.schedule.transfer import Transfer
from zeromesh.strategy import Collective, Layout

if TYPE_CHECKING:
    from zeromesh.comm.exchange import Step  # imports torch, which simulations do not need


class ByLevel(Collective):
    """A collective that the engine can run: one step after the other, or two neighbouring steps at once."""

    by_level = True

    def grouped(self, route: Route, *, messages: bool) -> tuple[tuple[Transfer, ...], ...]:
        """Returns the steps of one flat buffer's route as they run; steps that run at once are grouped. `messages` says
        whether the transports exchange messages."""
        return tuple((step,) for step in route.steps)

    def bind(self, route: Route, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Takes the steps of `route`, bound to their tensors one by one, and joins those that run at once."""
        return tuple(steps)


def runnable(layout: Layout) -> ByLevel:
    found = layout.collective
    assert isinstance(found, ByLevel)  # `Layout.require_runnable` checks it
    return found


class Flat(Collective):
    """One ring over all ranks; for an all-reduce, a ring or a tree."""

    name = "flat"
    costs = "zeromesh.collectives.costs:FlatCost"


class Hierarchical(ByLevel):
    """Collectives level by level, one after the other. The outermost level carries pieces of 1/(ranks inside)."""

    name = "hierarchical"
    costs = "zeromesh.collectives.costs:HierarchicalCost"
