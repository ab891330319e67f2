"""The pool itself: results by rank, fresh groups, failures that say their cause."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.dist.pool import Pool, RanksFailed, kept, on_ranks


def ranks(scale):
    return dist.get_rank() * scale, dist.get_world_size()


def fail_on_one():
    if dist.get_rank() == 1:
        raise KeyError("broken on purpose")
    dist.barrier()


def hang_on_one():
    if dist.get_rank() == 1:
        threading.Event().wait()


def die_on_one():
    if dist.get_rank() == 1:
        os._exit(3)


@pytest.mark.parametrize("world", [1, 2, 3, 6, 2])
def test_results_come_by_rank(pool: Pool, world):
    assert pool.run(world, ranks, 10) == [(rank * 10, world) for rank in range(world)]


@pytest.mark.parametrize("scale", [1, 2])
@on_ranks(3)
def test_body_runs_on_every_rank(scale):
    tensor = torch.tensor([dist.get_rank() * scale])
    dist.all_reduce(tensor)
    assert tensor.item() == 3 * scale


@given(value=st.integers(-5, 5))
@on_ranks(2)
def test_examples_are_drawn_once(value):
    low, high = torch.tensor([value]), torch.tensor([value])
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    assert low.item() == high.item() == value


def identity_of_group():
    return id(kept(dist.new_group, (0, 1)))


def test_groups_are_kept_until_spoiled(pool: Pool):
    first = pool.run(2, identity_of_group)
    assert pool.run(2, identity_of_group, spoils=True) == first
    store = pool._group
    pool.run(2, identity_of_group)
    assert store is None and pool._group is not None


def test_a_failure_shows_every_rank_and_the_pool_recovers(pool: Pool):
    with pytest.raises(RanksFailed, match=r"(?s)--- rank 0: .*Traceback.*--- rank 1: .*broken on purpose"):
        pool.run(2, fail_on_one)
    assert pool.run(2, ranks, 1) == [(0, 2), (1, 2)]


def test_a_hanging_rank_shows_its_stacks(pool: Pool):
    with pytest.raises(RanksFailed, match=r"(?s)rank 0: ended.*rank 1: did not end in time.*hang_on_one"):
        pool.run(2, hang_on_one, timeout_s=3.0)
    assert pool.run(1, ranks, 1) == [(0, 1)]


def test_a_dead_rank_is_named(pool: Pool):
    with pytest.raises(RanksFailed, match="rank 1: the process died"):
        pool.run(2, die_on_one)
