"""Which sample is used when: a permutation an epoch, the same global batch for every world."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from zeromesh.train.sampler import Sampler, permute

sizes = st.integers(1, 300)


def make(**changes: int) -> Sampler:
    fields = {"num_samples": 50, "global_sequences": 8, "micro": 2, "world": 2, "seed": 0}
    return Sampler(**(fields | changes))


@given(size=sizes, seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(i, size, (seed, epoch)) for i in range(size)) == list(range(size))


def global_batch(sampler: Sampler, step: int) -> list[int]:
    """All of a step's samples, as one rank takes them."""
    alone = replace(sampler, micro=sampler.global_sequences, world=1)
    return next(alone.rank_batches(step, 0))


def test_order_is_pinned() -> None:
    """A run resumed by a later version must see the same samples: this order is part of a checkpoint's meaning."""
    assert global_batch(make(num_samples=10, global_sequences=10), 0) == [8, 2, 4, 0, 6, 7, 3, 5, 9, 1]
    orders = {tuple(permute(i, 40, key) for i in range(40)) for key in [(0, 0), (0, 1), (1, 0), (1, 1)]}
    assert len(orders) == 4


@given(samples=sizes, batch=st.integers(1, 40), steps=st.integers(1, 6))
def test_each_epoch_uses_each_sample_once(samples: int, batch: int, steps: int) -> None:
    sampler = make(num_samples=samples, global_sequences=batch)
    used = [sample for step in range(steps) for sample in global_batch(sampler, step)]
    for start in range(0, len(used) - samples + 1, samples):
        assert sorted(used[start : start + samples]) == list(range(samples))


@given(
    samples=sizes, batch=st.integers(1, 40), micro=st.integers(1, 5), world=st.integers(1, 9), step=st.integers(0, 50)
)
def test_ranks_share_out_the_global_batch_exactly(samples: int, batch: int, micro: int, world: int, step: int) -> None:
    sampler = make(num_samples=samples, global_sequences=batch, micro=micro, world=world)
    dealt = [list(sampler.rank_batches(step, rank)) for rank in range(world)]
    (count,) = {len(batches) for batches in dealt}
    assert all(len(indices) <= micro for batches in dealt for indices in batches)
    in_order = [i for micro_batch in range(count) for rank in dealt for i in rank[micro_batch]]
    assert in_order == global_batch(sampler, step)


def test_ranks_without_sequences_still_have_their_micro_batches() -> None:
    sampler = make(global_sequences=5, micro=2, world=2)
    assert [[len(i) for i in sampler.rank_batches(0, rank)] for rank in (0, 1)] == [[2, 1], [2, 0]]
