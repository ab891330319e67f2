"""What the comparison of AMSP's layouts depends on: each assumption and each open constant by itself, held against it.

The published ratios are of one engine, and the paper does not say which of its overlaps were on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from zeromesh.cluster import preset
from zeromesh.cost import Constants, default_constants
from zeromesh.planner.robust import open_constants, other_ends
from zeromesh.simulator import Mechanics
from zeromesh.validate.row import published
from zeromesh.validate.score import GOALS
from zeromesh.validate.tables.amsp import (
    AMSP_LAYOUT,
    LAYOUTS,
    MICS_LAYOUT,
    NO_BROADCAST,
    NO_OVERLAP,
    OVERLAPPED,
    amsp_step,
)

BEYOND = (("channel_share", 2.0), ("channel_share", 4.0), ("link_share.nvlink", 0.2), ("launch_s", 1e-3))
"""Of constants, beyond what was measured anywhere."""

GPUS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One thing taken otherwise.

    Args:
        name: what.
        ratios: predicted, in the order of the published ones.
        worst: largest relative error of one.
    """

    name: str
    ratios: tuple[float, ...]
    worst: float

    @property
    def meets(self) -> bool:
        """Whether each is within the table's goal."""
        goal = GOALS[LAYOUTS].worst
        return goal is None or self.worst <= goal


@cache
def measured() -> dict[str, float]:
    """Published ratios by size of the model."""
    return {entry["model"]: float(entry["throughput_ratio"]) for entry in published("amsp_layouts_a800")}


def variants() -> Iterator[Variant]:
    """What the engine overlaps, then constants: at both ends of what was measured elsewhere, and beyond."""
    for refresh, engine in (("exposed", NO_BROADCAST), ("hidden", OVERLAPPED)):
        for gathers, hidden in (("hidden", True), ("exposed", False)):
            yield _variant(f"gathers {gathers}, broadcast {refresh}", _overlapping(engine, hidden))
    yield _variant("nothing overlaps", NO_OVERLAP)
    ends = [(each.name, end) for each in open_constants(preset("a800-8x-hdr")) for end in other_ends(each)]
    for where, constants in (("measured", ends), ("nowhere measured", BEYOND)):
        for name, value in constants:
            text = f"gathers hidden, broadcast hidden, {name} = {value:g} ({where})"
            yield _variant(text, OVERLAPPED, default_constants().at(name, value))


def exposed_share() -> float | None:
    """Of what gathers and reductions of a micro-batch take where nothing hides them, the least share that is to be
    exposed for all three ratios to be within the goal, the broadcast being hidden; None: none is enough."""
    for percent in range(101):
        if _of(_mixed(percent / 100)).meets:
            return percent / 100
    return None


def _overlapping(engine: Mechanics, hidden: bool) -> Mechanics:
    return replace(engine, overlap_gather=hidden, overlap_reduce=hidden)


def _variant(name: str, engine: Mechanics, constants: Constants | None = None) -> Variant:
    return _of([theirs / ours for ours, theirs in _steps(engine, constants)], name)


def _mixed(exposed: float) -> list[float]:
    hidden, all_of_it = (_steps(_overlapping(OVERLAPPED, hides), None) for hides in (True, False))
    mixed = [
        [(1 - exposed) * one + exposed * other for one, other in zip(*pair, strict=True)]
        for pair in zip(hidden, all_of_it, strict=True)
    ]
    return [theirs / ours for ours, theirs in mixed]


def _of(ratios: list[float], name: str = "") -> Variant:
    errors = [abs(ratio / wanted - 1) for ratio, wanted in zip(ratios, measured().values(), strict=True)]
    return Variant(name=name, ratios=tuple(ratios), worst=max(errors))


@cache
def _steps(engine: Mechanics, constants: Constants | None) -> tuple[tuple[float, float], ...]:
    """Seconds of AMSP's layout and of MiCS's, by size."""
    return tuple(
        (
            amsp_step(size, GPUS, AMSP_LAYOUT[size], engine, constants=constants).step_s,
            amsp_step(size, GPUS, MICS_LAYOUT[size], engine, constants=constants).step_s,
        )
        for size in measured()
    )
