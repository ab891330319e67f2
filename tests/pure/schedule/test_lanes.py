"""Which transfers wait for each other."""

from __future__ import annotations

import pytest

from tests.pure.schedule.test_parts import DENSE, SPARSE, units
from zeromesh.schedule.lanes import in_lanes, lent_axes, side_by_side
from zeromesh.schedule.program import Schedule
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.parts import layouts_of

MESH = [("node", 4), ("cluster", 2)]
APART = {"gather/node", "gather/cluster", "reduce/node", "reduce/cluster"}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("node=3,cluster=1", APART),
        ("node=1,cluster=1", APART),
        ("node=0,cluster=0;collective=flat", {"gather", "reduce/node", "reduce/cluster"}),
        ("node=0,cluster=0", {"gather/node", "reduce/node", "reduce/cluster"}),  # sums are scattered and gathered
        (
            "node[2]=3,node[2]=1,cluster=0",
            {"gather/node[2]", "gather/node[2]#2", "reduce/node[2]", "reduce/node[2]#2", "reduce/cluster"},
        ),
        ("node=1,cluster=1;collective=ho_ring", {"gather/cluster+node", "reduce/node+cluster"}),
        ("node=3,cluster=1;collective=ho_ring", APART),  # no chain goes over both
        # Parameters on the host pass through memory of the lane that refreshes them.
        ("host=3,node=2,cluster=2", {"gather/cluster+node", "reduce/node", "reduce/cluster"}),
        ("host=3,node=3,cluster=2", APART),
    ],
)
def test_lanes_of_a_layout(strategy: str, expected: set[str]) -> None:
    schedule = Schedule.of(Layout.of(strategy, MESH), units(DENSE))
    assert {*schedule.lanes.names} == expected
    assert schedule.lanes.lane("reduce", "beyond") in expected and schedule.lanes.lane("gather") in expected
    assert {*schedule.memory.workspace} == expected


def test_a_communicator_has_one_lane_whoever_uses_it() -> None:
    """A part's axis takes the lane of the communicator that it is lent; and its chain may join lanes of others."""
    for text, joined in (
        ("node=3,cluster=1 | experts: node=3,cluster=3", False),
        ("node=3,cluster=1 | experts: host=3,node=2,cluster=2", True),
    ):
        layouts = layouts_of(Strategy.parse(text), MESH, {})
        lent = lent_axes(layouts.values(), lambda _, axis: axis.mesh_axis)
        assert lent == {"experts:node": "node", "experts:cluster": "cluster"}
        schedule = Schedule.of(layouts.pop(""), units(DENSE, SPARSE), parts=layouts, lent=lent)
        assert schedule.lanes.lane("gather", "cluster") == schedule.lanes.lane("gather", "experts:cluster")
        assert schedule.lanes.lane("gather", "node") == schedule.lanes.lane("gather", "experts:node")
        assert (schedule.lanes.lane("gather", "node") == schedule.lanes.lane("gather", "cluster")) == joined


def test_chains_are_cut_up_by_lane_and_run_side_by_side() -> None:
    def cut(chain: str) -> list[tuple[str, list[str]]]:
        return in_lanes([*chain], lambda step: step if step in "xy" else "", "z")

    assert cut("axxby") == [("x", ["a", "x", "x", "b"]), ("y", ["y"])] and cut("ab") == [("z", ["a", "b"])]
    assert side_by_side([cut("axy"), cut("x"), cut("xby")]) == [
        ("x", ["a", "x", "x", "b"]),
        ("y", ["y", "y"]),
        ("x", ["x"]),
    ]
    assert side_by_side([]) == []
