"""When refreshes start: [Note: Window] of `zeromesh.schedule.program`."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.pure.schedule.test_interpreter import MESH
from tests.pure.schedule.test_transfers import stack
from zeromesh.schedule import Interpreter, Schedule
from zeromesh.schedule.step import Counted, run_micro_batch
from zeromesh.strategy import Layout


@dataclass(slots=True)
class Issued(Counted):
    """Notes which gathers and refreshes start, and which units compute, in order."""

    calls: list[tuple[str, int]] = field(default_factory=list)

    def refresh(self, unit: int) -> None:
        self.calls.append(("refresh", unit))

    def unshard(self, unit: int, *, from_kept: bool, after: None) -> None:
        self.calls.append(("gather", unit))


def issued(strategy: str, order: list[int]) -> tuple[list[tuple[str, int]], int]:
    """The calls of a step's update and of two micro-batches after it, and how many the update has made."""
    schedule = Schedule.of(Layout.of(strategy, MESH), stack(16, blocks=5)).reordered(order)
    backend = Issued(schedule)
    interpreter = Interpreter(schedule=schedule, backend=backend)
    interpreter.stepped(range(len(schedule.units)))
    made = len(backend.calls)
    for last in (False, True):
        run_micro_batch(interpreter, last=last, compute=lambda phase, unit: backend.calls.append((phase, unit)))
    return backend.calls, made


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [0, 3, 1, 5, 2, 4]])
def test_no_gather_waits_for_a_refresh_that_it_does_not_need(prefetch: int, order: list[int]):
    calls, made = issued(f"node=3,cluster=1;prefetch={prefetch}", order)
    refreshed, first = list[int](), dict.fromkeys(unit for kind, unit in calls if kind == "gather")
    for kind, unit in calls:
        if kind == "refresh":
            refreshed.append(unit)
        elif kind == "forward" and unit:
            begun = order[: order.index(unit) + prefetch + 2]
            assert set(begun[1:]) <= set(refreshed)  # those that are prefetched, and one more: the lane is at work
        elif kind == "gather" and first.pop(unit, 0) is None:
            assert len(refreshed[refreshed.index(unit) :]) <= 2  # its own, and one that begins as its own ends
    assert refreshed == order[1:]  # the root, which comes first, trains nothing
    assert made == 2


def test_where_ranks_may_call_other_units_all_start_with_the_step():
    calls, made = issued("node=1,cluster=1", [0, 1, 2, 3, 4, 5])
    assert calls[:made] == [("refresh", unit) for unit in range(1, 6)]
    assert not {"refresh", "gather"} & {kind for kind, _ in calls[made:]}
