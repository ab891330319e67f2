"""Plain torch optimizers on sharded parameters: every one that works element by element, as users set them up."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import zeromesh as zm
from tests.dist.parity import ONE_AXIS, STRATEGIES, Optimizers, Pair, check, close, net
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


class InTurns(Optimizers):
    """The second steps every other time: its units keep their copies while the others' are made anew."""

    def __init__(self, members: list[optim.Optimizer]) -> None:
        super().__init__(members=members)
        self.steps = 0

    def step(self) -> None:
        for optimizer in self.members[: 2 - self.steps % 2]:
            optimizer.step()
        self.steps += 1


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@on_ranks(4)
def test_several_optimizers_over_their_own_units(strategy):
    pair = Pair(base=net(), strategy=strategy)
    models = iter((pair.plain, pair.model))

    def make(params: Any) -> Any:
        model: Any = next(models)
        blocks = optim.AdamW(model.blocks.parameters(), lr=0.01)
        ends = [*model.embed.parameters(), *model.norm.parameters(), *model.head.parameters()]
        return InTurns([blocks, optim.SGD(ends, lr=0.1, momentum=0.9)])

    pair.train(steps=3, make_optimizer=make)


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
