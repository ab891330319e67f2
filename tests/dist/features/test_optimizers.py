"""Plain torch optimizers on sharded parameters: every one that works element by element, as users set them up."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import zeromesh as zm
from tests.dist.parity import ONE_AXIS, STRATEGIES, Pair, check, close, mesh_of_world, net
from tests.dist.pool import on_ranks
from zeromesh.engine.optim import ELEMENTWISE

OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"lr": 0.05, "t0": 1}],
    "Adadelta": [{"lr": 0.5}],
    "Adagrad": [{"lr": 0.05}, {"lr": 0.05, "initial_accumulator_value": 0.1, "foreach": True}, {"fused": True}],
    "Adam": [{"lr": 0.01, "amsgrad": True}, {"lr": 0.01, "weight_decay": 0.1, "fused": True}],
    "AdamW": [{"lr": 0.01}, {"lr": 0.01, "foreach": True}, {"lr": 0.01, "fused": True}],
    "Adamax": [{"lr": 0.01}],
    "NAdam": [{"lr": 0.01, "momentum_decay": 0.01}],
    "RAdam": [{"lr": 0.01}],
    "RMSprop": [{"lr": 0.01, "momentum": 0.9, "centered": True}],
    "Rprop": [{"lr": 0.01}],
    "SGD": [{"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"lr": 0.1, "foreach": True}, {"lr": 0.1, "fused": True}],
}


def test_every_allowed_optimizer_is_tried():
    assert OPTIMIZERS.keys() == ELEMENTWISE


@pytest.mark.parametrize("turn", range(3))
@on_ranks(2)
def test_steps_as_on_plain_parameters(turn):
    for at, name in enumerate(sorted(OPTIMIZERS)[turn::3]):
        for options, strategy in zip(OPTIMIZERS[name], itertools.cycle(ONE_AXIS[at % 3 :])):
            make = partial(getattr(optim, name), **options)
            check(net(num_blocks=1), strategy, micro_batches=1, make_optimizer=make)


@on_ranks(2)
def test_zeroed_gradients_and_schedules_of_learning_rates():
    class Scheduled(optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1, momentum=0.9, weight_decay=0.1)
            warmup, decay = (
                optim.lr_scheduler.LinearLR(self, total_iters=2),
                optim.lr_scheduler.ExponentialLR(self, 0.5),
            )
            schedule = optim.lr_scheduler.SequentialLR(self, [warmup, decay], [2])
            self.register_step_post_hook(lambda *_: schedule.step())

    base = net()
    check(base, *ONE_AXIS, steps=4, make_optimizer=lambda p: zm.elementwise(Scheduled(p)), set_to_none=False)


@on_ranks(2)
def test_further_backwards_add_up():
    """Without accumulate every backward is a last one, whose gradients are there to be seen; and after a last
    micro-batch a further accumulation before the step may follow: nothing is reduced twice. Abandoned ones are
    forgotten."""
    for strategy, zero_grad in (("node=3", zm.zero_grad), ("node=3d", lambda model: model.zero_grad())):
        pair = Pair(base=net(), strategy=strategy)
        optimizers = [optim.AdamW(m.parameters(), lr=0.01) for m in (pair.plain, pair.model)]
        with zm.accumulate(pair.model, last=False):
            pair.micro_backward(7, 0)
        zero_grad(pair.model)
        for step in range(2):
            for micro in range(2):
                pair.plain_backward(step, [micro])
                pair.micro_backward(step, micro)
                pair.same_grads()
            pair.plain_backward(5 + step)
            pair.backward(5 + step)
            pair.same_grads()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            pair.same_params()


@on_ranks(4)
def test_torch_clips_as_zeromesh_does():
    for strategy in STRATEGIES:
        pair = Pair(base=net(), strategy=strategy)
        pair.plain_backward(0)
        pair.backward(0)
        params = list(pair.model.parameters())
        for order in (2.0, 1.0, 3.0, float("inf")):
            expected = nn.utils.get_total_norm([p.grad for p in pair.plain.parameters()], order)
            close(nn.utils.get_total_norm([p.grad for p in params], order), expected, f"norm {order}")
            close(zm.clip_grad_norm_(pair.model, 1e9, order), expected, f"zm norm {order}")
        expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
        close(nn.utils.clip_grad_norm_(params, 0.1), expected, "norm clipped by torch")
        pair.same_grads()
        close(zm.clip_grad_norm_(pair.model, 0.01), torch.tensor(0.1), "norm after clipping", 1e-4)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01)
        pair.same_grads()


@on_ranks(2)
def test_a_norm_of_sums_that_lie_on_the_host_since_an_earlier_micro_batch():
    """The last one leaves a block out, so that its gradients do not come down again."""
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).double()
    model = zm.shard(model, mesh_of_world(), "host=2,node=3", units=[nn.Linear])
    for used in (3, 3, 2):
        for last, count in ((False, 3), (True, used)):
            value = torch.full((2, 5), 1.0 + dist.get_rank(), dtype=torch.double)
            with zm.accumulate(model, last=last):
                for block in [*model][:count]:
                    value = block(value).tanh()
                value.sum().backward()
        norm = zm.clip_grad_norm_(model, math.inf)
        close(norm, nn.utils.get_total_norm([param.grad for param in model.parameters()]), f"{used} blocks", 1e-12)
        zm.zero_grad(model)
