"""Any strategy on any mesh trains as one process does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zeromesh as zm
from tests.dist.engine.reference import Case, Optimizers, backward, check, mesh_of, plain, sharded
from tests.dist.pool import Pool, on_ranks
from tests.pure.strategy.mixes import mixes, notation
from zeromesh.engine.api import engine_of
from zeromesh.schedule import memory

TWO = [notation(mix) for mix in mixes(2)]
TWO_KEPT = [notation(mix) for mix in mixes(2, kept=True) if any("k" in stage for stage in mix)]
THREE = [notation(mix) for mix in mixes(3)]
THREE_KEPT = [notation(mix) for mix in mixes(3, kept=True) if any("k" in stage for stage in mix)]


EACH = ("node=0,cluster=3d", "node=1,cluster=2", "node=2,cluster=0", "node=3,cluster=1", "node=3d,cluster=3")
EACH_KEPT = ("node=3k,cluster=3dk", "node=3,cluster=3k")
"""Each stage once on each axis, for properties that depend on one axis and its stage only."""


def in_calls_of(num: int, strategies: Sequence[str]) -> list[tuple[str, ...]]:
    """So many strategies share a call of the pool, and the plain training that they are compared with."""
    return [tuple(strategies[start : start + num]) for start in range(0, len(strategies), num)]


def test_the_mixes_are_all_there():
    assert (len(TWO), len(TWO_KEPT), len(THREE), len(THREE_KEPT)) == (23, 18, 101, 117)


@pytest.mark.parametrize("strategies", in_calls_of(7, TWO + TWO_KEPT), ids=str)
@on_ranks(4)
def test_every_mix_on_two_axes(strategies):
    for index, strategy in enumerate(strategies):
        check(strategy, Case(optimizer="both", micro_batches=2 + index % 2, debug=True), 2, 2)


@on_ranks(4)
def test_mixes_in_fp32():
    for strategy in EACH:
        check(strategy, Case(optimizer="sgd", precision="fp32", clip=None), 2, 2)


@pytest.mark.parametrize(
    ("case", "strategies"),
    [
        # In fp32 and of wires in bf16, kept copies change no bit: below.
        (Case(optimizer="both", precision=precision, steps=1), mixes)
        for precision, mixes in (("fp32", EACH), ("bf16", EACH + EACH_KEPT), ("bf16-wire", EACH))
    ],
    ids=["fp32", "bf16", "bf16-wire"],
)
@on_ranks(4)
def test_what_the_first_step_leaves(case, strategies):
    for strategy in strategies:
        check(strategy, case, 2, 2)


@settings(max_examples=4)
@given(strategy=st.sampled_from(TWO + TWO_KEPT), prefetch=st.sampled_from([0, 2]))
@on_ranks(6)
def test_odd_mesh(strategy, prefetch):
    check(f"{strategy};prefetch={prefetch}", Case(world=6, optimizer="both"), 3, 2)


@settings(max_examples=4)
@given(strategy=st.sampled_from(THREE) | st.sampled_from(THREE_KEPT))
@on_ranks(8)
def test_three_axes(strategy):
    check(strategy, Case(world=8, optimizer="both"), 2, 2, 2)


@settings(max_examples=2)
@given(strategy=st.sampled_from(THREE) | st.sampled_from(THREE_KEPT))
@on_ranks(12)
def test_odd_mesh_of_three_axes(strategy):
    check(strategy, Case(world=12, optimizer="both"), 2, 3, 2)


@on_ranks(16)
def test_four_axes():
    check("node=3,cluster=2,region=1,site=0", Case(world=16, optimizer="both", steps=1), 2, 2, 2, 2)


@pytest.mark.parametrize("precision", ["fp64", "bf16-wire"])
@on_ranks(4)
def test_sums_by_level(precision):
    check("node=0,cluster=0", Case(precision=precision, weighted=True), 2, 2)


@on_ranks(12)
def test_sums_by_level_on_three_axes():
    for strategy in ("node=0,cluster=0,region=0", "node=0,cluster=3,region=0"):
        check(strategy, Case(world=12, every_last=True, optimizer="sgd", steps=1), 2, 3, 2)


@pytest.mark.parametrize(
    "strategy", ["node[2]=3,node[2]=1", "node[2]=1,node[2]=3k", "node[2]=3d,node[*]=0", "node[2]=2,node[2]=3"]
)
@on_ranks(4)
def test_split_axis(strategy):
    check(strategy, Case(), 4)


@pytest.mark.parametrize("bucket_bytes", [600, 1 << 20])
@pytest.mark.parametrize("strategy", ["node=0,cluster=0", "node=1,cluster=2", "node=2,cluster=0"])
@on_ranks(4)
def test_joined_units(strategy, bucket_bytes):
    check(strategy, Case(optimizer="both", weighted=True, bucket_bytes=bucket_bytes), 2, 2)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=1,cluster=2", "node=3d,cluster=3", "node=0,cluster=0"])
@on_ranks(4)
def test_unequal_token_counts(strategy):
    check(strategy, Case(weighted=True), 2, 2)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=3,cluster=3k", "node=2,cluster=0", "node=1,cluster=3"])
@on_ranks(4)
def test_evaluation_between_backward_and_step(strategy):
    check(strategy, Case(evaluate=True), 2, 2)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=0,cluster=0", "node=1,cluster=2", "node=3d,cluster=3"])
@on_ranks(4)
def test_several_last_backwards_add_up(strategy):
    check(strategy, Case(every_last=True, optimizer="sgd"), 2, 2)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=1,cluster=0"])
@on_ranks(4)
def test_whole_tensors_after_training(strategy):
    case = Case()
    expected = plain(case).steps[-1].params
    with sharded(strategy, case, mesh_of(2, 2)) as (model, optimizer):
        for step in range(case.steps):
            backward(model, case, step)
            zm.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        state = zm.full_state_dict(model)
    if dist.get_rank() != 0:
        assert state == {}
        return
    original = case.build().state_dict()
    assert set(state) == set(original)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-10)
    assert torch.equal(state["layers.1.up.weight"], original["layers.1.up.weight"])
    assert torch.equal(state["layers.2.down.weight"], state["layers.0.down.weight"])


def trained(strategy: str, case: Case, *shape: int) -> list[tuple[str, bytes]]:
    """On a rank: trains without comparing; the bits of its slices of what was trained and of the optimizer's states."""
    with sharded(strategy, case, mesh_of(*shape or (2, 2))) as (model, optimizer):
        for step in range(case.steps):
            backward(model, case, step)
            zm.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return list(bits(model, optimizer))


