"""`collective=ho_ring`: both levels at work at once, the same bits; and where it does not exist, a message."""

from __future__ import annotations

import math
from unittest import mock

import pytest

import zeromesh as zm
from tests.dist.engine.reference import Bits, Case, check, require_same, trained
from tests.dist.parity import mesh_of
from tests.dist.pool import on_ranks
from zeromesh.collectives.ho_ring import HoRing
from zeromesh.errors import NotationError


def counted(strategy: str, case: Case, *shape: int) -> tuple[Bits, int, int]:
    """`trained`, and how many gathers and reductions were overlapped."""
    gathers = mock.patch.object(HoRing, "all_gather", autospec=True, side_effect=HoRing.all_gather)
    reductions = mock.patch.object(HoRing, "reduce_scatter", autospec=True, side_effect=HoRing.reduce_scatter)
    with gathers as gather, reductions as reduce:
        return trained(strategy, case, *shape), gather.call_count, reduce.call_count


def require_same_bits(strategies: tuple[str, ...], *shape: int) -> None:
    case = Case(precision="fp32", world=math.prod(shape))
    for strategy in strategies:
        plain, *none = counted(strategy, case, *shape)
        overlapped, gathers, reductions = counted(f"{strategy};collective=ho_ring", case, *shape)
        require_same(strategy, overlapped, plain)
        assert none == [0, 0] and gathers + reductions > 0, strategy


@on_ranks(4)
def test_equal_to_the_bit():
    require_same_bits(("node=3,cluster=3k", "node=0,cluster=0"), 2, 2)


@on_ranks(6)
def test_equal_to_the_bit_on_an_odd_mesh():
    require_same_bits(("node=3d,cluster=1",), 3, 2)


@on_ranks(8)
def test_equal_to_the_bit_on_three_axes():
    """With several kept axes the last one's gather fills the kept copy, so a copy comes before and after it."""
    require_same_bits(("node=3,cluster=3k,region=3k",), 2, 2, 2)
    # Not to the bit: regions are padded to be scattered, so the ranks' parts of the gradient's norm are others.
    check("node=3,cluster=0,region=0;collective=ho_ring", Case(world=8, weighted=True), 2, 2, 2)


@on_ranks(4)
def test_staged_wires_are_not_overlapped():
    strategy = "node=3@bf16/,cluster=3@bf16/;collective=ho_ring"
    _, gathers, reductions = counted(strategy, Case(precision="fp32", steps=1), 2, 2)
    assert gathers == 0 and reductions > 0
    with pytest.raises(NotationError, match=r"collective=flat can only be simulated.*one axis at a time.*hierarchical"):
        zm.shard(Case().build(), mesh_of(2, 2), "node=3,cluster=3;collective=flat")
