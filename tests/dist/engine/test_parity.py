"""Any strategy on any mesh trains as one process does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zeromesh as zm
from tests.dist.parity import Bits, Case, check_case, mesh_of, require_same, trained
from tests.dist.pool import on_ranks
from tests.pure.strategy.mixes import STAGES, mixes, notation
from zeromesh.collectives.ho_ring import HoRing
from zeromesh.comm import groups
from zeromesh.comm.exchange import AxisGroup
from zeromesh.comm.transport import Native
from zeromesh.errors import NotationError

TWO = [notation(mix) for mix in mixes(2)]
TWO_KEPT = [notation(mix) for mix in mixes(2, kept=True) if any("k" in stage for stage in mix)]
KEPT = {base: found for base in TWO if (found := [kept for kept in TWO_KEPT if kept.replace("k", "") == base])}
"""The kept forms of a mix, by the mix."""
SAME_BITS = {"fp32": [*KEPT][1::5], "bf16-wire": [*KEPT][::5]}
"""Mixes whose kept forms give the same bits, by the precision in which that is seen; all others have a case each."""
THREE = [notation(mix) for mix in mixes(3)]
THREE_KEPT = [notation(mix) for mix in mixes(3, kept=True) if any("k" in stage for stage in mix)]

EACH = ("node=0,cluster=3d", "node=1,cluster=2", "node=2,cluster=0", "node=3,cluster=1", "node=3d,cluster=3")
EACH_KEPT = ("node=3k,cluster=3dk", "node=3,cluster=3k")
"""Each stage once on each axis, for properties that depend on one axis and its stage only."""

STEPS = ("host", "device")
HOSTED = [
    f"host{'[40%]' if at % 5 in (0, 4) else ''}={host},{mix.replace('k', 'h') if at % 4 else mix};step={STEPS[at % 2]}"
    for at, (host, mix) in enumerate([*product(("1", "2", "3", "3d"), (*EACH, *EACH_KEPT))][::3])
]
"""Each stage of the host over every third of these, some with kept copies there too, and once with a share of the
tensors. Every second one is stepped on the device."""

BOTH = Case(optimizer="both")
CASES = (
    replace(BOTH, micro_batches=1),
    replace(BOTH, micro_batches=3, weighted=True),
    replace(BOTH, evaluate=True, bucket_bytes=600, debug=True),
    replace(BOTH, every_last=True),
    replace(BOTH, weighted=True, evaluate=True, bucket_bytes=1 << 20),
)
TRAINED = TWO + [kept for kept in TWO_KEPT if not any(kept.replace("k", "") in same for same in SAME_BITS.values())]
TURNS = {strategy: (at + 2 * (at // 7)) % len(CASES) for at, strategy in enumerate(TRAINED)}
"""Which case a mix is trained with."""


def test_the_mixes_are_all_there_and_each_stage_of_each_axis_meets_most_cases():
    assert (len(TWO), len(TWO_KEPT), len(THREE), len(THREE_KEPT)) == (23, 18, 101, 117)
    for axis in (f"{name}={stage}" for name in ("node", "cluster") for stage in STAGES):
        assert len({turn for strategy, turn in TURNS.items() if axis in strategy.split(",")}) >= 3, axis


@pytest.mark.parametrize("turn", range(len(CASES)))
@on_ranks(4)
def test_every_mix_on_two_axes(turn):
    for strategy in (strategy for strategy, its_turn in TURNS.items() if its_turn == turn):
        check_case(strategy, CASES[turn], 2, 2)


@pytest.mark.parametrize("turn", range(len(CASES)))
@on_ranks(4)
def test_shards_in_the_host_s_memory(turn):
    for strategy in HOSTED[turn :: len(CASES)]:
        check_case(strategy, CASES[turn], 2, 2)


@settings(max_examples=1)
@given(
    host=st.sampled_from(["=0", "=1", "=2", "=3", "=3d", "[15%]=1", "[35%]=2", "[60%]=3", "[85%]=3d"]),
    strategy=st.sampled_from([mix.replace("k", "h") for mix in TWO + TWO_KEPT]),
    step=st.sampled_from(STEPS),
    case=st.sampled_from(CASES),
)
@on_ranks(4)
def test_any_mix_over_any_stage_of_the_host(host, strategy, step, case):
    check_case(f"host{host},{strategy};step={step}", case, 2, 2)


@pytest.mark.parametrize(
    ("case", "strategies"),
    [
        (Case(optimizer="sgd", precision="fp32", clip=None), EACH[::2]),
        # In fp32 and of wires in bf16, kept copies change no bit: below.
        (Case(optimizer="both", precision="fp32", steps=1), EACH[1::2]),
        (Case(optimizer="both", precision="bf16", steps=1), EACH[1:3] + EACH_KEPT),
        (Case(optimizer="both", precision="bf16-wire", steps=1), EACH),
        (Case(precision="bf16-wire", steps=1, weighted=True), ("node=0,cluster=0",)),
        (Case(precision="bf16-wire", micro_batches=1), ("node=1,cluster=1",)),
        (Case(precision="bf16-wire", steps=1), ("host=1,node=3,cluster=1", "host=2,node=1,cluster=0;step=device")),
        (
            Case(precision="bf16-wire", steps=2),
            ("host=1,node=3,cluster=1;step=device", "host=3,node=3,cluster=2;step=device"),
        ),
        (Case(precision="bf16", steps=1), ("host=3,node=3,cluster=2", "host=3d,node=3,cluster=3h;step=device")),
    ],
    ids=str,
)
@on_ranks(4)
def test_narrow_computation_and_wires(case, strategies):
    for strategy in strategies:
        check_case(strategy, case, 2, 2)


@on_ranks(4)
def test_gathers_over_wires_of_two_widths():
    """The narrow one rounds the values, on all ranks alike."""
    for strategy in ("node=3@bf16,cluster=3@fp32", "node=3@fp32,cluster=3@bf16"):
        base = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).double()
        rounded = [param.bfloat16().double() for param in base.parameters()]
        model = zm.shard(base, mesh_of(2, 2), strategy)
        assert torch.equal(model(torch.eye(8).double()), (rounded[1] @ rounded[0]).T), strategy


@settings(max_examples=1)
@given(strategy=st.sampled_from(THREE) | st.sampled_from(THREE_KEPT), prefetch=st.sampled_from([0, 2]))
@on_ranks(12)
def test_odd_mesh_of_three_axes(strategy, prefetch):
    check_case(f"{strategy};prefetch={prefetch}", Case(world=12, optimizer="both", steps=1), 2, 3, 2)


@on_ranks(8)
def test_sums_by_level_on_three_axes():
    for strategy in ("node=0,cluster=0,region=0", "node=0,cluster=3,region=0"):
        check_case(strategy, Case(world=8, every_last=True, optimizer="sgd", steps=1), 2, 2, 2)


@on_ranks(16)
def test_four_axes():
    case = Case(world=16, optimizer="both", steps=1, micro_batches=1)
    check_case("node=3,cluster=2,region=1,site=0", case, 2, 2, 2, 2)


@on_ranks(4)
def test_split_axis():
    for strategy in ("node[2]=2,node[2]=3k", "node[2]=3d,node[*]=0"):
        check_case(strategy, CASES[0], 4)


@pytest.mark.parametrize(
    ("micro_batches", "first", "others"),
    [
        (2, "node=2,cluster=1", ["node=3,cluster=1;overlap=gather", "node=3,cluster=1;prefetch=3"]),
        (2, "node=2,cluster=2", ["node=3,cluster=3;prefetch=3"]),
        (1, "node=2,cluster=2", ["node=3,cluster=2;prefetch=0", "node=3,cluster=3;overlap=none;prefetch=3"]),
        (2, "node=2,cluster=0", ["node=2,cluster=0;prefetch=3"]),
        (2, "node=3,cluster=3d", ["node=3,cluster=3d;prefetch=3"]),
    ],
)
@on_ranks(4)
def test_equal_to_the_bit(micro_batches, first, others):
    """Settings of the schedule; stages 2 and 3."""
    case = Case(optimizer="both", precision="fp32", micro_batches=micro_batches)
    expected = trained(first, case, 2, 2)
    for other in others:
        require_same(other, trained(other, case, 2, 2), expected)


@pytest.mark.parametrize("precision", SAME_BITS)
@on_ranks(4)
def test_keeping_changes_no_bit(precision):
    case = Case(optimizer="both", precision=precision, micro_batches=1)
    for base in SAME_BITS[precision]:
        expected = trained(base, case, 2, 2)
        for kept in KEPT[base]:
            require_same(kept, trained(kept, case, 2, 2), expected)


@on_ranks(4)
def test_the_place_of_shards_changes_no_bit():
    """On the host fused kernels are chosen, which round otherwise, where the user has chosen none."""
    case = Case(optimizer="both", precision="fp32", micro_batches=1)
    places = {
        "node=3,cluster=1": ("host=1;step=device", "host=3d;step=host"),
        "node=1,cluster=0": ("host=2;step=host",),
        "node=3,cluster=3h": ("host=3;step=device",),
    }
    with mock.patch.object(torch.optim, "AdamW", partial(torch.optim.AdamW, fused=False)):
        for mix, hosts in places.items():
            expected = trained(mix, case, 2, 2)
            for place in hosts:
                require_same(place, trained(place.replace(";", f",{mix};"), case, 2, 2), expected)


# ---- Any strategy trains as one process does, with the collectives of other backends than gloo: on gloo ranks that are


@contextmanager
def native() -> Iterator[None]:
    make_group = groups._make_group

    def told(*args: Any) -> AxisGroup:
        group = make_group(*args)
        group.transport = Native("cpu")
        return group

    with mock.patch.object(groups, "_make_group", told):
        yield


NATIVE_CASES = {
    Case(optimizer="both", weighted=True): (
        *(EACH[::2] + EACH_KEPT[:1]),
        *(f"node={stage},cluster={stage};collective=ho_ring" for stage in "30"),
    ),
    Case(precision="bf16-wire", steps=1): ("node=3,cluster=0", "node=2,cluster=1"),
    Case(precision="bf16", steps=1): ("node=3,cluster=0",),
}


@pytest.mark.parametrize("case", NATIVE_CASES, ids=str)
@on_ranks(4)
def test_mixes_with_native_collectives(case):
    for strategy in NATIVE_CASES[case]:
        with native():
            check_case(strategy, case, 2, 2)


@on_ranks(2)
def test_memory_of_native_collectives():
    for strategy in ("node=3", "node=3@int8/int8", "node=1@int8/"):
        with native():
            model = zm.shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), mesh_of(2), strategy)
        lines = {line.kind: (line.predicted_bytes, line.allocated_bytes) for line in zm.memory_report(model)}
        assert all(predicted == allocated for predicted, allocated in lines.values()), (strategy, lines)
        assert all(lines["total"])


# ---- `collective=ho_ring`: both levels at work at once, the same bits; and where it does not exist, a message


def counted(strategy: str, case: Case, *shape: int) -> tuple[Bits, int, int]:
    """`trained`, and how many gathers and reductions were overlapped."""
    gathers = mock.patch.object(HoRing, "all_gather", autospec=True, side_effect=HoRing.all_gather)
    reductions = mock.patch.object(HoRing, "reduce_scatter", autospec=True, side_effect=HoRing.reduce_scatter)
    with gathers as gather, reductions as reduce:
        return trained(strategy, case, *shape), gather.call_count, reduce.call_count


def require_overlapped_bits(strategies: tuple[str, ...], *shape: int, steps: int = 1) -> None:
    case = Case(precision="fp32", world=math.prod(shape), steps=steps, micro_batches=steps)
    for strategy in strategies:
        plain, *none = counted(strategy, case, *shape)
        overlapped, gathers, reductions = counted(f"{strategy};collective=ho_ring", case, *shape)
        require_same(strategy, overlapped, plain)
        assert none == [0, 0] and gathers + reductions > 0, strategy


@on_ranks(4)
def test_overlapped_levels_change_no_bit():
    require_overlapped_bits(("node=3,cluster=3k", "node=0,cluster=0"), 2, 2, steps=2)


@on_ranks(6)
def test_equal_to_the_bit_on_an_odd_mesh():
    require_overlapped_bits(("node=3d,cluster=1",), 3, 2)


@on_ranks(8)
def test_equal_to_the_bit_on_three_axes():
    """With several kept axes the last one's gather fills the kept copy, so a copy comes before and after it."""
    require_overlapped_bits(("node=3,cluster=3k,region=3k",), 2, 2, 2)
    # Not to the bit: regions are padded to be scattered, so the ranks' parts of the gradient's norm are others.
    check_case("node=3,cluster=0,region=0;collective=ho_ring", Case(world=8, weighted=True, steps=1), 2, 2, 2)


@on_ranks(4)
def test_staged_wires_are_not_overlapped():
    strategy = "node=3@bf16/,cluster=3@bf16/;collective=ho_ring"
    _, gathers, reductions = counted(strategy, Case(precision="fp32", steps=1), 2, 2)
    assert gathers == 0 and reductions > 0
    with pytest.raises(NotationError, match=r"collective=flat can only be simulated.*one axis at a time.*hierarchical"):
        zm.shard(Case().build(), mesh_of(2, 2), "node=3,cluster=3;collective=flat")
