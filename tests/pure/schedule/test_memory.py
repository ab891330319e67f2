"""Every buffer in bytes: a closed formula, the slots, and the workspace of collectives."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.schedule.test_transfers import MESH, buffer, stack
from tests.pure.strategy.mixes import mixes, notation
from zeromesh.collectives.ho_ring.cost import sum_terms
from zeromesh.errors import InternalError
from zeromesh.schedule.buffer_layout import ALIGN_BYTES, BufferLayout, place, slot_bytes
from zeromesh.schedule.memory import MemoryPlan, part_numel
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.unit import ITEM_BYTES, FlatBuffer, Role, Unit
from zeromesh.strategy import Layout
from zeromesh.wires.blocks import QuantFormat


@pytest.mark.parametrize(
    ("strategy", "reduce_dtype", "expected"),
    [
        ("node=3@/int8,cluster=3@/int8", "bf16", "fp32"),  # the second rounds a sum of the first
        ("node=3@/bf16,cluster=3@/int8", "bf16", "fp32"),
        ("node=3@/int8,cluster=3@/bf16", "bf16", "bf16"),  # the node's is first, and rounds a gradient as it came
        ("node=3@/int8,cluster=1@/int8", "bf16", "bf16"),  # one axis a micro-batch; then from fp32 gradients
        ("node=3@/int8,cluster=0", "fp16", "fp16"),
        ("node=3@/int8,cluster=3@/int8", "fp64", "fp64"),
        ("node=3@/bf16,cluster=3@/fp16", "bf16", "fp32"),  # holds both
        ("node=3,cluster=3", "bf16", "bf16"),
    ],
)
def test_the_dtype_in_which_sums_wait_for_the_next_axis(strategy, reduce_dtype, expected):
    buffer = FlatBuffer(
        param_dtype=reduce_dtype, reduce_dtype=reduce_dtype, grad_dtype="fp32", master_dtype="fp32", numel=64
    )
    assert BufferLayout.of(Layout.of(strategy, [("node", 2), ("cluster", 2)]), buffer).slot_dtype == expected


@pytest.mark.parametrize("mix", mixes(3, kept=True)[::3])
def test_the_formula_of_every_term(mix):
    """The formulas of `memory_bound`, Psi divisible by all: bf16 compute, fp32 gradients and master."""
    sizes = [size for _, size in MESH]

    def degree(*stages: str) -> int:
        return prod(size for stage, size in zip(mix, sizes, strict=True) if stage.rstrip("k") in stages)

    psi, blocks = 1440, 3
    layout = Layout.of(notation(mix), MESH)
    plan = Schedule.of(layout, stack(psi, blocks)).memory
    assert plan.params_bytes == 2 * psi * blocks / degree("3", "3d")
    assert plan.grads_bytes == 4 * psi * blocks / degree("3", "2")
    assert plan.master_bytes == 4 * psi * blocks / degree("3", "3d", "2", "1")
    kept = [copy.kept for unit in plan.persistent for copy in unit]
    not_kept = prod(size for stage, size in zip(mix, sizes, strict=True) if stage in ("3", "3d"))
    if any("k" in stage for stage in mix) and not_kept > 1:
        assert kept == [2 * psi // not_kept] * blocks
    else:
        assert kept == [0] * blocks  # where everything is kept, the slot is the copy


@pytest.mark.parametrize(
    ("strategy", "param", "master", "merged"),
    [
        ("node=3", "fp32", "fp32", True),
        ("node=0", "fp32", "fp32", True),
        ("node=3d", "fp32", "fp32", True),
        ("node=1", "fp32", "fp32", True),
        ("node=2@fp32/", "fp32", "fp32", True),
        ("node=2@bf16/", "fp32", "fp32", False),  # all compute with the values of the wire
        ("node=1@int8/", "fp32", "fp32", False),
        ("node=3@int8/", "fp32", "fp32", True),  # gathered into a slot
        ("node=3", "bf16", "fp32", False),
        ("node=3", "fp64", "fp64", True),
    ],
)
def test_the_master_is_part_of_the_compute_copy_where_it_can_be(strategy, param, master, merged):
    layout = Layout.of(strategy, [("node", 4)])
    units = stack(64, 1, param_dtype=param, master_dtype=master)
    assert (Schedule.of(layout, units).memory.master_bytes == 0) == merged


def mixed_units(sizes: list[int], residents: list[int]) -> list[Unit]:
    return [
        Unit(name="", role=Role.RESIDENT, buffers=(buffer(8),)),
        *(Unit(name=f"r{i}", role=Role.RESIDENT, buffers=(buffer(n),)) for i, n in enumerate(residents)),
        *(Unit(name=f"b{i}", role=Role.BLOCK, buffers=(buffer(n),)) for i, n in enumerate(sizes)),
    ]


@given(
    st.sampled_from([notation(mix) for mix in mixes(2, kept=True)]),
    st.lists(st.integers(0, 500), min_size=0, max_size=6),
    st.lists(st.integers(1, 500), max_size=2),
    st.integers(0, 4),
)
def test_slots(strategy, sizes, residents, prefetch):
    layout = Layout.of(f"{strategy};prefetch={prefetch}", MESH[:2])
    schedule = Schedule.of(layout, mixed_units(sizes, residents))
    for plan, shared, bytes_each in (
        (schedule.memory.gather, prefetch + 1, 2),
        (schedule.memory.reduce, max(1, prefetch), 2),
    ):
        axes = layout.param_axes if plan is schedule.memory.gather else layout.grad_axes
        if layout.degree(axes) == 1:
            assert plan.total_bytes == 0 and set(plan.slot_of) == {None}
            continue
        own = {i for i, unit in enumerate(schedule.units) if unit.role is Role.RESIDENT}
        if plan is schedule.memory.gather and all(axis.stage.kept for axis in axes):
            own = set(range(len(schedule.units)))  # a fully kept unit's copy is its slot
        users = {slot: [i for i, s in enumerate(plan.slot_of) if s == slot] for slot in range(len(plan.slot_bytes))}
        assert all(users.values()), "a slot that no unit uses"
        sharing = [i for i, unit in enumerate(schedule.units) if i not in own and unit.buffers[0].numel]
        assert len({plan.slot_of[i] for i in sharing}) == min(shared, len(sharing))
        for slot, units in users.items():
            needs = [-(-layout.padded(schedule.units[i].buffers[0].numel) * bytes_each // 64) * 64 for i in units]
            if set(units) & own:
                assert len(units) == 1 and plan.slot_bytes[slot] == needs[0]
            else:
                whole = [-(-layout.padded(schedule.units[i].buffers[0].numel) * bytes_each // 64) * 64 for i in sharing]
                assert plan.slot_bytes[slot] == max(whole)
        # Neighbours never share: the next unit is gathered while this one computes.
        if shared > 1:
            assert all(plan.slot_of[a] != plan.slot_of[b] for a, b in itertools.pairwise(sharing))


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("node=3,cluster=1", {"reduce/cluster": 64 // 2 * 2}),  # the boundary's cast of the fp32 shard to a bf16 wire
        ("node=3,cluster=3", {}),
        # and a gather on an fp32 wire of a bf16 copy
        ("node=3@fp32/,cluster=1", {"gather/node": 64 * 4, "reduce/cluster": 64 // 2 * 2}),
        # The outer axis's gather ends with a cast: the inner one, in another lane, begins where it was cast to.
        ("node=3@fp32/,cluster=3@fp32/", {"gather/node": 64 * 4, "gather/cluster": 64 // 2 * 4}),
        ("node=3,cluster=3@fp32/", {"gather/cluster": 64 // 2 * 4}),
        ("node=3@fp32/,cluster=3", {"gather/node": 64 * 4}),
        ("node=1,cluster=1", {"reduce/node": 64 * 2, "reduce/cluster": 64 // 2 * 2}),
    ],
)
def test_staging(strategy, expected):
    schedule = Schedule.of(Layout.of(strategy, [("node", 2), ("cluster", 2)]), stack(64, 2))
    assert {lane: size for lane, size in schedule.memory.staging.items() if size} == expected
    assert set(expected) <= set(schedule.lanes.names) and len(schedule.lanes.names) == 4


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        ("node=3,cluster=3k", 1024 * 2),
        ("node=3,cluster=3k@fp32/", 1024 * 4),
        ("node=3,cluster=3k@int8/", 2 * 4 * (128 + 4)),  # two messages of 4 blocks, each of 128 codes and a scale
        ("node=3,cluster=3k@int4/", 2 * 4 * (64 + 4)),
        ("node=3@int8/,cluster=3k", 1024 * 2),  # the wire of the axis that is not kept does not matter
    ],
)
def test_a_kept_copy_is_held_as_it_came_over_the_wire(strategy, kept):
    plan = Schedule.of(Layout.of(strategy, [("node", 2), ("cluster", 2)]), stack(2048, 2)).memory
    # None for the root, which has nothing but zero length here, nor for units that stay gathered.
    assert [copy.kept for unit in plan.persistent for copy in unit if copy.kept] == [kept] * 2


@pytest.mark.parametrize(
    ("strategy", "numel"),
    [
        ("node=3@/int4,cluster=1@/int4", 0),
        ("node=3@/int4+ef,cluster=1@/int4", 2048),
        ("node=3@/int4,cluster=1@/int4+ef", 2048 // 2),
        ("node=3@/int4+ef,cluster=1@/int4+ef", 2048 + 2048 // 2),
        ("node=0@/int8+ef,cluster=0@/int8+ef", 2048 + 2048),
    ],
)
def test_error_feedback_holds_the_regions_that_it_quantises(strategy, numel):
    layout = Layout.of(strategy, [("node", 2), ("cluster", 2)])
    without = Layout.of(strategy.replace("+ef", ""), layout.mesh)
    plan, plain = (Schedule.of(of, stack(2048, 2)).memory for of in (layout, without))
    assert [copy.feedback for unit in plan.persistent for copy in unit] == [4 * numel] * 2
    assert plan.buffers_bytes - plain.buffers_bytes == 2 * 4 * numel


def test_a_dtype_that_cannot_be():
    with pytest.raises(InternalError, match=r"dtype must be one of fp64, fp32, bf16, fp16, code i8, .*; got 'int8'"):
        FlatBuffer(numel=1, param_dtype="int8", master_dtype="fp32")
    with pytest.raises(InternalError, match="a buffer of code e4m3 must be frozen"):
        FlatBuffer(numel=1, param_dtype="code e4m3", master_dtype="fp32")


def test_slots_buffers_and_frozen_parameters():
    schedule = Schedule.of(Layout.of("node=3", [("node", 2)]), stack(64, 4))
    assert schedule.reordered([0, 4, 2, 1, 3]).memory is schedule.memory  # slots stay where they are
    for dtype, size in ITEM_BYTES.items():
        for numel in (1, 31, 10_000):
            placed = BufferLayout.of(Layout.of("node=3", [("node", 2)]), buffer(numel))
            room = slot_bytes((placed.padded, dtype))
            assert room % ALIGN_BYTES == 0 and placed.padded * size <= room < placed.padded * size + ALIGN_BYTES
    layout = Layout.of("node=3,cluster=3k", [("node", 2), ("cluster", 2)])
    plan = Schedule.of(layout, stack(64, 3), messages=True).memory
    # 2 gather slots and a reduce slot of a block, 3 kept copies of half a block, two lanes' workspace of messages.
    assert plan.buffers_bytes == 2 * 128 + 128 + 3 * 64 + 2 * (8 << 20)
    plan = Schedule.of(Layout.of("node=3", [("node", 4)]), stack(64, 2, master_dtype=None)).memory
    assert (plan.params_bytes, plan.grads_bytes, plan.master_bytes) == (2 * 2 * 64 // 4, 0, 0)
    assert plan.reduce.slot_bytes == ()


FOURS = [("node", 4), ("cluster", 4)]
LONG = 1 << 22


def lanes(strategy: str, mesh: list[tuple[str, int]], *, messages: bool) -> dict[str, int]:
    layout = Layout.of(strategy, mesh)
    workspace = MemoryPlan.of(place(layout, stack(LONG, 2)), 1, messages).workspace
    return {lane: size for lane, size in workspace.items() if size}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("node=3,cluster=3", ["reduce/node", "reduce/cluster"]),
        ("node=1,cluster=0", ["reduce/node", "reduce/cluster"]),
        ("node=3,cluster=3;collective=ho_ring", ["reduce/node+cluster"]),
        # Messages of a quantised gather need room.
        ("node=3@int8/,cluster=2", ["gather/node", "reduce/node", "reduce/cluster"]),
        ("node=3,cluster=2@int8/", ["gather/cluster", "reduce/node", "reduce/cluster"]),
        ("node=3@/int4,cluster=3", ["reduce/node", "reduce/cluster"]),
    ],
)
def test_each_lane_has_its_own(strategy: str, expected: list[str]) -> None:
    assert lanes(strategy, FOURS, messages=True) == dict.fromkeys(expected, 8 << 20)


MESSAGE = QuantFormat(bits=8).message_bytes(-(-LONG // 4 // (2 * 1024)) * 1024)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("node=3,cluster=3", {}),  # the backend's own, in place
        ("node=1,cluster=0", {}),
        # Four messages that come, this rank's own among them; of a reduction as many that go.
        ("node=3@int8/int8,cluster=0", {"gather/node": 4 * MESSAGE, "reduce/node": 8 * MESSAGE}),
    ],
)
def test_a_device_needs_room_for_two_rounds_of_the_longest_region(strategy: str, expected: dict[str, int]) -> None:
    found = lanes(strategy, FOURS, messages=False)
    assert {lane: found.get(lane, 0) for lane in expected} == expected
    assert bool(found) == bool(expected)
    for messages in (True, False):  # one rank needs none
        assert not any(lanes("node=3@int8/", [("node", 1)], messages=messages))


def test_without_triton_the_codec_has_room_too() -> None:
    """12 bytes an element and 8 a block, of a part; stochastic rounding, of sums without feedback, 14."""
    layout = Layout.of("node=3@int8/int8,cluster=0", FOURS)
    placed = place(layout, stack(LONG, 2))
    fused, torchs = (MemoryPlan.of(placed, 1, False, triton=triton).workspace for triton in (True, False))
    piece = -(-LONG // 4 // (2 * 1024)) * 1024
    assert torchs["gather/node"] - fused["gather/node"] == 12 * piece + 8 * piece // 128
    assert torchs["reduce/node"] - fused["reduce/node"] == 14 * piece + 8 * piece // 128


@pytest.mark.parametrize(
    ("longest_bytes", "expected"),
    [
        (1 << 18, 65536),  # 256 KiB of fp32
        # Four slices of each shard but one's own, and two as wide as sums are, in 8 MiB.
        (1 << 20, (8 << 20) // (4 * (12 + 2)) // 64 * 64),
    ],
)
def test_slices_are_as_long_as_the_workspace_has_room_for(longest_bytes: int, expected: int) -> None:
    terms = sum_terms(2, 2)
    assert terms == 4 * 3
    assert part_numel(8 << 20, 4, 4, terms=terms, longest_bytes=longest_bytes) == expected
