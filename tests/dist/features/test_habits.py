"""Users hold on to gradients, clear them early, and call parts in an order of their own."""

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeromesh as zm
from tests.dist.features.test_misuse import WIDTH, chain, inputs, mesh, same_grads, sharded
from tests.dist.parity import Block, Part, check, local_part, mean_square, net, sgd, vectors
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.engine.param import Slice


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    result: torch.Tensor = model(inputs(10 * seed + dist.get_rank())).square().sum()
    return result


WAYS = ("optimizer", "zeros", "by hand", "others", "part", "whole")
DROPPED = {"node=3": 0, "node=2": 1, "node=0": 0, "node=3d": 1}
DROPPED |= {"host=2,node=3": 0, "host=2,node=0": 1, "host=1,node=1": 1}
"""Which half of the ways a strategy meets; two whose gradients wait in the same place meet all of them together."""


@pytest.mark.parametrize("strategy", DROPPED)
@on_ranks(2)
def test_gradients_that_are_dropped_between_micro_batches(strategy):
    """Those of one optimizer or module, zeroed, dropped or assigned: its earlier micro-batches count no more."""
    for way in WAYS[DROPPED[strategy] :: 2]:
        plain = chain()
        model = sharded(plain, strategy)
        for each in (plain, model):
            optimizer = torch.optim.SGD([*each.parameters()][1::2], lr=0.1)
            for step in range(3):
                with zm.accumulate(model, last=step == 2):
                    loss_of(each, step).backward()
                if step == 0 and way in ("optimizer", "zeros"):
                    optimizer.zero_grad(set_to_none=way == "optimizer")
                if step == 0 and way in ("part", "whole"):
                    (each.get_submodule("1") if way == "part" else nn.Sequential(each)).zero_grad()
                for param in optimizer.param_groups[0]["params"] if step == 0 and way in ("by hand", "others") else ():
                    param.grad = None if way == "by hand" else torch.ones(param.shape, dtype=param.dtype)
        same_grads(model, plain)


@pytest.mark.parametrize("strategy", ["node=3", "node=1", "host=2,node=0"])
@on_ranks(2)
def test_what_the_model_has_zeroed_between_micro_batches_is_shown_as_zeros(strategy):
    """Also where no later micro-batch uses it: momentum and weight decay go on."""
    plain = chain()
    model = sharded(plain, strategy)
    for each in (plain, model):
        with zm.accumulate(model, last=False):
            loss_of(each, 0).backward()
        each.zero_grad(set_to_none=False)
        loss_of(each.get_submodule("0"), 1).backward()
    same_grads(model, plain)


@pytest.mark.parametrize(("strategy", "by_hand"), [("node=3", False), ("node=1", False), ("node=0", True)])
@on_ranks(2)
def test_gradients_that_are_still_held_keep_their_values(strategy, by_hand):
    """As plain torch's do once `.grad` is None: gradients kept of one loss are combined with those of another."""
    plain = chain()
    model = sharded(plain, strategy)
    held: list[list[Any]] = []
    for seed in range(2):
        loss_of(model, seed).backward()
        held.append([param.grad for param in model.parameters()])
        if not by_hand:
            zm.zero_grad(model) if seed else model.zero_grad()
        for param in model.parameters() if by_hand else ():
            param.grad = None
    for seed in range(2):
        loss_of(plain, seed).backward()
    for param, first, second in zip(model.parameters(), *held, strict=True):
        param.grad = first + second
    same_grads(model, plain)
    for buffer in (buffer for unit in engine_of(model).units for buffer in unit.buffers):
        start = buffer.reduced.untyped_storage().data_ptr()
        assert {grad.local.untyped_storage().data_ptr() for grad in buffer.optimizer_grads} == {start}


@pytest.mark.parametrize("strategy", ["node=3", "node=1"])
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


@pytest.mark.parametrize(("strategy", "set_to_none"), [("node=3", True), ("node=1", False), ("node=0", True)])
@on_ranks(2)
def test_gradients_that_nobody_holds_are_never_copied(strategy, set_to_none):
    model = sharded(chain(), strategy)
    optimizer = sgd(model.parameters())
    with mock.patch("zeromesh.engine.flat.give_memory", side_effect=AssertionError("a copy")):
        for step in range(4):
            loss_of(model, 0).backward()
            optimizer.step()
            (model if step % 2 else optimizer).zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize(("strategy", "param_dtype"), [("node=3", torch.bfloat16), ("node=1", None), ("node=0", None)])
@on_ranks(2)
def test_gradients_that_are_dropped_inside_the_step(strategy, param_dtype):
    """By a hook of the optimizer's own, which runs before those for all optimizers; also those of a closure."""
    base = chain().float()
    models = [sharded(base, strategy, param_dtype=param_dtype) for _ in range(2)]
    optimizers = [sgd(model.parameters()) for model in models]
    optimizers[0].register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    outputs = []
    for model, optimizer in zip(models, optimizers, strict=True):

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs().float()).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            closure()
            optimizer.step()
        optimizer.step(closure)
        with torch.no_grad():
            outputs.append(model(inputs().float()))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], base(inputs().float()))


