"""`collective=ho_ring`: both levels at work at once, the same bits; and where it does not exist, a message."""

from __future__ import annotations

import math
from unittest import mock

import pytest

import zeromesh as zm
from tests.dist.engine.reference import Case, check, mesh_of
from tests.dist.engine.test_parity import trained
from tests.dist.pool import Pool, on_ranks
from zeromesh.collectives.ho_ring import HoRing
from zeromesh.errors import NotationError


def trained_and_counted(strategy: str, case: Case, *shape: int) -> tuple[list[tuple[str, bytes]], int, int]:
    """`trained`, and how many gathers and reductions were overlapped."""
    gathers = mock.patch.object(HoRing, "all_gather", autospec=True, side_effect=HoRing.all_gather)
    reductions = mock.patch.object(HoRing, "reduce_scatter", autospec=True, side_effect=HoRing.reduce_scatter)
    with gathers as gather, reductions as reduce:
        return trained(strategy, case, *shape), gather.call_count, reduce.call_count


@pytest.mark.parametrize(
    "strategy",
    [
        "node=3,cluster=3k",
        "node=2,cluster=2",
        "node=3d,cluster=3d",
        "node=1,cluster=1",
        "node=0,cluster=0",
    ],
)
def test_equal_to_the_bit(pool: Pool, strategy):
    case = Case(precision="fp32", steps=2)
    plain, *none = pool.run(4, trained_and_counted, strategy, case)[0]
    overlapped, gathers, reductions = pool.run(4, trained_and_counted, f"{strategy};collective=ho_ring", case)[0]
    assert plain
    assert overlapped == plain
    assert none == [0, 0] and gathers > 0 and reductions > 0


@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        ((2, 3), "node=3,cluster=3"),
        ((3, 2), "node=3d,cluster=1"),
        # Of several kept axes the last one's gather fills the kept copy, so that there is a copy before and after it.
        ((2, 2, 2), "node=3,cluster=3k,region=3k"),
        ((2, 2, 2), "node=3,cluster=2,region=1"),
        ((2, 2, 2), "node=0,cluster=0,region=0"),
    ],
)
def test_equal_to_the_bit_on_other_meshes(pool: Pool, shape, strategy):
    case = Case(precision="fp32", steps=2, world=math.prod(shape))
    plain, overlapped = (
        pool.run(math.prod(shape), trained_and_counted, text, case, *shape)
        for text in (strategy, f"{strategy};collective=ho_ring")
    )
    for (values, *none), (same, gathers, reductions) in zip(plain, overlapped, strict=True):
        assert same == values and none == [0, 0] and gathers + reductions > 0


@on_ranks(8)
def test_sums_over_replicas_beside_shards():
    """Not to the bit: regions are padded to be scattered, so the ranks' parts of the gradient's norm are others."""
    check("node=3,cluster=0,region=0;collective=ho_ring", Case(world=8, weighted=True), 2, 2, 2)


def test_staged_wires_are_not_overlapped(pool: Pool):
    case = Case(precision="fp32", steps=1)
    strategy = "node=3@bf16/,cluster=3@bf16/;collective=ho_ring"
    _, gathers, reductions = pool.run(4, trained_and_counted, strategy, case)[0]
    assert gathers == 0 and reductions > 0


@on_ranks(4)
def test_flat_is_refused():
    with pytest.raises(NotationError, match=r"collective=flat: the engine goes over one axis at a time.*hierarchical"):
        zm.shard(Case().build(), mesh_of(2, 2), "node=3,cluster=3;collective=flat")
