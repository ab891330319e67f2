"""What users hold on to, clear early, or call in an order of their own."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zeromesh as zm
from tests.dist.features.parity import Block, check, local_part, net
from tests.dist.features.test_misuse import (
    STAGES,
    WIDTH,
    booming,
    chain,
    fragile,
    inputs,
    mesh,
    same_grads,
    sgd,
    sharded,
)
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.engine.param import Slice
from zeromesh.errors import OptimizerError


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    result: torch.Tensor = model(inputs(10 * seed + dist.get_rank())).square().sum()
    return result


@pytest.mark.parametrize("drop", ["optimizer", "model", "by hand"])
@STAGES
@on_ranks(2)
def test_gradients_that_are_still_held_keep_their_values(strategy, drop):
    """As plain torch's do once `.grad` is None: what was kept of one loss is combined with that of another."""
    plain = chain()
    model = sharded(plain, strategy)
    optimizer = sgd(model)
    held: list[list[Any]] = []
    for seed in range(2):
        loss_of(model, seed).backward()
        held.append([param.grad for param in model.parameters()])
        if drop == "optimizer":
            optimizer.zero_grad()
        elif drop == "model":
            zm.zero_grad(model)
        else:
            for param in model.parameters():
                param.grad = None
    for seed in range(2):
        loss_of(plain, seed).backward()
    for param, first, second in zip(model.parameters(), *held, strict=True):
        param.grad = first + second
    same_grads(model, plain)
    for unit in engine_of(model).units:
        for buffer in unit.buffers:
            start = buffer.reduced.untyped_storage().data_ptr()
            assert {grad.local.untyped_storage().data_ptr() for grad in buffer.optimizer_grads} == {start}


@STAGES
@on_ranks(2)
def test_a_gradient_that_is_still_held_while_others_of_its_unit_are_shown(strategy):
    model = sharded(chain(), strategy)
    loss_of(model, 0).backward()
    weight = next(model.parameters())
    held, values = weight.grad, weight.grad.local.clone()
    weight.grad = None
    loss_of(model, 1).backward()
    assert torch.equal(held.local, values)
    if values.numel():
        assert not torch.equal(weight.grad.local, values)


@pytest.mark.parametrize("drop", ["optimizer", "model", "in place"])
@STAGES
@on_ranks(2)
def test_gradients_that_nobody_holds_are_never_copied(strategy, drop):
    model = sharded(chain(), strategy)
    optimizer = sgd(model)
    with mock.patch("zeromesh.engine.flat.leave_memory", side_effect=AssertionError("a copy")):
        for _ in range(3):
            loss_of(model, 0).backward()
            optimizer.step()
            if drop == "model":
                model.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=drop == "optimizer")


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@STAGES
@on_ranks(2)
def test_gradients_that_are_dropped_inside_the_step(strategy, param_dtype):
    """By a hook of the optimizer's own, which runs before those for all optimizers."""
    base = chain().float()
    models = [sharded(base, strategy, param_dtype=param_dtype) for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    optimizers[0].register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    outputs = []
    for model, optimizer in zip(models, optimizers, strict=True):
        for seed in range(3):
            model(inputs(seed).float()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            outputs.append(model(inputs().float()))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], base(inputs().float()))