@pytest.mark.parametrize("strategy", ["node=3", "node=0"])
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


@on_ranks(2)
def test_reentrant_checkpoints_of_a_block_that_is_called_again():
    def compute(self, x):
        x = x.requires_grad_()
        for index in (0, 1, 2, 3, 2):
            x = checkpoint(self.blocks[index], x, use_reentrant=True)
        return x

    base, options = Part(compute, blocks=nn.ModuleList(chain())), {"bucket_bytes": 0}
    check(base, "node=3", "node=2", "node=0", loss_of=mean_square, data_of=vectors(WIDTH), options=options)


class Skippable(Block):
    """A layer that is dropped hands on its input."""

    skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.skip else super().forward(x)


@on_ranks(2)
def test_neighbours_that_hand_on_what_they_were_given():
    """They have one output in common, whose gradient must reach the last of them first."""
    base = net(num_blocks=5)
    for index, block in enumerate(base.blocks):
        block.__class__, block.skip = Skippable, index in (1, 2, 3)
    strategies = ("node=3;prefetch=0", "node=3k", "node=0")
    for pair in check(base, *strategies, options={"bucket_bytes": 0}):
        assert len(engine_of(pair.model).units) == 8


@pytest.mark.parametrize("strategy", ["node=3", "node=0"])
@on_ranks(2)
def test_an_input_that_the_model_has_handed_on_is_an_input_again_after_a_step(strategy):
    """As pipelines reuse the buffers of activations that they receive."""
    torch.manual_seed(0)
    plain = Part(lambda self, x, skips: x if skips else self.layer(x), layer=nn.Linear(WIDTH, WIDTH)).double()
    model = sharded(plain, strategy)
    for each, ranks in ((model, [dist.get_rank()]), (plain, [0, 1])):
        optimizer = sgd(each.parameters())
        batches = [inputs(rank).requires_grad_() for rank in ranks]
        for skips in (True, False):
            optimizer.zero_grad()
            for batch in batches:
                loss = each(batch, False).square().sum() + each(batch, skips).sum()
                (loss / len(batches)).backward()
            if skips:
                optimizer.step()
    same_grads(model, plain)


@pytest.mark.parametrize("strategy", ["node=2", "node=0"])
@on_ranks(2)
def test_a_unit_that_one_rank_alone_uses_after_a_last_backward_whose_gradients_were_kept(strategy):
    """Only a last backward tells the ranks which units others have used."""
    torch.manual_seed(0)
    first, *experts = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
    base = Part(
        lambda self, x, expert: self.experts[expert](self.first(x)), first=first, experts=nn.ModuleList(experts)
    )
    plain = base.double()
    model = sharded(plain, strategy)
    for last, chosen in ((True, (0, 1)), (False, (0, 2)), (True, (3, 1))):
        with zm.accumulate(model, last=last):
            model(inputs(dist.get_rank()), chosen[dist.get_rank()]).sum().backward()
        for rank in range(2):
            (plain(inputs(rank), chosen[rank]).sum() / 2).backward()
    same_grads(model, plain)


@pytest.mark.parametrize(("strategy", "whole"), [("node=2", False), ("node=0", False), ("node=1", True)])
@on_ranks(2)
def test_ranks_leave_out_different_blocks_and_recompute_reentrantly(strategy, whole):
    """Some blocks, or the whole model: a block that only an earlier forward will repeat has its turn after that, or
    only some ranks reduce it again."""

    def compute(self, x, chosen):
        for index in chosen:
            block = self.blocks[index]
            x = block(x) if whole or index == 0 else checkpoint(block, x, use_reentrant=True)
        return x

    plain, rank = Part(compute, blocks=nn.ModuleList(chain(3))), dist.get_rank()
    model, x = sharded(plain, strategy), inputs(rank).requires_grad_(whole)
    for each in (plain, model):
        call = partial(checkpoint, each, use_reentrant=True) if whole else each
        loss = sum(call(x, chosen).square().sum() for chosen in ([0, 1 + rank], [0, 1, 2]))
        loss.backward(retain_graph=True)  # the next repeats them once more
        loss.backward()
    same_grads(model, plain)


class Headed(nn.Module):
    """Has a body with units of its own and a gain that belongs to the root."""

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
        """Computes, after a nested part, with a parameter of the root and with one of a unit."""

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


@pytest.mark.parametrize(("strategy", "joined"), [("node=3", False), ("node=1", True), ("node=0", False)])
@on_ranks(2)
def test_a_part_that_holds_units_is_called_by_itself(strategy, joined):
    """As an encoder is by `generate`; trained so too, in turn with the whole model, and after it has raised."""
    plain, x = Headed(), inputs(dist.get_rank())
    options = {} if joined else {"bucket_bytes": 0}
    model = zm.shard(copy.deepcopy(plain), mesh(), strategy, units=["Sequential"], **options)
    optimizer = sgd(model.parameters())
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