def bits(model: nn.Module, optimizer: Optimizers) -> Iterator[tuple[str, bytes]]:
    for param in engine_of(model).optimizer_params():
        if param.requires_grad:
            for key, tensor in ({"parameter": param.local} | optimizer.tensors(param)).items():
                where = f"{key} of {param.full_name} from {param.flat_start}"
                yield where, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def trained_in_turn(strategies: Sequence[str], case: Case) -> list[list[tuple[str, bytes]]]:
    return [trained(strategy, case) for strategy in strategies]


def must_be_equal(pool: Pool, strategies: Sequence[str], case: Case) -> None:
    """Every rank's parameters and optimizer states come out the same, whichever of `strategies` has trained them."""
    for rank, (first, *others) in enumerate(pool.run(4, trained_in_turn, strategies, case)):
        assert first
        for text, values in zip(strategies[1:], others, strict=True):
            differ = [where for (where, value), (_, other) in zip(first, values, strict=True) if value != other]
            assert values == first, f"rank {rank}: {text} differs from {strategies[0]} in {differ[:8]}"


SETTINGS = ["", ";prefetch=0", ";overlap=gather", ";prefetch=3", ";overlap=none", ";overlap=none;prefetch=3"]


@pytest.mark.parametrize(
    "spellings",
    [
        pytest.param([f"node=3,cluster=1{setting}" for setting in SETTINGS[:4]], id="settings of node=3,cluster=1"),
        pytest.param([f"node=3,cluster=3{setting}" for setting in SETTINGS[::-2]], id="settings of node=3,cluster=3"),
        pytest.param([f"node=2,cluster=0{setting}" for setting in SETTINGS[2::2]], id="settings of node=2,cluster=0"),
        pytest.param(["node=2,cluster=2", "node=3,cluster=2", "node=3,cluster=3"], id="2 and 3"),
        pytest.param(["node=2,cluster=1", "node=3,cluster=1"], id="2 and 3, then 1"),
    ],
)
def test_equal_to_the_bit(pool: Pool, spellings):
    must_be_equal(pool, spellings, Case(optimizer="both", precision="fp32"))


KEPT = {base: [kept for kept in TWO_KEPT if kept.replace("k", "") == base] for base in TWO}
"""The kept forms of a mix, by the mix."""


@pytest.mark.parametrize(
    ("base", "precision"),
    [(base, ("fp32", "bf16-wire")[at % 2]) for at, base in enumerate([base for base in KEPT if KEPT[base]][::3])],
)
def test_keeping_changes_no_bit(pool: Pool, base, precision):
    must_be_equal(pool, [base, *KEPT[base]], Case(optimizer="both", precision=precision))


def trained_with_slots(strategy: str, case: Case) -> list[list[tuple[str, bytes]]]:
    """`trained` with one, two and three reduce slots for all blocks."""
    results = []
    for num in (1, 2, 3):
        with mock.patch.object(memory, "REDUCE_SLOTS", num):
            results.append(trained(strategy, case))
    return results


@pytest.mark.parametrize("strategy", ["node=3,cluster=1;prefetch=3", "node=2,cluster=0", "node=3,cluster=3d"])
def test_the_number_of_reduce_slots_changes_no_bit(pool: Pool, strategy):
    case = Case(optimizer="both", precision="fp32")
    for one, two, three in pool.run(4, trained_with_slots, strategy, case):
        assert one and one == two == three
