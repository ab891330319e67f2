"""Pipelines of sharded stages under torch's schedules."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import zeromesh as zm
from tests.dist.compose.pipelines import (
    BLOCKS,
    MICROS,
    SCHEDULES,
    Staged,
    StageOf,
    batch,
    compare_grads,
    loss_of,
    mesh_of,
    parity,
    staged,
)
from tests.dist.features.parity import net, sgd
from tests.dist.pool import kept, on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.errors import InputError, MismatchError, ModelError, OptimizerError

SCARCE = "node=3,cluster=0;prefetch=0"
"""All blocks of a stage share one slot, so each is gathered anew for each forward and backward."""


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(4)
def test_trains_as_plain_training_does(name: str) -> None:
    parity(name, SCARCE, 4, debug=True)
    parity(name, "node=1,cluster=0", 4)


@on_ranks(8, timeout_s=60)
def test_on_two_levels() -> None:
    for name in ("1f1b", "zbv"):
        parity(name, "node=3,cluster=1", 8, steps=2)


def calls_of_a_step(ours: Staged, step: int) -> list[Counter[str]]:
    """By stage on this rank: how many collectives, by operation."""
    with ExitStack() as reports:
        found = [reports.enter_context(zm.traffic_report(model, micro_batches=MICROS)) for model in ours.models]
        ours.step(batch(step, dist.get_rank() % 2))
    return [Counter(call.operation for call in report.calls) for report in found]


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(4)
def test_gradients_are_reduced_once_a_step_and_stage(name: str) -> None:
    """Where they wait for the step's end; else with each micro-batch, of zero-bubble's halves in the second alone."""
    for strategy, times in {"node=3,cluster=0": MICROS, "node=3d,cluster=0": 1}.items():
        ours = staged(net(num_blocks=4), name, strategy, mesh_of(4))
        calls_of_a_step(ours, 0)  # in which torch learns the shapes
        for model, calls in zip(ours.models, calls_of_a_step(ours, 1), strict=True):
            units = sum(unit.trainable for unit in engine_of(model).schedule.units)
            assert calls["reduce_scatter"] == units * times


@on_ranks(4)
def test_a_stage_whose_blocks_share_a_slot_gathers_them_for_each_pass() -> None:
    """But where a forward is followed by a backward, whose first block is still there. The root has its own slot."""
    blocks = BLOCKS // 2
    for name, turns in {"gpipe": (1, 1), "1f1b": (3, 4)}.items():
        ours = staged(net(num_blocks=BLOCKS), name, SCARCE, mesh_of(4))
        calls_of_a_step(ours, 0)
        (calls,) = calls_of_a_step(ours, 1)
        assert calls["all_gather"] == 2 * MICROS * blocks - turns[dist.get_rank() // 2] + MICROS