@on_ranks(2)
def test_gradients_of_a_closure_that_are_dropped_inside_the_step():
    plain = chain()
    models = [sharded(plain, "node=1") for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    optimizers[0].register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    for model, optimizer in zip(models, optimizers, strict=True):

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    with torch.no_grad():
        assert torch.equal(*(model(inputs()) for model in models))


@on_ranks(2)
def test_norms_and_counts_by_any_name_are_of_the_whole():
    plain = chain()
    model = sharded(plain, "node=3")
    loss_of(model, 0).backward()
    loss_of(plain, 0).backward()
    means = [param.grad.clone() for param in plain.parameters()]
    for mean in means:
        dist.all_reduce(mean)
    for param, mean in zip(model.parameters(), means, strict=True):
        torch.testing.assert_close(torch.linalg.norm(param.grad), torch.linalg.norm(mean / 2))
        assert param.ndimension() == mean.ndim and torch.numel(param) == mean.numel()
    weight, bias = list(model.parameters())[:2]
    torch.testing.assert_close(torch.linalg.norm(bias.grad, 1), torch.linalg.norm(means[1] / 2, 1))
    with pytest.raises(OptimizerError, match="a norm of matrices"):
        torch.linalg.norm(weight.grad, 2)


@on_ranks(2)
def test_what_mixes_elements_is_refused():
    param = next(sharded(chain(), "node=3").parameters())
    for mix in (
        lambda: functional.mse_loss(param, torch.zeros_like(param)),
        lambda: functional.cosine_similarity(param, param, dim=0),
        lambda: param.narrow(0, 0, 1),
        lambda: param.select(0, 0),
        lambda: param * torch.ones(3, 1, dtype=param.dtype),
        lambda: torch.kthvalue(param, 1),
    ):
        with torch.no_grad(), pytest.raises(OptimizerError, match=r"needs all of 0\.0\.weight|must be the whole"):
            mix()


@STAGES
@on_ranks(2)
def test_state_dicts_after_a_layer_was_taken_out(strategy):
    """Names are those of now, and each has the values of the layer that stands there."""
    plain = chain()
    model = sharded(plain, strategy)
    del model[0]
    del plain[0]
    wanted = plain.state_dict()
    shown = model.state_dict()
    assert [*shown] == [*wanted]
    for (name, value), param in zip(shown.items(), model.parameters(), strict=True):
        assert type(value) is Slice
        assert torch.equal(value.local, local_part(param, wanted[name]).view(-1))
    doubled = {name: 2 * value for name, value in wanted.items()}
    model.load_state_dict(doubled)
    for (name, value), param in zip(doubled.items(), model.parameters(), strict=True):
        assert torch.equal(param.local, local_part(param, value)), name


@STAGES
@on_ranks(2)
def test_a_backward_after_one_that_raised_whose_forward_ran_before(strategy):
    plain = fragile()
    model = sharded(plain, strategy)
    optimizer = sgd(model)
    losses = [loss_of(model, seed) for seed in range(2)]
    with booming():
        losses[0].backward()
    optimizer.zero_grad()
    losses[1].backward()
    loss_of(plain, 1).backward()
    same_grads(model, plain)


class Recurrent(nn.Module):
    """A block that is called again, each call checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(chain())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for index in (0, 1, 2, 3, 2):
            x = checkpoint(self.blocks[index], x, use_reentrant=True)
        return x


@pytest.mark.parametrize("strategy", ["node=3", "node=2", "node=1", "node=0"])
@on_ranks(2)
def test_reentrant_checkpoints_of_a_block_that_is_called_again(strategy):
    plain = Recurrent()
    model = sharded(plain, strategy)
    for _ in range(2):
        loss_of(model, 0).backward()
        loss_of(plain, 0).backward()
        same_grads(model, plain)
        zm.zero_grad(model)
        plain.zero_grad()


class Skippable(Block):
    """A layer that is dropped hands on what it was given."""

    skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.skip else super().forward(x)


@on_ranks(4)
def test_neighbours_that_hand_on_what_they_were_given():
    """They have one output in common, whose gradient must reach the last of them first."""
    base = net(num_blocks=6)
    for index, block in enumerate(base.blocks):
        block.__class__, block.skip = Skippable, index in (2, 3, 4)
    for strategy in ("node=3,cluster=1;prefetch=0", "node=3,cluster=3k", "node=0,cluster=1"):
        (pair,) = check(base, strategy, options={"bucket_bytes": 0})
        assert len(engine_of(pair.model).units) == 9


class Experts(nn.Module):
    """One of four is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.first(x))


@pytest.mark.parametrize("strategy", ["node=2", "node=1", "node=0"])
@on_ranks(2)
def test_a_unit_that_one_rank_alone_uses_after_a_last_backward_whose_gradients_were_kept(strategy):
    """Only a last backward tells the ranks which units others have used."""
    plain = Experts().double()
    model = sharded(plain, strategy)
    for last, experts in ((True, (0, 1)), (False, (0, 2)), (True, (3, 1))):
        with zm.accumulate(model, last=last):
            model(inputs(dist.get_rank()), experts[dist.get_rank()]).sum().backward()
        for rank in range(2):
            (plain(inputs(rank), experts[rank]).sum() / 2).backward()
    same_grads(model, plain)


class Headed(nn.Module):
    """Of a body, which has units and a gain that is the root's."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.gain = chain(), nn.Parameter(torch.full((WIDTH,), 1.5).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.gain
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x * self.gain

    class Outer(nn.Module):
        """Of a part that is in another, and computes after it with what is the root's, and with what is a unit's."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.tail = Headed.Body(), nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).double()
            self.bias = nn.Parameter(torch.ones(WIDTH).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) + self.bias) @ self.tail[0].weight

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = self.Outer(), nn.Linear(WIDTH, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@STAGES
@pytest.mark.parametrize("joined", [False, True])
@on_ranks(2)
def test_a_part_that_holds_units_is_called_by_itself(strategy, joined):
    """As an encoder is by `generate`; trained so too, in turn with the whole model, and after it has raised."""
    plain, x = Headed(), inputs(dist.get_rank())
    options = {} if joined else {"bucket_bytes": 0}
    model = zm.shard(copy.deepcopy(plain), mesh(), strategy, units=["Sequential"], **options)
    optimizer = sgd(model)
    assert torch.equal(model.body(x), plain.body(x))
    with pytest.raises(RuntimeError):
        model.body(x[:, :2])
    with mock.patch.object(nn.Tanh, "forward", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        model.body(x)
    for part in (lambda one: one.body, lambda one: one, lambda one: one.body.inner):
        plain.zero_grad()
        optimizer.zero_grad()
        for one in (plain, model):
            part(one)(x).square().sum().backward()
        same_grads(part(model), part(plain))
