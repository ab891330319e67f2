"""Bytes on every axis: a worked example, the README's table of stages, and a closed formula for every mix."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from math import prod

import pytest

from tests.pure.strategy.mixes import NAMES, mixes, notation
from zeromesh.schedule.buffer_layout import BufferLayout
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.step import sent_bytes_per_axis, step_transfers
from zeromesh.schedule.transfer import Transfer, wire_bytes
from zeromesh.schedule.unit import FlatBuffer, Role, Unit
from zeromesh.strategy import Axis, Layout, Stage, Wire

MESH = (("node", 2), ("cluster", 3), ("region", 2))


def routes(layout: Layout, flat: FlatBuffer) -> list[tuple[Transfer, ...]]:
    """The transfers of unshard, refresh, reduce and boundary."""
    placed = BufferLayout.of(layout, flat)
    return [placed.routes[lane].steps for lane in ("unshard", "refresh", "reduce", "boundary")]


def buffer(numel: int, **changes) -> FlatBuffer:
    fields = {"param_dtype": "bf16", "master_dtype": "fp32", "reduce_dtype": "bf16"} | changes
    return FlatBuffer(numel=numel, **fields)


def stack(numel: int, blocks: int, **changes) -> list[Unit]:
    """A root without parameters around equal blocks."""
    block = (buffer(numel, **changes),)
    return [
        Unit(name="", role=Role.RESIDENT, buffers=()),
        *(Unit(name=f"blocks.{index}", role=Role.BLOCK, buffers=block) for index in range(blocks)),
    ]


def closed_formula(mix: tuple[str, ...], numel: int, blocks: int, micro_batches: int) -> dict[str, int]:
    """Bytes of a step on each axis, from the README's table of stages and [Note: Bytes] alone; 2-byte wires, no
    prefetch, so that one block, the last, stays in the slot from forward to backward."""
    sizes = dict(zip(NAMES, (size for _, size in MESH), strict=True))
    stage = dict(zip(NAMES, mix, strict=False))
    rank = {"3": 0, "3k": 0, "2": 1, "3d": 1, "3dk": 1, "1": 2}
    order = sorted((axis for axis in stage if stage[axis] != "0"), key=lambda axis: rank[stage[axis]])
    replicas = [axis for axis in stage if stage[axis] == "0"]
    cut = 8 * prod(sizes[axis] for axis in stage)
    padded = -(-numel // cut) * cut
    param_axes = [axis for axis in order if stage[axis].startswith("3")]
    all_kept = all(stage[axis].endswith("k") for axis in param_axes)
    total = {}
    for axis in stage:
        above = order[: order.index(axis)] if axis in order else order + replicas[: replicas.index(axis)]
        share = Fraction((sizes[axis] - 1) * 2 * padded, prod(sizes[above_axis] for above_axis in above) * sizes[axis])
        forward = blocks * micro_batches
        backward = 0 if all_kept or stage[axis].endswith("k") else (blocks - 1) * micro_batches
        uses = {
            "0": 2 * blocks,
            "1": 2 * blocks,
            "2": forward + blocks,
            "3": forward + backward + forward,
            "3d": forward + backward + blocks,
        }
        count = uses[stage[axis].rstrip("k")]
        total[axis] = int(count * share)
    return total


@pytest.mark.parametrize(("axes", "number"), [(1, 7), (2, 41), (3, 218)])
def test_every_mix_against_the_closed_formula(axes, number):
    assert len(mixes(axes, kept=True)) == number
    for mix in mixes(axes, kept=True):
        layout = Layout.of(f"{notation(mix)};prefetch=0", MESH[:axes])
        for numel, blocks, micro_batches in ((1440, 4, 3), (1001, 2, 1)):
            schedule = Schedule.of(layout, stack(numel, blocks))
            expected = closed_formula(mix, numel, blocks, micro_batches)
            assert sent_bytes_per_axis(schedule, micro_batches=micro_batches) == expected, mix


@pytest.mark.parametrize(
    ("stage", "every_micro_batch", "every_step"),
    [
        ("0", [], ["all_reduce"]),
        ("1", [], ["reduce_scatter", "all_gather"]),
        ("2", ["reduce_scatter"], ["all_gather"]),
        ("3", ["all_gather", "all_gather", "reduce_scatter"], []),
        ("3d", ["all_gather", "all_gather"], ["reduce_scatter"]),
        ("3k", ["all_gather", "reduce_scatter"], []),
        ("3dk", ["all_gather"], ["reduce_scatter"]),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_the_table_of_stages(stage, every_micro_batch, every_step, micro_batches):
    schedule = Schedule.of(Layout.of(f"node={stage};prefetch=0", [("node", 4)]), stack(64, blocks=2))
    seen = Counter(step.operation for unit, step in step_transfers(schedule, micro_batches=micro_batches) if unit == 1)
    assert seen == Counter(every_micro_batch * micro_batches + every_step)


@pytest.mark.parametrize("mix", mixes(3, kept=True)[::7])
def test_chains_grow_and_shrink_one_region(mix):
    """A gather's region is the next one's chunk; a reduction's chunk is the next one's region; least significant axis
    first in gathers, most significant first in reductions."""
    layout = Layout.of(notation(mix), MESH)
    flat = buffer(1440)
    order = [axis.name for axis in layout.significant]
    unshard, refresh, micro, boundary = routes(layout, flat)
    for chain in (unshard, refresh):
        assert [step.axis.name for step in chain] == [n for n in reversed(order) if n in {s.axis.name for s in chain}]
        for one, following in itertools.pairwise(chain):
            assert one.numel == following.numel // following.axis.size
    reductions = [*micro, *boundary]
    scatters = [step for step in reductions if step.operation == "reduce_scatter"]
    # All replicated axes but the outermost scatter, and gather again.
    replicas = [axis.name for axis in layout.replica_axes]
    assert [step.axis.name for step in scatters] == order + replicas[:-1]
    assert [s.axis.name for s in reductions if s.operation == "all_gather"] == replicas[:-1][::-1]
    for one, following in itertools.pairwise(reductions):
        left = one.numel // (one.axis.size if one.operation == "reduce_scatter" else 1)
        assert left == following.numel // (following.axis.size if following.operation == "all_gather" else 1)
    # Together they touch every axis: parameters to all, gradients from all.
    gathered = {step.axis.name for step in [*unshard, *refresh]}
    assert gathered == set(order) and {step.axis.name for step in reductions} == {axis.name for axis in layout.axes}


@pytest.mark.parametrize(
    ("wire", "numel", "expected"),
    [
        ("fp64", 10, 80),
        ("fp32", 10, 40),
        ("bf16", 10, 20),
        ("int8", 256, 2 * (128 + 4)),
        ("int4", 129, 2 * (64 + 4)),
        ("int8[64]", 64, 64 + 4),
        ("int4[32]", 33, 2 * (16 + 4)),
    ],
)
def test_bytes_on_a_wire(wire, numel, expected):
    assert wire_bytes(numel, wire) == expected


def test_wires_and_axes_of_one_rank():
    layout = Layout.of("node=3@fp32/bf16,cluster=1", [("node", 2), ("cluster", 2)])
    flat = buffer(8, reduce_dtype="fp32")
    named = [[(step.axis.name, step.wire) for step in steps] for steps in routes(layout, flat)]
    assert named == [[("node", "fp32")], [("cluster", "bf16")], [("node", "bf16")], [("cluster", "fp32")]]
    # Axes of one rank and frozen parameters send nothing.
    layout = Layout.of("node=1,cluster=3", [("node", 1), ("cluster", 2)])
    unshard, refresh, *_ = routes(layout, buffer(8))
    assert [step.axis.name for step in [*unshard, *refresh]] == ["cluster"]
    unshard, *others = routes(layout, buffer(8, master_dtype=None))
    assert unshard and not any(others)


@pytest.mark.parametrize(("size", "numel", "expected"), [(2, 2 * 136, 2 * 264), (4, 32, 2 * 3 * 132)])
def test_bytes_of_a_quantised_all_reduce(size, numel, expected):
    """136 elements make two blocks, 8 make one."""
    axis = Axis(name="a", mesh_axis="a", size=size, stride=1, stage=Stage.ZERO, wire=Wire())
    assert Transfer(operation="all_reduce", axis=axis, numel=numel, wire="int8").sent_bytes == expected


BY_LEVEL = "reduce_scatter node 48, all_reduce cluster 24, all_gather node 48"
OVERLAPPED = "reduce_scatter node 48, reduce_scatter cluster 24, all_gather cluster 24, all_gather node 48"
AT_ONCE = "all_reduce node 48, all_reduce cluster 48"
THREE = "reduce_scatter node 96, reduce_scatter cluster 48, all_reduce region 16"
THREE += ", all_gather cluster 48, all_gather node 96"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("node=0,cluster=0", BY_LEVEL),
        ("node=0,cluster=0;collective=hierarchical", BY_LEVEL),
        ("node=0,cluster=0@/int8", BY_LEVEL),
        ("node=0,cluster=0@/int8;collective=ho_ring", BY_LEVEL),
        ("node=0,cluster=0;collective=flat", AT_ONCE),
        ("node=0,cluster=0;collective=ho_ring", OVERLAPPED),
        ("node=3,cluster=0;collective=hierarchical", "all_reduce cluster 24"),
        ("node=3,cluster=0;collective=ho_ring", "all_reduce cluster 24"),
        ("node=0@/int8,cluster=0", AT_ONCE),
        ("node=0,cluster=0,region=0", THREE),
    ],
)
def test_sums_over_several_replica_axes(strategy, expected):
    steps = routes(Layout.of(strategy, MESH[: strategy.count("=") - strategy.count(";")]), buffer(23))[-1]
    assert ", ".join(f"{step.operation} {step.axis.name} {step.numel}" for step in steps) == expected


@pytest.mark.parametrize(
    ("strategy", "changes", "expected"),
    [
        ("node=1,cluster=1", {}, ("bf16", "fp32")),
        ("node=0,cluster=0", {}, ("bf16", "fp32")),
        ("node=3d,cluster=1", {"param_dtype": "fp16", "reduce_dtype": "fp16"}, ("fp16", "fp32")),
        ("node=1,cluster=0@/int8", {}, ("bf16", "fp32")),  # the second wire is no matter
        ("node=1@/int8,cluster=0", {}, ("fp32", "fp32")),
        ("node=1,cluster=1", {"reduce_dtype": "fp32"}, ("fp32", "fp32")),  # as they are sent
        ("node=1@/fp16,cluster=1@/fp16", {}, ("fp32", "fp32")),  # a cast on the way there is one of two
        ("node=1,cluster=1", {"param_dtype": "fp32"}, ("fp32", "fp32")),
        ("node=1,cluster=1", {"grad_dtype": "bf16"}, ("bf16", "bf16")),
        ("node=1,cluster=1", {"grad_dtype": "fp16"}, ("fp16", "fp16")),  # which has not all values of bf16
        ("node=1,cluster=1", {"grad_dtype": "fp64"}, ("bf16", "fp64")),
        ("node=2,cluster=1", {}, ("bf16", "bf16")),  # they wait as they are sent
        ("node=2@/fp32,cluster=1", {}, ("fp32", "fp32")),
    ],
)
def test_gradients_that_are_alone_are_as_wide_as_the_wire(strategy, changes, expected):
    placed = BufferLayout.of(Layout.of(strategy, MESH[:2]), buffer(100, **changes))
    assert (placed.collected_dtype(alone=True), placed.collected_dtype(alone=False)) == expected
    alone = BufferLayout.of(Layout.of("node=1,cluster=1", [("node", 1), ("cluster", 1)]), buffer(100))
    assert alone.collected_dtype(alone=True) == "fp32"  # nothing is sent
