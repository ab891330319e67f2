"""Plain torch optimizers on sharded parameters: every one that works element by element, as users set them up."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import zeromesh as zm
from tests.dist.features.parity import DEFERRED, STRATEGIES, Pair, close, mesh_2x2, net, next_token_loss, tokens
from tests.dist.pool import on_ranks
from zeromesh.engine.optim import ELEMENTWISE
from zeromesh.errors import OptimizerError

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


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@on_ranks(4)
def test_steps_as_on_plain_parameters(name):
    for options, strategy in zip(OPTIMIZERS[name], itertools.cycle(STRATEGIES)):
        pair = Pair(base=net(), strategy=strategy, micro_batches=1)
        pair.train(make_optimizer=lambda params, options=options: getattr(optim, name)(params, **options))


def by_name_and_ndim(params: Any, model: nn.Module) -> list[dict[str, Any]]:
    """Groups as training scripts make them: no decay for vectors, a rate of its own for the head."""
    named = list(model.named_parameters())
    head = [p for n, p in named if n.startswith("head")]
    rest = [p for n, p in named if not n.startswith("head")]
    return [
        {"params": head, "lr": 0.1},
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("strategy", (*STRATEGIES, DEFERRED))
@on_ranks(4)
def test_groups_by_name_and_ndim(strategy):
    pair = Pair(base=net(), strategy=strategy)
    shapes = {name: tuple(p.shape) for name, p in pair.plain.named_parameters()}
    assert {name: tuple(p.shape) for name, p in pair.model.named_parameters()} == shapes
    models = iter((pair.plain, pair.model))
    pair.train(make_optimizer=lambda params: optim.AdamW(by_name_and_ndim(params, next(models)), lr=0.01, fused=True))


class Several:
    """Several optimizers behind what `Pair` asks of one."""

    def __init__(self, optimizers: list[optim.Optimizer], every: list[int]) -> None:
        self.optimizers, self.every, self.steps = optimizers, every, 0

    @property
    def state(self) -> dict[Any, Any]:
        return {param: state for optimizer in self.optimizers for param, state in optimizer.state.items()}

    def step(self) -> None:
        for optimizer, every in zip(self.optimizers, self.every, strict=True):
            if self.steps % every == 0:
                optimizer.step()
        self.steps += 1

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_several_optimizers_over_their_own_units(strategy):
    pair = Pair(base=net(), strategy=strategy)
    models = iter((pair.plain, pair.model))

    def make(params: Any) -> Any:
        model: Any = next(models)
        blocks = optim.AdamW(model.blocks.parameters(), lr=0.01)
        ends = [*model.embed.parameters(), *model.norm.parameters(), *model.head.parameters()]
        # The second one steps every other time: its units keep their copies while the others' are made anew.
        return Several([blocks, optim.SGD(ends, lr=0.1, momentum=0.9)], [1, 2])

    pair.train(steps=4, make_optimizer=make)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("strategy", (*STRATEGIES, DEFERRED))
@on_ranks(4)
def test_zeroing_gradients(strategy, set_to_none):
    pair = Pair(base=net(), strategy=strategy)
    optimizers = [optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for m in (pair.plain, pair.model)]
    for step in range(4):
        pair.plain_backward(step)
        pair.backward(step)
        pair.same_grads()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        pair.same_params()
        grads = [p.grad for p in pair.model.parameters()]
        assert all(grad is None if set_to_none else not grad.local.any() for grad in grads)


@on_ranks(4)
def test_learning_rate_schedulers():
    pair = Pair(base=net(), strategy=STRATEGIES[0])
    optimizers = [optim.SGD(m.parameters(), lr=0.1) for m in (pair.plain, pair.model)]
    schedulers = [
        optim.lr_scheduler.SequentialLR(
            o, [optim.lr_scheduler.LinearLR(o, total_iters=2), optim.lr_scheduler.CosineAnnealingLR(o, 3)], [2]
        )
        for o in optimizers
    ]
    for step in range(4):
        pair.plain_backward(step)
        pair.backward(step)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        pair.same_params()


@pytest.mark.parametrize("strategy", (*STRATEGIES, DEFERRED))
@on_ranks(4)
def test_without_accumulate_every_backward_is_a_last_one(strategy):
    """Two of them before a step add up, and the first one's gradients are there to be seen."""
    pair = Pair(base=net(), strategy=strategy)
    optimizers = [optim.AdamW(m.parameters(), lr=0.01) for m in (pair.plain, pair.model)]
    for step in range(3):
        for micro in range(2):
            pair.plain_backward(step, [micro])
            pair.micro_backward(step, micro)
            pair.same_grads()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pair.same_params()


@pytest.mark.parametrize("strategy", (*STRATEGIES, DEFERRED))
@on_ranks(4)
def test_a_further_backward_adds_to_the_reduced_gradient(strategy):
    """After a last micro-batch, a further accumulation before the step: nothing is reduced twice."""
    pair = Pair(base=net(), strategy=strategy)
    pair.plain_backward(0)
    pair.backward(0)
    pair.plain_backward(1)
    pair.backward(1)
    pair.same_grads()


@pytest.mark.parametrize("zero_grad", ["zm", "model"])
@pytest.mark.parametrize("strategy", (*STRATEGIES, DEFERRED))
@on_ranks(4)
def test_an_abandoned_accumulation_is_forgotten(strategy, zero_grad):
    pair = Pair(base=net(), strategy=strategy)
    with zm.accumulate(pair.model, last=False):
        pair.micro_backward(7, 0)
    if zero_grad == "zm":
        zm.zero_grad(pair.model)
    else:
        pair.model.zero_grad()
    pair.train(steps=2)


@on_ranks(4)
def test_a_step_on_partial_sums_is_refused():
    pair = Pair(base=net(), strategy="node=3,cluster=1")
    optimizer = optim.SGD(pair.model.parameters(), lr=0.1)
    with zm.accumulate(pair.model, last=False):
        pair.micro_backward(0, 0)
    with pytest.raises(OptimizerError, match=r"last=True"):
        optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_torch_clips_as_zeromesh_does(strategy):
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


class Derived(optim.SGD):
    """Steps as torch's does, with an option of its own."""

    def __init__(self, params, lr, tag=0):
        super().__init__(params, lr=lr)
        self.tag = tag


class Overriding(Derived):
    def step(self, closure=None):
        return super().step(closure)


@on_ranks(4)
def test_optimizers_that_would_be_wrong_are_refused():
    model = copy.deepcopy(net())
    early = optim.SGD(model.parameters(), lr=0.1)
    zm.shard(model, mesh_2x2(), "node=3,cluster=1")
    next_token_loss(model, tokens(0, 0, dist.get_rank())).backward()
    with pytest.raises(OptimizerError, match=r"before zm\.shard.*make the optimizer after"):
        early.step()
    with pytest.raises((OptimizerError, ValueError), match=r"element by element|2D"):
        optim.Muon(model.parameters()).step()
    with pytest.raises(OptimizerError, match=r"Adafactor is not known to"):
        optim.Adafactor(model.parameters()).step()
    assert Derived(model.parameters(), lr=0.1).step() is None  # with gradients of before
    with pytest.raises(OptimizerError, match=r"Overriding is not known to"):
        Overriding(model.parameters(), lr=0.1).step()
    vouched = zm.elementwise(optim.Adafactor(model.parameters()))
    with pytest.raises(OptimizerError, match=r"needs all of"):
        vouched.step()
