"""The space holds every legal layout once, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from itertools import permutations, product

import pytest

from zeromesh.errors import NotationError
from zeromesh.planner.space import STAGES, Space, cuts_of
from zeromesh.strategy import Layout, Strategy

SPELLED = [stage.value for stage in STAGES]


def every(space: Space) -> list[Strategy]:
    return [
        space.strategy([int(column[row]) for column in block.indices])
        for block in space.blocks()
        for row in range(len(block))
    ]


def legal(texts: list[str]) -> set[Strategy]:
    found = set()
    for text in texts:
        with suppress(NotationError):
            found.add(Strategy.parse(text))
    return found


def test_three_levels_have_218_stage_mixes() -> None:
    """343 combinations; 66 have 2 beside 3d, and of the 277 left the order of kept axes excludes 59."""
    mesh = (("a", 2), ("b", 2), ("c", 2))
    strategies = every(Space(mesh, "none"))
    assert len(strategies) == len(set(strategies)) == 218
    assert set(strategies) == legal([f"a={x},b={y},c={z}" for x, y, z in product(SPELLED, repeat=3)])


def cut_texts(name: str, size: int) -> list[str]:
    """By hand: one stage, or two different ones, in the order in which the notation allows them."""
    whole = [f"{name}={stage}" for stage in SPELLED]
    pairs = [
        f"{name}[{inner}]={a},{name}[{size // inner}]={b}"
        for inner in range(2, size)
        if size % inner == 0
        for a, b in permutations(SPELLED, 2)
        if SPELLED.index(a) < SPELLED.index(b)
    ]
    return [*whole, *pairs]


def as_degrees(strategy: Strategy, mesh: tuple[tuple[str, int], ...]) -> frozenset[tuple[str, str, int]]:
    """The costs of a layout depend on this: how many ranks of each level each stage has."""
    axes = Layout.of(strategy, mesh).axes
    return frozenset((axis.mesh_axis, axis.stage.value, axis.size) for axis in axes if axis.size > 1)


def test_one_split_per_level_equals_enumeration_by_hand() -> None:
    mesh = (("a", 4), ("b", 8))
    texts = [f"{inner},{outer}" for inner in cut_texts("a", 4) for outer in cut_texts("b", 8)]
    strategies = every(Space(mesh, "once"))
    assert len(strategies) == len(set(strategies))
    assert {as_degrees(s, mesh) for s in strategies} == {as_degrees(s, mesh) for s in legal(texts)}


@pytest.mark.parametrize(
    ("size", "cuts"), [(1, 1), (2, 7), (3, 7), (4, 7 + 21), (8, 84), (16, 210), (128, 1716), (12, 7 * 28)]
)
def test_all_splits_count_the_factorisations(size: int, cuts: int) -> None:
    """2^k over 7 stages: C(k + 6, 6) ways; 12 = 2^2 * 3: C(8, 6) * 7. Cuts multiply to their level, and differ."""
    assert len(cuts_of("a", size, splits="all")) == cuts
    for splits in ("none", "once", "all"):
        found = cuts_of("a", 24, splits=splits)  # type: ignore[arg-type]  # a literal each
        assert (found.sizes.prod(axis=1) == 24).all()
        assert len({tuple(row) for row in found.sizes.tolist()}) == len(found)


def test_blocks_hold_the_sizes_of_their_strategies() -> None:
    mesh = (("a", 4), ("b", 6))
    space = Space(mesh, "all")
    for block in space.blocks():
        for row in range(0, len(block), 7):
            layout = Layout.of(space.strategy([int(column[row]) for column in block.indices]), mesh)
            for level, (name, _) in enumerate(mesh):
                for stage, sizes in zip(STAGES, block.sizes[level], strict=True):
                    axes = [axis.size for axis in layout.axes if axis.mesh_axis == name and axis.stage is stage]
                    assert sizes[row] == (axes[0] if axes else 1)


def test_large_levels_are_walked_in_blocks() -> None:
    space = Space((("a", 8), ("b", 16), ("c", 128)), "once")
    blocks = list(space.blocks())
    assert len(blocks) > 1
    total = sum(len(block) for block in blocks)
    seen = {index for block in blocks for index in zip(*(column.tolist() for column in block.indices), strict=True)}
    assert len(seen) == total == 95306
