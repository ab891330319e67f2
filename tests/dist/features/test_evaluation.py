"""Forwards without a backward, and forwards and backwards that raise: nothing stale, nothing left in use."""

from __future__ import annotations

import copy
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeromesh as zm
from tests.dist.features.parity import (
    DEFERRED,
    ONE_AXIS,
    STRATEGIES,
    Block,
    Pair,
    adamw,
    close,
    mesh_2x2,
    net,
    next_token_loss,
    tokens,
    train_side_by_side,
)
from tests.dist.pool import on_ranks
from zeromesh.comm import groups
from zeromesh.engine.api import engine_of
from zeromesh.errors import CommunicationError, MismatchError, ModelError

ALL = (*ONE_AXIS, "node=1", "node=2")
ON_TWO_AXES = (*STRATEGIES, DEFERRED, "node=3,cluster=3k", "node=3k,cluster=3k", "node=2,cluster=2")


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


@pytest.mark.parametrize(("mode", "strategies"), [(torch.no_grad, ON_TWO_AXES), (torch.inference_mode, STRATEGIES)])
@on_ranks(4)
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
def test_a_forward_whose_backward_never_comes():
    """A loss that is only looked at, or of which another forward is taken."""
    pairs = pairs_of(net())

    def forwards(step: int) -> None:
        batch = tokens(step, 5, dist.get_rank())
        expected = pairs[0].plain(batch)
        for pair in pairs:
            kept = pair.model(batch)
            close(pair.model(batch), expected, "output")
            close(kept, expected, "first output")

    train_side_by_side(pairs, 2, after_step=forwards)


@on_ranks(2)
def test_two_forwards_before_two_backwards():
    pairs = pairs_of(net(), micro_batches=1)
    optimizers = [adamw(model.parameters()) for model in (pairs[0].plain, *(pair.model for pair in pairs))]
    for step in range(2):
        pairs[0].plain_backward(step, [0, 1])
        for pair in pairs:
            losses = [next_token_loss(pair.model, tokens(step, micro, dist.get_rank())) for micro in (0, 1)]
            with zm.accumulate(pair.model, last=False):
                losses[1].backward()
            with zm.accumulate(pair.model, last=True):
                losses[0].backward()
            pair.same_grads()
        step_all(*optimizers)
        for pair in pairs:
            pair.same_params()


@on_ranks(2)
def test_gradients_of_a_part_and_of_inputs():
    """`torch.autograd.grad` for inputs leaves the model's gradients alone; a loss of two forwards counts both."""
    pairs, batch = pairs_of(net()), tokens(0, 0, 0)
    for model in (pairs[0].plain, *(pair.model for pair in pairs)):
        (next_token_loss(model, batch) + next_token_loss(model, batch.flip(0, 1)).square()).backward()
    for pair in pairs:
        pair.same_grads()


@on_ranks(2)
def test_generate():
    from tests.dist.features.test_huggingface import build, data_of, loss_of

    of_llama: dict[str, Any] = {"loss_of": loss_of, "data_of": partial(data_of, "llama")}
    pairs = pairs_of(build("llama"), *ONE_AXIS[:3], **of_llama)

    def generate(step: int) -> None:
        prompt = tokens(step, 0, 0, shape=(2, 3))
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.inference_mode():
            expected, *found = (m.generate(prompt, **options) for m in (pairs[0].plain, *(p.model for p in pairs)))  # type: ignore[operator]
        assert expected.shape == (2, 8)
        assert all(ours.equal(expected) for ours in found)

    train_side_by_side(pairs, 2, after_step=generate)


# ---- exceptions


class Broken(Exception):
    pass


