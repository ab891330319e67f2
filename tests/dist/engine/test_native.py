"""Any strategy trains as one process does, with the collectives of other backends than gloo: on gloo ranks that are
told it is another, whose own reductions are the native ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from torch import nn

import zeromesh as zm
from tests.dist.engine.reference import Case, check
from tests.dist.engine.test_parity import EACH, EACH_KEPT, THREE
from tests.dist.parity import mesh_of
from tests.dist.pool import on_ranks
from zeromesh.comm import AxisGroup, groups
from zeromesh.comm.transport import Native


@contextmanager
def native() -> Iterator[None]:
    make_group = groups._make_group

    def told(*args: Any) -> AxisGroup:
        group = make_group(*args)
        group.transport = Native("cpu")
        return group

    with mock.patch.object(groups, "_make_group", told):
        yield


CASES = {
    Case(optimizer="both", debug=True, weighted=True): (
        *(EACH[::2] + EACH_KEPT[:1]),
        *(f"node={stage},cluster={stage};collective=ho_ring" for stage in "30"),
    ),
    Case(precision="bf16-wire", steps=1): ("node=3,cluster=0", "node=2,cluster=1"),
    Case(precision="bf16", steps=1): ("node=3,cluster=0",),
}


@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(4)
def test_two_axes(case):
    for strategy in CASES[case]:
        with native():
            check(strategy, case, 2, 2)


@on_ranks(8)
def test_three_axes():
    with native():
        check(THREE[80], Case(world=8, optimizer="both"), 2, 2, 2)


@on_ranks(2)
def test_memory_is_as_predicted():
    for strategy in ("node=3", "node=3@int8/int8", "node=1@int8/"):
        with native():
            model = zm.shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), mesh_of(2), strategy)
        lines = {line.kind: (line.predicted_bytes, line.allocated_bytes) for line in zm.memory_report(model)}
        assert all(predicted == allocated for predicted, allocated in lines.values()), (strategy, lines)
        assert all(lines["total"])
