"""Collectives over one axis: values to the bit, bytes, order, errors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dist.comm.axes import line, make_axes, room, values
from tests.dist.pool import TIMEOUT_S, Pool, on_ranks
from zeromesh.comm.collectives import all_gather, all_reduce, reduce_scatter, workspace_bytes
from zeromesh.comm.exchange import Sent
from zeromesh.errors import CommunicationError, InternalError

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def summed(numel: int, dtype: torch.dtype, seed: int, world: int, scale: float) -> torch.Tensor:
    """The sum as documented: wide, in the order of the ranks."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = values(0, numel, dtype, seed).to(wide)
    for rank in range(1, world):
        total = total + values(rank, numel, dtype, seed).to(wide)
    return total * scale


def gather(chunk, dtype, seed):
    group = line()
    region = torch.full((chunk * group.size,), float("nan"), dtype=FLOATS[dtype])
    region[group.rank * chunk : (group.rank + 1) * chunk] = values(group.rank, chunk, FLOATS[dtype], seed)
    all_gather(region, group)
    expected = torch.cat([values(rank, chunk, FLOATS[dtype], seed) for rank in range(group.size)])
    assert torch.equal(region, expected)


def scatter(chunk, wire, out, seed, scale, accumulate, workspace_share=1):
    group = line()
    before = values(group.rank, chunk, FLOATS[out], seed + 1)
    result = before.clone()
    region = values(group.rank, chunk * group.size, FLOATS[wire], seed)
    sent = region.clone()
    part = room(group)[: workspace_bytes(group) // workspace_share]
    reduce_scatter(region, result, group, workspace=part, scale=scale, accumulate=accumulate)
    total = summed(chunk * group.size, FLOATS[wire], seed, group.size, scale)
    own = total[group.rank * chunk : (group.rank + 1) * chunk]
    expected = (before.to(own.dtype) + own if accumulate else own).to(FLOATS[out])
    assert torch.equal(result, expected)
    assert torch.equal(region, sent)


def reduce(chunk, dtype, seed, scale):
    group = line()
    numel = chunk * group.size
    tensor = values(group.rank, numel, FLOATS[dtype], seed)
    all_reduce(tensor, group, workspace=room(group), scale=scale)
    expected = summed(numel, FLOATS[dtype], seed, group.size, scale).to(FLOATS[dtype])
    if dtype in ("bf16", "fp16"):
        assert torch.equal(tensor, expected)
    else:  # the backend's order of summation: three or four terms of size 1, each sum rounded once
        torch.testing.assert_close(tensor, expected, rtol=0, atol=8 * torch.finfo(tensor.dtype).eps)
    first = tensor.clone()
    dist.broadcast(first, 0)
    assert torch.equal(tensor, first)


@pytest.mark.parametrize("world", [2, 3])
@settings(max_examples=10)
@given(chunk=st.integers(0, 70), dtype=st.sampled_from(sorted(FLOATS)), seed=st.integers(0, 9))
def test_all_gather(pool: Pool, world, chunk, dtype, seed):
    pool.run(world, gather, chunk, dtype, seed)


@pytest.mark.parametrize("world", [2, 3])
@settings(max_examples=25)
@given(
    chunk=st.integers(0, 70),
    wire=st.sampled_from(["bf16", "fp16", "fp32"]),
    out=st.sampled_from(["bf16", "fp16", "fp32"]),
    seed=st.integers(0, 9),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    accumulate=st.booleans(),
)
def test_reduce_scatter(pool: Pool, world, chunk, wire, out, seed, scale, accumulate):
    pool.run(world, scatter, chunk, wire, out, seed, scale, accumulate)


@pytest.mark.parametrize("world", [2, 3])
@settings(max_examples=15)
@given(
    chunk=st.integers(0, 70),
    dtype=st.sampled_from(sorted(FLOATS)),
    seed=st.integers(0, 9),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
)
def test_all_reduce(pool: Pool, world, chunk, dtype, seed, scale):
    pool.run(world, reduce, chunk, dtype, seed, scale)


def test_regions_of_many_pieces(pool: Pool):
    world = 4
    pool.run(world, gather, 300_001, "fp32", 1)
    pool.run(world, scatter, 600_001, "bf16", "fp32", 1, 0.5, True)
    pool.run(world, scatter, 150_001, "fp64", "fp64", 1, 0.25, False)
    pool.run(world, reduce, 300_003, "bf16", 1, 1 / 3)


def test_slots_are_used_again_only_after_their_terms_are_summed(pool: Pool):
    # A share of the workspace makes the slots go round five times and more.
    pool.run(4, scatter, 100_001, "fp32", "fp32", 1, 1.0, False, workspace_share=32)


@on_ranks(3)
def test_the_result_may_replace_the_own_chunk():
    group = line()
    region = values(group.rank, 30, torch.float32, 7)
    own = region[group.rank * 10 : (group.rank + 1) * 10]
    reduce_scatter(region, own, group, workspace=room(group))
    expected = summed(30, torch.float32, 7, 3, 1.0)[group.rank * 10 : (group.rank + 1) * 10]
    assert torch.equal(own, expected)


@on_ranks(4)
def test_bytes_sent():
    group = line()
    seen: list[Sent] = []
    group.record = seen.append
    region = torch.zeros(400_000, dtype=torch.bfloat16)
    all_gather(region, group)
    reduce_scatter(region, torch.zeros(100_000), group, workspace=room(group))
    all_reduce(region, group, workspace=room(group))
    all_reduce(region[:200_000].float(), group, workspace=room(group))
    assert [(sent.operation, sent.axis, sent.sent_bytes) for sent in seen] == [
        ("all_gather", "node", 600_000),
        ("reduce_scatter", "node", 600_000),
        ("all_reduce", "node", 600_000),
        ("all_reduce", "node", 600_000),
        ("all_reduce", "node", 1_200_000),
    ]


@on_ranks(2, spoils=True)
def test_a_stalled_peer_is_named_and_a_mismatch_ends_in_the_timeout():
    (stalled,), (mismatched,) = (make_axes(2, timeout_s=3.0) for _ in range(2))
    if stalled.rank == 0:
        with pytest.raises(CommunicationError, match=r"all_gather over axis node failed on rank 0 with rank 1 .* 3"):
            all_gather(torch.zeros(8), stalled)
    with pytest.raises(CommunicationError, match="stalled, or ranks issued different collectives"):
        all_gather(torch.zeros(8 if stalled.rank else 16), mismatched)


@on_ranks(2)
def test_a_region_must_be_flat_and_even():
    with pytest.raises(InternalError, match=r"flat, contiguous and of 2 equal chunks; got shape \(3,\)"):
        all_gather(torch.zeros(3), line())


@on_ranks(2)
def test_timeout_is_that_of_the_default_group():
    assert line().timeout_s == TIMEOUT_S