class Breaker(torch.autograd.Function):
    """Raises in the backward while the list holds something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: list[bool]) -> Tensor:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.armed:
            raise Broken
        return grad, None


class Fragile(Block):
    armed: dict[str, list[bool]]

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.armed["forward"]:
            raise Broken
        return Breaker.apply(x, self.armed["backward"])


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_the_model_is_usable_after_an_exception(where):
    base = net()
    armed: dict[str, list[bool]] = {"forward": [], "backward": []}
    base.blocks[1].__class__ = Fragile
    Fragile.armed = armed
    pairs = pairs_of(base)

    def fail(step: int) -> None:
        for pair in pairs:
            armed[where].append(True)
            for last in (True, False):
                with pytest.raises(Broken), zm.accumulate(pair.model, last=last):
                    pair.micro_backward(step, 0)
            armed[where].clear()
            zm.zero_grad(pair.model)
            assert all(type(p).__name__ == "ShardedParameter" for p in pair.model.parameters())

    fail(0)
    train_side_by_side(pairs, 2, after_step=fail)


class Interrupted(Block):
    armed: list[bool]

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise KeyboardInterrupt
        return super().forward(x)


@on_ranks(2)
def test_the_model_is_usable_after_an_interrupted_forward():
    """torch calls no hooks then, not even those for exceptions."""
    base = net()
    base.blocks[1].__class__ = Interrupted
    Interrupted.armed = []
    pairs = pairs_of(base)

    def interrupt(step: int) -> None:
        for pair in pairs if step == 0 else ():
            Interrupted.armed.append(True)
            with pytest.raises(KeyboardInterrupt):
                pair.micro_backward(step, 0)
            Interrupted.armed.clear()

    train_side_by_side(pairs, 3, after_step=interrupt)


@on_ranks(4)
def test_an_optimizer_made_after_an_interrupted_forward_steps():
    """The units that were in use show their slices again."""
    base = net()
    base.blocks[1].__class__ = Interrupted
    Interrupted.armed = [True]
    model = zm.shard(base, mesh_2x2(), "node=3,cluster=1")
    with pytest.raises(KeyboardInterrupt):
        model(tokens(0, 0, 0))
    Interrupted.armed.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = zm.full_state_dict(model)
    next_token_loss(model, tokens(0, 0, dist.get_rank())).backward()
    optimizer.step()
    after = zm.full_state_dict(model)
    assert all((before[name] != after[name]).any() for name in before)


# ---- ranks that disagree


class Conditional(nn.Module):
    """Runs its blocks in the order it is told."""

    def __init__(self) -> None:
        super().__init__()
        # All of one size: gloo ends a process that receives a message of another length than it expects.
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        return sum((self.blocks[i](x).sum() for i in self.order), torch.zeros(()).double())


def train_in_order(usual: list[int], odd: list[int]) -> None:
    """Two steps, the second in another order on the last rank."""
    torch.manual_seed(0)
    model = zm.shard(Conditional().double(), mesh_2x2(), "node=3,cluster=1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for order in (usual, odd if dist.get_rank() == 3 else usual):
        model.order = order
        model(torch.ones(2, 5).double()).backward()
        optimizer.step()
    # A reduction that has not ended when the step begins is waited for at the next.
    model(torch.ones(2, 5).double()).backward()


@pytest.mark.parametrize("orders", [([0, 1, 2], [2, 1, 0]), ([0, 1, 2], [0, 2]), ([0, 1], [0, 1, 2])])
@on_ranks(4, spoils=True)
def test_another_order_on_one_rank_is_an_error(orders):
    """Where parameters are sharded: an error on every rank, within the timeout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "default_timeout_s", lambda device_type: 4.0)
        # Its public name is torch 2.15's, which warns under the other.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=8))
        with pytest.raises((MismatchError, CommunicationError)):
            train_in_order(*orders)


@on_ranks(4)
def test_one_more_call_of_a_gathered_unit_on_one_rank_is_fine():
    train_in_order([0], [0, 0, 0])


@on_ranks(4)
def test_ranks_with_other_arguments_or_models_are_told():
    rank = dist.get_rank()
    with pytest.raises(
        MismatchError, match=r"same strategy; rank 0 has .node=3,cluster=1 .*rank 2 has .node=3,cluster=0 "
    ):
        zm.shard(net(), mesh_2x2(), "node=3,cluster=0" if rank == 2 else "node=3,cluster=1")
    with pytest.raises(MismatchError, match=r"same model; rank 0 has .*, rank 1 has .block unit .blocks\.3"):
        zm.shard(net(num_blocks=4 if rank == 1 else 3), mesh_2x2(), "node=3,cluster=1")
    with pytest.raises(MismatchError, match=r"same model"):
        zm.shard(net(), mesh_2x2(), "node=3,cluster=1", param_dtype=torch.bfloat16 if rank else None)
    frozen = net()
    frozen.head.requires_grad_(rank != 3)
    with pytest.raises(MismatchError, match=r"same model.*head\.weight"):
        zm.shard(frozen, mesh_2x2(), "node=3,cluster=1")


@on_ranks(4)
def test_parts_of_a_sharded_model_are_not_sharded_models():
    model = zm.shard(net(), mesh_2x2(), "node=3,cluster=1")
    with pytest.raises(ModelError, match=r"Block is not sharded \(or is a part of a sharded model\)"):
        zm.zero_grad(model.blocks[0])
    with pytest.raises(ModelError, match=r"no module of class Blok is in the model.*did you mean Block"):
        zm.shard(net(), mesh_2x2(), "node=3,cluster=1", units=["Blok"])
    with pytest.raises(ModelError, match=r"'blocks\.7' is not a unit"):
        zm.shard(net(), mesh_2x2(), "node=3,cluster=1", resident=["blocks.7"])
    assert engine_of(model) is engine_of(model)
    assert copy.copy(model).blocks is model.blocks
