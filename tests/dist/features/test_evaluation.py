"""Forwards without a backward, and forwards and backwards that raise: nothing stale, nothing left in use."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh as zm
from tests.dist.parity import (
    Block,
    Pair,
    Part,
    adamw,
    close,
    mesh_of,
    net,
    next_token_loss,
    tokens,
)
from tests.dist.pool import on_ranks, set_timeout
from zeromesh.comm import groups
from zeromesh.errors import CommunicationError, MismatchError

ALL = ("node=3", "node=0", "node=3d", "node=2")


def pairs_of(base: nn.Module, *strategies: str, **arguments: Any) -> list[Pair]:
    """Pairs that share one plain model, which is trained once."""
    pairs = [Pair(base=base, strategy=strategy, **arguments) for strategy in strategies or ALL]
    for pair in pairs:
        pair.plain = pairs[0].plain
    return pairs


def step_all(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def evaluate(pair: Pair, mode: Any) -> None:
    pair.model.eval()
    pair.plain.eval()
    for batch in (tokens(9, 9, dist.get_rank()), tokens(9, 9, 0, shape=(1, 2))):
        with mode():
            ours = pair.model(batch)
        close(ours, pair.plain(batch).detach(), "output")
    pair.model.train()
    pair.plain.train()


@pytest.mark.parametrize(
    ("mode", "strategies"),
    [
        (torch.no_grad, ("node=0", "node=3d", "node=2")),
        (torch.inference_mode, ("node=3", "node=3k")),
    ],
)
@on_ranks(2)
def test_evaluation_after_each_step_and_between_micro_batches(mode, strategies):
    pairs = pairs_of(net(), *strategies)
    optimizers = [adamw(model.parameters()) for model in (pairs[0].plain, *(pair.model for pair in pairs))]
    for pair in pairs:
        evaluate(pair, mode)
    for step in range(2):
        pairs[0].plain_backward(step)
        for pair in pairs:
            with zm.accumulate(pair.model, last=False):
                pair.micro_backward(step, 0)
            evaluate(pair, mode)
            with zm.accumulate(pair.model, last=True):
                loss = next_token_loss(pair.model, tokens(step, 1, dist.get_rank())) / 2
                evaluate(pair, mode)  # between a forward and its backward
                loss.backward()
            pair.same_grads()
            evaluate(pair, mode)
        step_all(*optimizers)
        for pair in pairs:
            pair.same_params()
            evaluate(pair, mode)


@on_ranks(2)
def test_forwards_whose_backwards_never_come_or_come_late():
    """A loss that is only looked at, or of which another forward is taken; two forwards before two backwards; a loss
    of two forwards counts both."""
    pairs = pairs_of(net(), micro_batches=1)
    optimizers = [adamw(model.parameters()) for model in (pairs[0].plain, *(pair.model for pair in pairs))]
    for step in range(2):
        batch = tokens(step, 5, dist.get_rank())
        pairs[0].plain_backward(step, [0, 1])
        expected = pairs[0].plain(batch)
        for pair in pairs:
            looked_at = pair.model(batch)
            close(pair.model(batch), expected, "output")
            close(looked_at, expected, "first output")
            losses = [next_token_loss(pair.model, tokens(step, micro, dist.get_rank())) for micro in (0, 1)]
            with zm.accumulate(pair.model, last=False):
                losses[1].backward()
            with zm.accumulate(pair.model, last=True):
                losses[0].backward()
            pair.same_grads()
        step_all(*optimizers)
        for pair in pairs:
            pair.same_params()
    batch = tokens(0, 0, 0)
    for model in (pairs[0].plain, *(pair.model for pair in pairs)):
        (next_token_loss(model, batch) + next_token_loss(model, batch.flip(0, 1)).square()).backward()
    for pair in pairs:
        pair.same_grads()


# ---- ranks that disagree


def train_in_order(usual: list[int], odd: list[int]) -> None:
    """Two steps, the second in another order on the last rank."""

    def compute(self, x):
        return sum((self.blocks[i](x).sum() for i in self.order), torch.zeros(()).double())

    torch.manual_seed(0)
    # All of one size: gloo ends a process that receives a message of another length than it expects.
    base = Part(compute, blocks=nn.ModuleList(Block(5) for _ in range(3))).double()
    model = zm.shard(base, mesh_of(2, 2), "node=3,cluster=1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for order in (usual, odd if dist.get_rank() == 3 else usual):
        model.order = order
        model(torch.ones(2, 5).double()).backward()
        optimizer.step()
    # A reduction that has not ended when the step begins is waited for at the next.
    model(torch.ones(2, 5).double()).backward()


@pytest.mark.parametrize("orders", [([0, 1, 2], [0, 2]), ([0, 1], [0, 1, 2])])
@on_ranks(4, spoils=True)
def test_another_order_on_one_rank_is_an_error(orders):
    """Where parameters are sharded: an error on every rank, within the timeout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "default_timeout_s", lambda device_type: 1.0)
        set_timeout(timedelta(seconds=2))
        with pytest.raises((MismatchError, CommunicationError)):
            train_in_order(*orders)


@on_ranks(4)
def test_one_more_call_of_a_gathered_unit_on_one_rank_is_fine():
    train_in_order([0], [0, 0, 0])
