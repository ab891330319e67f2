"""Two levels: overlapped equals blocking to the bit, both equal the exact result, and each axis carries its bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dist.comm.axes import axes, values
from tests.dist.pool import Pool
from zeromesh.collectives.ho_ring.ring import ho_ring_all_gather, ho_ring_reduce_scatter
from zeromesh.comm.collectives import all_gather, reduce_scatter, workspace_bytes
from zeromesh.comm.exchange import AxisGroup, Sent

SHAPES = [(2, 2), (2, 3), (3, 2, "cluster")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def levels(node: int, cluster: int, first: str = "node") -> list[AxisGroup]:
    """Groups of the `first` axis, which is the major one, and of the other."""
    return axes(node, cluster)[:: 1 if first == "node" else -1]


def shard_of(rank: int, nodes: int, clusters: int, first: str = "node") -> int:
    node, cluster = rank % nodes, rank // nodes
    return node * clusters + cluster if first == "node" else cluster * nodes + node


def one_after_the_other(region, major, minor):
    all_gather(region.tensor_split(major.size)[major.rank], minor)
    all_gather(region, major)


def summed_one_after_the_other(region, out, major, minor, *, workspace, scales, accumulate):
    part = region.tensor_split(major.size)[major.rank]
    reduce_scatter(region, part, major, workspace=workspace, scale=scales[0])
    reduce_scatter(part, out, minor, workspace=workspace, scale=scales[1], accumulate=accumulate)


def gather(shape, shard, dtype, seed):
    major, minor = levels(*shape)
    seen: list[Sent] = []
    major.record = minor.record = seen.append
    world, own = dist.get_world_size(), shard_of(dist.get_rank(), *shape)
    exact = torch.empty(world * shard, dtype=DTYPES[dtype])
    for rank in range(world):
        index = shard_of(rank, *shape)
        exact[index * shard : (index + 1) * shard] = values(rank, shard, DTYPES[dtype], seed)
    for collective in (one_after_the_other, ho_ring_all_gather):
        region = torch.full_like(exact, float("nan"))
        region[own * shard : (own + 1) * shard] = exact[own * shard : (own + 1) * shard]
        seen.clear()
        collective(region, major, minor)
        assert torch.equal(region, exact)
        item = exact.element_size()
        expected = {
            minor.name: (minor.size - 1) * shard * item,
            major.name: (major.size - 1) * minor.size * shard * item,
        }
        assert {sent.axis: sent.sent_bytes for sent in seen} == expected
        assert {sent.operation for sent in seen} == {"all_gather"}


def scatter(shape, shard, wire, out, seed, scales, accumulate, workspace_share=1):
    major, minor = levels(*shape)
    seen: list[Sent] = []
    major.record = minor.record = seen.append
    world, own = dist.get_world_size(), shard_of(dist.get_rank(), *shape)
    workspace = torch.empty(workspace_bytes(major) // workspace_share, dtype=torch.uint8)
    results = []
    for collective in (summed_one_after_the_other, ho_ring_reduce_scatter):
        region = values(dist.get_rank(), world * shard, DTYPES[wire], seed)
        result = torch.ones(shard, dtype=DTYPES[out])
        seen.clear()
        collective(region, result, major, minor, workspace=workspace, scales=scales, accumulate=accumulate)
        results.append(result)
        item = region.element_size()
        expected = {
            major.name: (major.size - 1) * minor.size * shard * item,
            minor.name: (minor.size - 1) * shard * item,
        }
        assert {sent.axis: sent.sent_bytes for sent in seen} == expected
    assert torch.equal(results[0], results[1])
    exact = torch.stack([values(rank, world * shard, DTYPES[wire], seed).double() for rank in range(world)]).sum(0)
    exact = exact[own * shard : (own + 1) * shard] * scales[0] * scales[1] + (1.0 if accumulate else 0.0)
    # Sums of up to 8 terms of size 4, rounded to the wire between the levels and to the result after them.
    eps = max(torch.finfo(DTYPES[wire]).eps, torch.finfo(DTYPES[out]).eps)
    torch.testing.assert_close(results[1].double(), exact, rtol=2 * eps, atol=32 * eps)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=8)
@given(shard=st.integers(0, 90), dtype=st.sampled_from(sorted(DTYPES)), seed=st.integers(0, 9))
def test_all_gather(pool: Pool, shape, shard, dtype, seed):
    pool.run(shape[0] * shape[1], gather, shape, shard, dtype, seed)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=10)
@given(
    shard=st.integers(0, 90),
    wire=st.sampled_from(sorted(DTYPES)),
    out=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 9),
    scales=st.sampled_from([(1.0, 1.0), (0.5, 1 / 3)]),
    accumulate=st.booleans(),
)
def test_reduce_scatter(pool: Pool, shape, shard, wire, out, seed, scales, accumulate):
    pool.run(shape[0] * shape[1], scatter, shape, shard, wire, out, seed, scales, accumulate)


def test_regions_of_many_slices(pool: Pool):
    shape = (2, 3, "cluster")
    pool.run(6, gather, shape, 150_001, "fp32", 1)
    pool.run(6, scatter, shape, 300_001, "bf16", "fp32", 1, (0.5, 0.5), True)


def test_slots_are_used_again_only_after_their_terms_are_summed(pool: Pool):
    # A sixteenth of the workspace makes the slots go round five times and more.
    pool.run(4, scatter, (2, 2), 190_001, "fp32", "fp32", 1, (1.0, 1.0), False, workspace_share=16)
