"""Delays at random change nothing: whatever is needed is waited for. And they would show if it were not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.dist.engine.delays import delays, without_order_of_lanes, without_wait
from tests.dist.engine.reference import Case, Unequal, check, require_same, trained
from tests.dist.pool import on_ranks

CASE, ONCE = Case(optimizer="both"), Case(optimizer="both", steps=1)
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


@on_ranks(4)
def test_late_or_early_the_numbers_are_those_of_plain_training():
    for strategy in (*STRATEGIES[::4], STRATEGIES[9]):
        with delays(1) as drawn:
            check(strategy, CASE, 2, 2)
        assert drawn.count > 100, drawn


@on_ranks(4)
def test_late_or_early_the_bits_are_the_same():
    """Of fp32 sums and of quantised wires, which round at random: their noise is drawn in the order of the jobs."""
    for strategy in (
        "node=3@int8/int4,cluster=0@/int8",
        "node=3,cluster=1 | *.up: node=3@int8/int4,cluster=1@/int4+ef",
    ):
        expected = trained(strategy, Case(precision="fp32"), 2, 2)
        with delays(3):
            require_same(strategy, trained(strategy, Case(precision="fp32"), 2, 2), expected)


LATE_S = 0.15
"""Far more than the computation takes between two points, on a busy machine too: else a run without a wait might end
well by chance."""

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
        check(strategy, ONCE, 2, 2)


@on_ranks(4)
def test_the_same_delays_with_every_wait_change_nothing():
    for strategy in sorted({strategy for strategy, _ in FAULTS.values()}):
        with delays(4, lane_s=LATE_S):
            check(strategy, ONCE, 2, 2)
