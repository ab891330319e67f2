"""Parts of a model with layouts of their own: what is held and sent is what each would hold and send by itself."""

from __future__ import annotations

import itertools

import pytest

from tests.pure.schedule.test_transfers import buffer
from tests.pure.strategy.mixes import mixes, notation
from zeromesh.schedule import FlatBuffer, Role, Schedule, Unit, join_units, lent_axes
from zeromesh.schedule.step import sent_bytes_per_axis
from zeromesh.strategy import Layout, Strategy, layouts_of

MESH = [("node", 2), ("cluster", 3)]
EXPERTS = [("expert", 3)]
MIXES = [notation(mix) for mix in mixes(2, kept=True)]
OTHERS = [*MIXES[::4], *(f"expert={stage}" for stage in ("0", "1", "2", "3", "3k", "3dk"))]
NUMEL, BLOCKS = 1440, 3


def units(*buffers: FlatBuffer) -> list[Unit]:
    """A root, an embedding and blocks that all have these buffers."""
    return [
        Unit(name="", role=Role.RESIDENT, buffers=buffers),
        *(Unit(name=f"blocks.{index}", role=Role.BLOCK, buffers=buffers) for index in range(BLOCKS)),
    ]


def layout_of(text: str, part: str = "") -> Layout:
    return Layout.of(f"{text};prefetch=0", EXPERTS if "expert" in text else MESH, part=part)


DENSE, SPARSE = buffer(NUMEL), buffer(NUMEL // 2, part="experts")


@pytest.mark.parametrize("own", MIXES)
def test_each_part_sends_and_holds_what_it_would_by_itself(own: str) -> None:
    dense = layout_of(own)
    alone = Schedule.of(dense, units(DENSE))
    for text in OTHERS:
        part = layout_of(text, "experts")
        both = Schedule.of(dense, units(DENSE, SPARSE), parts={"experts": part})
        by_itself = Schedule.of(dense, units(SPARSE), parts={"experts": part})
        for micro_batches in (1, 3):
            sent, first, second = (
                sent_bytes_per_axis(s, micro_batches=micro_batches) for s in (both, alone, by_itself)
            )
            assert sent == {axis: first.get(axis, 0) + second[axis] for axis in second}, text
            assert set(sent) == {axis.name for axis in (*dense.axes, *part.axes)}
        for name in ("params_bytes", "master_bytes", "grads_bytes"):
            apart = getattr(alone.memory, name) + getattr(by_itself.memory, name)
            assert getattr(both.memory, name) == apart, text
        _require_slots(both, dense, part)


def _require_slots(both: Schedule, dense: Layout, part: Layout) -> None:
    """A unit's buffers lie in one slot, those that are gathered (or wait) alone; it stays where all of these stay."""
    layouts = [(DENSE, dense), (SPARSE, part)]
    gathered = [(flat, layout) for flat, layout in layouts if layout.degree(layout.param_axes) > 1]
    waiting = [(flat, layout) for flat, layout in layouts if layout.degree(layout.grad_axes) > 1]
    stays = all(axis.stage.kept for _, layout in gathered for axis in layout.param_axes)
    for plan, held, shared in ((both.memory.gather, gathered, not stays), (both.memory.reduce, waiting, True)):
        size = sum(-(-layout.padded(flat.numel) * 2 // 64) * 64 for flat, layout in held)
        count = 1 + (1 if shared else BLOCKS)  # the root's, and one for all blocks where they share
        assert plan.slot_bytes == (size,) * (count if held else 0)
    for flat, layout in gathered:
        kept = {axis.stage.kept for axis in layout.param_axes}
        # A copy where something is kept: of all where the buffer beside it is not, since the slot is shared.
        expected = True in kept and not stays
        held = [
            sizes.kept > 0
            for sizes, placed in zip(both.memory.persistent[1], both.placed[1], strict=True)
            if placed.buffer == flat
        ]
        assert held == [expected]


def test_units_that_are_kept_whole_lie_beside_what_is_not() -> None:
    both = Schedule.of(
        layout_of("node=3,cluster=0"), units(DENSE, SPARSE), parts={"experts": layout_of("expert=3k", "experts")}
    )
    (_, experts), placed = both.memory.persistent[1], both.placed[1][1]
    assert experts.kept == placed.padded * 2 and placed.from_kept.steps == ()


def test_what_is_joined_is_of_one_part() -> None:
    joined, _ = join_units(units(DENSE, SPARSE), 1 << 30)
    assert [(flat.part, flat.numel) for unit in joined for flat in unit.buffers] == [
        ("", (1 + BLOCKS) * NUMEL),
        ("experts", (1 + BLOCKS) * NUMEL // 2),
    ]


def test_a_mean_over_a_part_of_the_ranks_is_a_share_of_the_mean_over_all() -> None:
    assert Layout.of("expert=3", EXPERTS, part="experts", feeders=12).share == 0.25
    assert Layout.of("expert=3", EXPERTS, part="experts").share == 1.0


def test_the_step_overlaps_as_the_model_says() -> None:
    for own, other in itertools.product(("node=3,cluster=3", "node=0,cluster=0"), repeat=2):
        plain = layout_of(other, "experts")
        schedule = Schedule.of(Layout.of(f"{own};prefetch=2", MESH), units(DENSE, SPARSE), parts={"experts": plain})
        assert schedule.shards_params == ("3" in own + other)
        assert len(schedule.memory.gather.slot_bytes) == (1 + 3 if schedule.shards_params else 0)


def test_communicators_are_lent_where_ranks_and_lanes_are_the_same():
    text = "node=3,cluster=1 | a: node=3k,cluster=1 | b: node=0,cluster=3 | c: node=1,cluster=0 | d: node=1,cluster=2"
    mesh = [("node", 2), ("cluster", 2)]
    layouts = layouts_of(Strategy.parse(text), mesh, {}).values()
    assert lent_axes(layouts, lambda _, axis: axis.mesh_axis) == {
        "a:node": "node",
        "a:cluster": "cluster",
        # c:node: as b:node, which gathers nothing, reduces at the boundary. c:cluster: of a stage that gathers nothing.
        "c:node": "b:node",
        "c:cluster": "cluster",
        "d:node": "b:node",
    }
    others = iter(range(99))
    assert lent_axes(layouts, lambda *_: next(others)) == {}
