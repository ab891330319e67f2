"""Delays at random change nothing: all that is needed is waited for.

Without a wait the numbers are wrong: `test_faults` and `tests/simdev/test_order.py`, which no clock decides.
"""

from tests.dist.engine.delays import delays
from tests.dist.parity import Case, check_case, require_same, trained
from tests.dist.pool import on_ranks

CASE = Case(optimizer="both")
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
    for strategy in (*STRATEGIES[4::4], STRATEGIES[9]):
        with delays(1) as drawn:
            check_case(strategy, CASE, 2, 2)
        assert drawn.count > 100, drawn


@on_ranks(4)
def test_late_or_early_the_bits_are_the_same():
    """For fp32 sums, and for quantised wires, which round at random: their noise is drawn in the order of the jobs."""
    case = Case(precision="fp32", micro_batches=1)
    strategy = "node=3,cluster=0@/int8 | *.up: node=3@int8/int4,cluster=1@/int4+ef"
    expected = trained(strategy, case, 2, 2)
    with delays(3):
        require_same(strategy, trained(strategy, case, 2, 2), expected)
