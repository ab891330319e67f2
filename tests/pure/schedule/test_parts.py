"""Parts of a model, whole tensors by owners and joined units in a schedule: memory, messages and steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.pure.schedule.test_transfers import buffer
from tests.pure.strategy.mixes import mixes, notation
from zeromesh.schedule.bucket import Bucket, BucketSteps, Shipment
from zeromesh.schedule.lanes import lent_axes
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.step import sent_bytes_per_axis
from zeromesh.schedule.unit import FlatBuffer, Role, Unit, neighbours
from zeromesh.simulator.units import join, join_units
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.parts import layouts_of

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


@pytest.mark.parametrize("own", MIXES[::2])
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


def test_the_step_overlaps_as_the_model_says() -> None:
    for own, other in itertools.product(("node=3,cluster=3", "node=0,cluster=0"), repeat=2):
        plain = layout_of(other, "experts")
        schedule = Schedule.of(Layout.of(f"{own};prefetch=2", MESH), units(DENSE, SPARSE), parts={"experts": plain})
        assert schedule.shards_params == ("3" in own + other)
        assert len(schedule.memory.gather.slot_bytes) == (1 + 3 if schedule.shards_params else 0)
    kept = {"experts": layout_of("expert=3k", "experts")}  # whole, beside others that are not
    both = Schedule.of(layout_of("node=3,cluster=0"), units(DENSE, SPARSE), parts=kept)
    (_, experts), placed = both.memory.persistent[1], both.placed[1][1]
    assert experts.kept == placed.padded * 2 and placed.from_kept.steps == ()
    joined, _ = join_units(units(DENSE, SPARSE), 1 << 30)  # joined units are of one part
    found = [(flat.part, flat.numel) for unit in joined for flat in unit.buffers]
    assert found == [("", (1 + BLOCKS) * NUMEL), ("experts", (1 + BLOCKS) * NUMEL // 2)]
    # A mean over a part of the ranks is a share of the mean over all.
    assert Layout.of("expert=3", EXPERTS, part="experts", feeders=12).share == 0.25
    assert Layout.of("expert=3", EXPERTS, part="experts").share == 1.0


def test_communicators_are_lent_where_ranks_are_the_same():
    text = "node=3,cluster=1 | a: node=3k,cluster=1 | b: node=0,cluster=3 | c: node=1,cluster=0 | d: node=1,cluster=2"
    mesh = [("node", 2), ("cluster", 2)]
    layouts = layouts_of(Strategy.parse(text), mesh, {}).values()
    assert lent_axes(layouts, lambda _, axis: axis.mesh_axis) == {
        f"{part}:{axis}": axis for part in "abcd" for axis in ("node", "cluster")
    }
    others = iter(range(99))
    assert lent_axes(layouts, lambda *_: next(others)) == {}


LAYOUT = Layout.of("node=3,cluster=1", [("node", 2), ("cluster", 2)])
NODE, CLUSTER = LAYOUT.axes
ROLES = {"": Role.RESIDENT, "a": Role.BLOCK, "b": Role.BLOCK}


def schedule() -> Schedule:
    buffer = FlatBuffer(numel=64, param_dtype="bf16", master_dtype="fp32")
    return Schedule.of(LAYOUT, [Unit(name=name, role=role, buffers=(buffer,)) for name, role in ROLES.items()])


def bucket(numel: int) -> Bucket:
    return Bucket(
        there=(Shipment(axis=CLUSTER, numel=2 * numel, wire="fp32"), Shipment(axis=NODE, numel=numel, wire="fp64")),
        back=(Shipment(axis=NODE, numel=numel, wire="fp32"),),
    )


@dataclass
class Logged:
    """Calls in order; a ticket is the call that it is for."""

    log: list[str] = field(default_factory=list)
    fails: bool = False

    def collect(self, bucket: int) -> str:
        self.log.append(f"collect {bucket}")
        return f"collected {bucket}"

    def update(self, bucket: int) -> str:
        if self.fails:
            raise ValueError("a step that fails")
        self.log.append(f"update {bucket}")
        return f"back {bucket}"

    def wait(self, ticket: str) -> None:
        self.log.append(f"wait {ticket}")


def positions(log: list[str]) -> Iterator[tuple[int, dict[str, int]]]:
    place = {entry: index for index, entry in enumerate(log)}
    for number in range(sum(entry.startswith("update") for entry in log)):
        yield number, place


@pytest.mark.parametrize("buckets", range(7))
def test_each_bucket_is_there_before_its_step_and_back_at_the_end(buckets: int) -> None:
    backend = Logged()
    BucketSteps[int, str]().step(backend, range(buckets))
    assert len(set(backend.log)) == len(backend.log) == 5 * buckets - buckets
    for number, place in positions(backend.log):
        order = [place[f"{verb} {number}"] for verb in ("collect", "wait collected", "update", "wait back")]
        assert order == sorted(order)
        if number + 2 < buckets:
            # The next two are on their way while this one is stepped; before a third comes, the one before is back.
            assert place[f"collect {number + 1}"] < place[f"update {number}"] < place[f"collect {number + 2}"]
        if number + 3 < buckets:
            assert place[f"wait back {number}"] < place[f"collect {number + 3}"]


def test_what_a_step_that_raised_has_left_is_waited_for() -> None:
    """By whoever settles, and by the step after it, before its own buckets."""
    for settles in (True, False):
        steps, backend = BucketSteps[int, str](), Logged(fails=True)
        with pytest.raises(ValueError, match="a step that fails"):
            steps.step(backend, range(3))
        assert backend.log == ["collect 0", "collect 1", "wait collected 0"]
        backend.log, backend.fails = [], False
        if settles:
            steps.settle(backend)
            assert backend.log == ["wait collected 1"]
            continue
        steps.step(backend, range(3))
        assert backend.log[0] == "wait collected 1"  # of the step before
        for number, place in positions(backend.log[1:]):
            assert place[f"collect {number}"] < place[f"wait collected {number}"] < place[f"update {number}"]


def test_optimizers_keep_their_numbers_and_their_bytes_are_counted() -> None:
    owned = schedule().with_owned([bucket(1), bucket(2)]).with_owned([bucket(3)])
    assert owned.reordered([0, 2, 1]).buckets == owned.buckets == ((bucket(1), bucket(2)), (bucket(3),))
    assert owned.without_owned(0).buckets == ((), (bucket(3),))
    plain, found = (sent_bytes_per_axis(one, micro_batches=2) for one in (schedule(), owned))
    assert {name: found[name] - plain[name] for name in plain} == {"cluster": 6 * 8, "node": 6 * 12}


FROZEN = FlatBuffer(numel=7, param_dtype="bf16", master_dtype=None)


def unit(name: str, numel: int = 10, role: Role = Role.BLOCK, *more: FlatBuffer) -> Unit:
    """20 bytes, unless told otherwise."""
    return Unit(name=name, role=role, buffers=(FlatBuffer(numel=numel, param_dtype="bf16", master_dtype="fp32"), *more))


@pytest.mark.parametrize(
    ("bucket_bytes", "groups"),
    [
        (0, [[0], [1], [2], [3], [4]]),
        (20, [[0], [1], [2], [3], [4]]),
        (21, [[0, 1], [2, 3], [4]]),
        (41, [[0, 1, 2], [3, 4]]),
        (1000, [[0, 1, 2, 3, 4]]),
    ],
)
def test_neighbours_are_joined_until_the_bucket_is_full(bucket_bytes: int, groups: list[list[int]]) -> None:
    units = [unit(""), *(unit(f"layers.{index}") for index in range(4))]
    assert neighbours(units, bucket_bytes) == groups
    inside = [unit(""), unit("a"), unit("b"), unit("b.inner"), unit("c"), unit("d")]
    assert neighbours(inside, 1000) == [[0, 1], [2], [3], [4, 5]]  # units inside others stay as they are


def test_a_joined_unit_has_one_buffer_of_a_kind() -> None:
    joined = join([unit("embed", 3, Role.RESIDENT), unit("layers.0", 10, Role.BLOCK, FROZEN), unit("layers.1", 10)])
    assert joined.name == "embed to layers.1"
    assert joined.role is Role.RESIDENT
    assert [(buffer.numel, buffer.trainable) for buffer in joined.buffers] == [(23, True), (7, False)]
    assert join([joined]) == joined


def test_a_small_root_goes_with_the_first_units_and_a_large_one_stays() -> None:
    units = [unit("", 5), *(unit(f"layers.{index}") for index in range(4))]
    joined, groups = join_units(units, 41)
    assert groups == [[0, 1, 2], [3, 4]]
    assert [(one.name, one.buffers[0].numel) for one in joined] == [("", 25), ("layers.2 to layers.3", 20)]
    assert join_units([unit("", 21), *units[1:]], 42)[1][0] == [0]
