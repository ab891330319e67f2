"""Any strategy trains as one process does, with the collectives of other backends than gloo: on gloo ranks that are
told it is another, whose own reductions are the native ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeromesh as zm
from tests.dist.engine.reference import Case, check, mesh_of
from tests.dist.engine.test_parity import EACH, EACH_KEPT, THREE
from tests.dist.pool import on_ranks
from zeromesh.comm import AxisGroup, groups
from zeromesh.comm.transport import Native

make_group = groups._make_group


def told(*args: Any) -> AxisGroup:
    group = make_group(*args)
    group.transport = Native("cpu")
    return group


@contextmanager
def native() -> Iterator[None]:
    with mock.patch.object(groups, "_make_group", told):
        yield


@on_ranks(4)
def test_mixes_on_two_axes():
    for strategy in EACH + EACH_KEPT:
        with native():
            check(strategy, Case(optimizer="both", debug=True), 2, 2)


@on_ranks(8)
def test_some_on_three():
    for strategy in THREE[::40]:
        with native():
            check(strategy, Case(world=8, optimizer="both"), 2, 2, 2)


@pytest.mark.parametrize(
    "case", [Case(weighted=True), Case(precision="bf16-wire", steps=1), Case(precision="bf16", steps=1)], ids=str
)
@on_ranks(4)
def test_weights_and_wires(case):
    for strategy in ("node=3,cluster=0", "node=2,cluster=1", "node=0,cluster=0"):
        with native():
            check(strategy, case, 2, 2)


@on_ranks(4)
def test_two_levels_at_once_follow_each_other():
    for strategy in ("node=3,cluster=3", "node=2,cluster=2", "node=1,cluster=1", "node=0,cluster=0"):
        with native():
            check(f"{strategy};collective=ho_ring", Case(optimizer="both"), 2, 2)


@on_ranks(2)
def test_memory_is_as_predicted():
    for strategy in ("node=3", "node=3@int8/int8", "node=1@int8/"):
        with native():
            model: Any = zm.shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), mesh_of(2), strategy)
        lines = {line.kind: (line.predicted_bytes, line.allocated_bytes) for line in zm.memory_report(model)}
        assert all(predicted == allocated for predicted, allocated in lines.values()), (strategy, lines)
        assert bool(torch.tensor(lines["total"]).all())
