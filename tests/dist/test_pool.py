"""The pool itself: failures that say their cause."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist

from tests.dist.pool import Pool, RanksFailed


def ranks(scale):
    dist.barrier()
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


def test_a_failure_shows_every_rank_and_the_pool_recovers(pool: Pool):
    pool.run(2, ranks, 1, spoils=True)  # tests before may hold the group that was there, which keeps its sockets open
    for _ in range(2):
        assert pool.run(2, ranks, 1) == [(0, 2), (1, 2)]
        with pytest.raises(RanksFailed, match=r"(?s)--- rank 0: .*Traceback.*--- rank 1: .*broken on purpose"):
            pool.run(2, fail_on_one)


def test_a_hanging_rank_shows_its_stacks(pool: Pool):
    with pytest.raises(RanksFailed, match=r"(?s)rank 0: ended.*rank 1: did not end in time.*hang_on_one"):
        pool.run(2, hang_on_one, timeout_s=3.0)
    assert pool.run(1, ranks, 1) == [(0, 1)]


def test_a_dead_rank_is_named(pool: Pool):
    with pytest.raises(RanksFailed, match="rank 1: the process died"):
        pool.run(2, die_on_one)
