"""The lanes of a step: transfers that wait for each other, in the order of issue.

[Note: Lanes] Each communicator has a lane: an axis has one for gathers and one for reductions, and copies to and from
the host's memory one each. So a unit's transfer over the slow link runs beside another unit's inside the node. Axes
share a lane where parameters of the host pass through its memory, from one transfer to the next, or where one transfer
sends over them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from zeromesh.schedule.buffer_layout import BufferLayout
from zeromesh.schedule.transfer import Direction
from zeromesh.strategy import Axis, Layout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lanes:
    """[Note: Lanes]."""

    # The lane's name, by direction and name of an axis.
    of_axis: Mapping[tuple[Direction, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, placed: Iterable[BufferLayout], lent: Mapping[str, str] = MappingProxyType({})) -> Lanes:
        """The lanes of these buffers' routes; for `lent` see `lent_axes`."""
        lines = dict[tuple[Direction, str], str]()  # the axis that has the communicator, by each that uses it
        sharing = dict[tuple[Direction, str], dict[str, None]]()  # axes of one lane, by each of them
        for buffer in placed:
            for route in buffer.routes.values():
                together = buffer.layout.collective.pairs or route.passing > 0
                shared: dict[Direction, dict[str, None]] = {"gather": {}, "reduce": {}}
                for step in route.steps:
                    line = lines[step.direction, step.axis.name] = lent.get(step.axis.name, step.axis.name)
                    shared[step.direction] |= sharing.setdefault((step.direction, line), {line: None})
                for direction, names in shared.items() if together else ():
                    sharing |= {(direction, line): names for line in names}
        return cls({key: f"{key[0]}/{'+'.join(sharing[key[0], line])}" for key, line in lines.items()})

    def lane(self, direction: Direction, axis: str = "") -> str:
        """The name of the lane for transfers over an axis. Any lane of their direction will do for jobs over no axis,
        and for axes beyond the layouts, whose communicators nothing else uses."""
        others = (lane for (way, _), lane in self.of_axis.items() if way == direction)
        return self.of_axis.get((direction, axis)) or next(others, direction)

    @property
    def names(self) -> tuple[str, ...]:
        """All but the lanes of copies."""
        return tuple(dict.fromkeys([self.lane("gather"), self.lane("reduce"), *self.of_axis.values()]))


def in_lanes(steps: Sequence[T], lane_of: Callable[[T], str], default: str) -> list[tuple[str, list[T]]]:
    """A chain cut up by lane, in order. A step without a lane stays with the step before it; a chain without any lane
    is in the `default` one."""
    found = list[tuple[str, list[T]]]()
    for step in steps:
        lane = lane_of(step) or (found[-1][0] if found else next(filter(None, map(lane_of, steps)), default))
        if not found or found[-1][0] != lane:
            found.append((lane, []))
        found[-1][1].append(step)
    return found


def side_by_side(chains: Iterable[list[tuple[str, list[T]]]]) -> list[tuple[str, list[T]]]:
    """Several chains as one: those that take the same lanes run beside each other, the others follow."""
    found = dict[tuple[str, ...], list[tuple[str, list[T]]]]()
    for each in chains:
        first = found.setdefault(tuple([lane for lane, _ in each]), each)
        if first is not each:
            for (_, steps), (_, further) in zip(first, each, strict=True):
                steps += further
    return [part for each in found.values() for part in each]


def lent_axes(layouts: Iterable[Layout], line_of: Callable[[Layout, Axis], Hashable]) -> dict[str, str]:
    """Axes that use another axis's communicators, since the ranks are the same: the lender's name, by the borrower's.
    `line_of` makes a key that is equal for axes along which each rank has the same others, in the same order."""
    lenders, found = dict[Hashable, str](), dict[str, str]()
    for layout in layouts:
        for axis in (axis for axis in layout.axes if axis.size > 1):
            lender = lenders.setdefault(line_of(layout, axis), axis.name)
            if lender != axis.name:
                found[axis.name] = lender
    return found
