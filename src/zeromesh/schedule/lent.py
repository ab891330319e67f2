"""Communicators that axes of several layouts, a model's and its parts', share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable

from zeromesh.schedule.transfer import GATHERS, REDUCTIONS, LaneKind, lane_axes
from zeromesh.strategy import Axis, Layout


def lent_axes(layouts: Iterable[Layout], line_of: Callable[[Layout, Axis], Hashable]) -> dict[str, str]:
    """By name, axes that use the communicators of another, which is named. The ranks are the same, and the lanes: so
    each communicator is still in one lane, and its collectives are in one order. `line_of` makes a key that is equal
    for axes along which each rank has the same others, in the same order."""
    # By ranks and lane of reductions: axes with communicators of their own, and the lane of their gathers, if any.
    lenders = defaultdict[tuple[Hashable, LaneKind | None], dict[str, LaneKind | None]](dict)
    found = dict[str, str]()
    for layout in layouts:
        for axis in (axis for axis in layout.axes if axis.size > 1):
            reduces, gathers = (
                next((lane for lane in lanes if axis in lane_axes(layout, lane)), None)
                for lanes in (REDUCTIONS, GATHERS)
            )
            alike = lenders[line_of(layout, axis), reduces]
            lender = next((name for name, own in alike.items() if own == gathers or None in (own, gathers)), None)
            if lender is None:
                alike[axis.name] = gathers
            else:
                found[axis.name] = lender
                alike[lender] = alike[lender] or gathers
    return found
