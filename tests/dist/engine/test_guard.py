"""Debug mode finds what autograd's version counters no longer can: see zeromesh.engine.guard."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh as zm
from tests.dist.engine.reference import backward, check, mesh_of, sharded
from tests.dist.engine.test_faults import CASE, STRATEGY, slot_reused_too_early, stale_after_evaluation
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.engine.guard import SlotGuard, fingerprint
from zeromesh.errors import InternalError, ModelError


def debug():
    return mock.patch.dict("os.environ", {"ZEROMESH_DEBUG": "1"})


@pytest.mark.parametrize("fault", [slot_reused_too_early, stale_after_evaluation])
@on_ranks(4)
def test_a_slot_in_other_hands_is_named(fault):
    """A sound run passes: most cases of `test_parity` are in debug mode."""
    strategy = "node=3,cluster=3" if fault is stale_after_evaluation else STRATEGY
    with debug(), fault(), pytest.raises(InternalError, match=r"slot|gathered"):
        check(strategy, CASE, 2, 2)


@on_ranks(4)
def test_a_change_by_hand_needs_a_refresh():
    for refreshed in (False, True):
        with debug(), sharded("node=3,cluster=3", CASE, mesh_of(2, 2)) as (model, _):
            backward(model, CASE, 0)
            with torch.no_grad():
                for param in model.parameters():
                    param.local.add_(1.0)
            if refreshed:
                zm.refresh(model)
            with nullcontext() if refreshed else pytest.raises(InternalError, match=r"zm\.refresh"):
                backward(model, CASE, 1)
            dist.barrier()


class Clamping(nn.Linear):
    """Keeps its weights in bounds, as a critic does."""

    def forward(self, x):
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


@on_ranks(2)
def test_a_forward_that_changes_its_weights_is_told_what_to_do():
    for strategy in ("node=3", "node=1"):
        model = nn.Sequential(Clamping(4, 4), Clamping(4, 4))
        zm.shard(model, mesh_of(2), strategy, units=[Clamping], bucket_bytes=0, debug=True)
        with pytest.raises(ModelError, match=r"unit '0', .* has written to its parameters.*between steps.*parametrize"):
            model(torch.ones(1, 4))


@on_ranks(2)
def test_it_is_off_unless_asked_for():
    with sharded("node=3", replace(CASE, world=2), mesh_of(2)) as (model, _):
        assert not isinstance(engine_of(model).interpreter.backend, SlotGuard)


def test_a_fingerprint_sees_values_and_order():
    values = torch.arange(5000.0)
    changed, moved = values.clone(), values.roll(2048)
    changed[4999] += 1
    assert len({fingerprint([each]) for each in (values, changed, moved)}) == 3
    assert fingerprint([values]) == fingerprint([values.clone()])
