"""Any strategy on any mesh trains as one process does: DESIGN 4.4."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import zeromesh as zm
from tests.dist.engine.reference import TIMEOUT_S, Case, backward, check, mesh_of, plain, sharded
from tests.dist.pool import Pool, on_ranks
from tests.pure.strategy.mixes import mixes, notation

TWO = [notation(mix) for mix in mixes(2)]
TWO_KEPT = [notation(mix) for mix in mixes(2, kept=True) if any("k" in stage for stage in mix)]
THREE = [notation(mix) for mix in mixes(3, kept=True)]


def test_the_mixes_are_all_there():
    assert len(TWO) == 23 and len(TWO_KEPT) == 18 and len(THREE) == 218


@pytest.mark.parametrize("strategy", TWO + TWO_KEPT)
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_every_mix_on_two_axes(strategy):
    check(strategy, Case(optimizer="both"), 2, 2)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=2,cluster=3k", "node=1,cluster=0"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_one_optimizer(strategy, optimizer):
    check(strategy, Case(optimizer=optimizer), 2, 2)


@settings(max_examples=4)
@given(strategy=st.sampled_from(TWO + TWO_KEPT), prefetch=st.sampled_from([0, 2]))
@on_ranks(6, timeout_s=TIMEOUT_S)
def test_odd_mesh(strategy, prefetch):
    check(f"{strategy};prefetch={prefetch}", Case(world=6, optimizer="both"), 3, 2)


@pytest.mark.parametrize("strategy", random.Random(1).sample(THREE, 4))
@on_ranks(8, timeout_s=TIMEOUT_S)
def test_three_axes(strategy):
    check(strategy, Case(world=8, optimizer="both"), 2, 2, 2)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1,region=2", "node=0,cluster=3,region=3dk"])
@on_ranks(12, timeout_s=TIMEOUT_S)
def test_odd_mesh_of_three_axes(strategy):
    check(strategy, Case(world=12, optimizer="both"), 2, 3, 2)


@pytest.mark.parametrize("precision", ["fp64", "bf16-wire"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_sums_by_level(precision):
    check("node=0,cluster=0;collective=hierarchical", Case(precision=precision, weighted=True), 2, 2)


@pytest.mark.parametrize(
    "strategy", ["node=0,cluster=0,region=0", "node=1,cluster=0,region=0", "node=0,cluster=3,region=0"]
)
@on_ranks(12, timeout_s=TIMEOUT_S)
def test_sums_by_level_on_three_axes(strategy):
    check(f"{strategy};collective=hierarchical", Case(world=12, every_last=True, optimizer="sgd"), 2, 3, 2)


@pytest.mark.parametrize(
    "strategy", ["node[2]=3,node[2]=1", "node[2]=1,node[2]=3k", "node[2]=3d,node[*]=0", "node[2]=2,node[2]=3"]
)
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_split_axis(strategy):
    check(strategy, Case(), 4)


@pytest.mark.parametrize("bucket_bytes", [600, 1 << 20])
@pytest.mark.parametrize("strategy", ["node=0,cluster=0", "node=1,cluster=2", "node=2,cluster=0"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_joined_units(strategy, bucket_bytes):
    check(strategy, Case(optimizer="both", weighted=True, bucket_bytes=bucket_bytes), 2, 2)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=1,cluster=2", "node=3d,cluster=3", "node=0,cluster=0"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_unequal_token_counts(strategy):
    check(strategy, Case(weighted=True), 2, 2)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=3,cluster=3k", "node=2,cluster=0", "node=1,cluster=3"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_evaluation_between_backward_and_step(strategy):
    check(strategy, Case(evaluate=True), 2, 2)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=0,cluster=0", "node=1,cluster=2", "node=3d,cluster=3"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_several_last_backwards_add_up(strategy):
    check(strategy, Case(every_last=True, optimizer="sgd"), 2, 2)


@pytest.mark.parametrize("strategy", ["node=0,cluster=0", "node=3,cluster=1", "node=2,cluster=2", "node=3,cluster=3"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_fp32_within_the_rounding_of_its_sums(strategy):
    check(strategy, Case(optimizer="sgd", precision="fp32", clip=None), 2, 2)


@pytest.mark.parametrize("strategy", ["node=0,cluster=0", "node=3,cluster=1", "node=1,cluster=2", "node=3,cluster=3k"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_bf16_compute(strategy):
    check(strategy, Case(precision="bf16"), 2, 2)


@pytest.mark.parametrize("strategy", ["node=0,cluster=1", "node=3,cluster=1", "node=2,cluster=3", "node=3d,cluster=0"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_bf16_wires(strategy):
    check(strategy, Case(precision="bf16-wire"), 2, 2)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=1,cluster=0", "node=2,cluster=3"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_whole_tensors_after_training(strategy):
    case = Case(steps=2)
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
    """On a rank: trains without comparing; on rank 0 every parameter's bits at the end."""
    with sharded(strategy, case, mesh_of(*shape or (2, 2))) as (model, optimizer):
        for step in range(case.steps):
            backward(model, case, step)
            zm.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        state = zm.full_state_dict(model)
    return [(name, tensor.view(-1).view(torch.uint8).numpy().tobytes()) for name, tensor in sorted(state.items())]


SETTINGS = [";prefetch=0", ";prefetch=1", ";prefetch=3", ";overlap=gather", ";overlap=none", ";overlap=none;prefetch=3"]


@pytest.mark.parametrize(
    "spellings",
    [
        pytest.param([f"node=3,cluster=1{setting}" for setting in SETTINGS], id="settings of node=3,cluster=1"),
        pytest.param([f"node=3,cluster=3{setting}" for setting in SETTINGS], id="settings of node=3,cluster=3"),
        pytest.param([f"node=2,cluster=0{setting}" for setting in SETTINGS[2:5]], id="settings of node=2,cluster=0"),
        pytest.param(["node=3,cluster=3", "node=3,cluster=3k", "node=3k,cluster=3k"], id="kept"),
        pytest.param(["node=3d,cluster=3d", "node=3d,cluster=3dk"], id="kept, deferred"),
        pytest.param(["node=2,cluster=2", "node=3,cluster=2", "node=3,cluster=3"], id="2 and 3"),
        pytest.param(["node=2,cluster=1", "node=3,cluster=1"], id="2 and 3, then 1"),
    ],
)
def test_equal_to_the_bit(pool: Pool, spellings):
    case = Case(precision="fp32", steps=3)
    results = {text: pool.run(4, trained, text, case, timeout_s=TIMEOUT_S)[0] for text in spellings}
    first = results[spellings[0]]
    assert first
    for text, result in results.items():
        assert result == first, f"{text} differs from {spellings[0]}"
