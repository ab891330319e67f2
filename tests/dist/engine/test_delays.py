"""Delays at random change nothing: whatever is needed is waited for. And they would show if it were not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

import zeromesh as zm
from tests.dist.engine.delays import delays, without_order_of_lanes, without_wait
from tests.dist.engine.reference import Case, Unequal, backward, check, mesh_of, sharded
from tests.dist.pool import on_ranks

CASE = Case(steps=2, micro_batches=2, optimizer="both")
PART = "node=3,cluster=1 | *.up: node=3@int8/int4,cluster=1@/int4+ef"
STRATEGIES = [
    "node=0,cluster=0",
    "node=1,cluster=1",
    "node=2,cluster=1",
    "node=1,cluster=2",
    "node=3,cluster=1",
    "node=3,cluster=3;prefetch=0",
    "node=3,cluster=3;prefetch=2",
    "node=3,cluster=3;overlap=gather",
    "node=3,cluster=3;collective=ho_ring",
    "node=3d,cluster=3",
    "node=2,cluster=3k",
    "node=3,cluster=3dk;prefetch=1",
    "node=3,cluster=1 | *.up: node=3,cluster=3k | head: node=0,cluster=1",
]


@pytest.mark.parametrize("seed", [1, 2])
@on_ranks(4)
def test_late_or_early_the_numbers_are_those_of_plain_training(seed):
    for strategy in STRATEGIES[seed % 2 :: 2]:
        with delays(seed) as drawn:
            check(strategy, CASE, 2, 2)
        assert drawn.count > 100, drawn


def trained(strategy: str, case: Case) -> list[torch.Tensor]:
    with sharded(strategy, case, mesh_of(2, 2)) as (model, optimizer):
        for step in range(case.steps):
            backward(model, case, step)
            zm.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return list(zm.full_state_dict(model).values())


@on_ranks(4)
def test_late_or_early_the_bits_are_the_same():
    """Of fp32 sums and of quantised wires, which round at random: their noise is drawn in the order of the jobs."""
    case = Case(precision="fp32", steps=2, micro_batches=2)
    for strategy in (
        "node=3,cluster=1",
        "node=3@int8/int4,cluster=0@/int8",
        "node=3@int8/int8+ef,cluster=1@/int4+ef",
        PART,
    ):
        expected = trained(strategy, case)
        with delays(3):
            got = trained(strategy, case)
        assert all(map(torch.equal, got, expected)), strategy


LATE_S = 0.02
"""More than the computation takes between two points: else a run without a wait might end well by chance."""

FAULTS: dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
    "a gather, before its parameters are used": ("node=3,cluster=1", lambda: without_wait("ticket")),
    "a reduction, before its slot is filled again": ("node=3,cluster=3", lambda: without_wait("taking")),
    "a reduction, before its sums are read": ("node=3,cluster=1", lambda: without_wait("reducing")),
    "the lane before, on its way to the next": ("node=3,cluster=1", without_order_of_lanes),
}


@pytest.mark.parametrize("wait", FAULTS)
@on_ranks(4)
def test_a_wait_left_out_shows(wait):
    strategy, leave_out = FAULTS[wait]
    with pytest.raises(Unequal), leave_out(), delays(4, lane_s=LATE_S):
        check(strategy, CASE, 2, 2)


@pytest.mark.parametrize("strategy", sorted({strategy for strategy, _ in FAULTS.values()}))
@on_ranks(4)
def test_the_same_delays_with_every_wait_change_nothing(strategy):
    with delays(4, lane_s=LATE_S):
        check(strategy, CASE, 2, 2)
