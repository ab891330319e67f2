"""Gradients of several micro-batches against plain torch's, for any use of the parameters in any of them."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zeromesh as zm
from zeromesh.engine.api import engine_of

NAMES = ("scale", "shift", "table")


class Hidden:
    """A value that no hook looks into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.rows = nn.Embedding(3, 4, sparse=True)

    def forward(self, x: Tensor, uses: tuple[str, ...], hidden: bool) -> Tensor | Hidden:
        for name in uses:
            if name == "scale":
                x = x * self.scale.tanh()
            elif name == "shift":
                x = x + self.shift
            else:
                x = x + self.rows(torch.tensor([0, 2, 0]))
        return Hidden(x) if hidden else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, calls: Calls) -> Tensor:
        x = x * self.head
        for block, uses, hidden in calls:
            out = self.blocks[block](x, uses, hidden)
            x = out.value if hidden else out
        return x


Calls = tuple[tuple[int, tuple[str, ...], bool], ...]
USES = st.lists(st.sampled_from(NAMES), max_size=3).map(tuple)
CALLS = st.lists(st.tuples(st.integers(0, 2), USES, st.sampled_from((False, False, True))), max_size=4).map(tuple)
HOW = st.sampled_from(("", "", "second derivatives", "twice"))
MICRO_BATCHES = st.lists(st.tuples(CALLS, HOW), min_size=1, max_size=4)
STEPS = st.lists(st.tuples(MICRO_BATCHES, st.sampled_from(("", "", "weighted", "given up"))), min_size=1, max_size=3)


def backward(model: nn.Module, calls: Calls, how: str, factor: float, seed: int) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    loss = factor * model(x, calls).square().sum()
    if how == "twice":
        (loss / 2).backward(retain_graph=True)
    loss.backward(create_graph=how == "second derivatives")
    for param in model.parameters():  # a graph that a gradient holds would hold its model
        if how == "second derivatives" and type(param) is nn.Parameter and param.grad is not None:
            param.grad = param.grad.detach()


@pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph=True, on purpose
@settings(max_examples=40)
@example(  # gradients that a call without parameters leaves on the leaves, when the step is given up
    steps=[
        ([(((0, ("scale",), False),), ""), (((0, (), False),), "")], "given up"),
        ([(((0, ("scale",), False),), ""), (((0, ("shift",), False),), "")], ""),
    ],
    to_none=True,
    bucket_bytes=0,
)
@example(  # a gradient that comes before its unit's backward is known to have begun
    steps=[([(((0, ("shift",), False), (0, ("scale",), True)), "")] * 2, "")], to_none=True, bucket_bytes=0
)
@given(steps=STEPS, to_none=st.booleans(), bucket_bytes=st.sampled_from((0, 25 << 20)))
def test_sums_are_those_of_plain_torch(steps, to_none: bool, bucket_bytes: int) -> None:
    torch.manual_seed(0)
    plain = Model().double()
    sharded = zm.shard(copy.deepcopy(plain), None, "node=3", bucket_bytes=bucket_bytes)
    named = dict(sharded.named_parameters())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, sharded)]
    for step, (micro_batches, kind) in enumerate(steps):
        weights = [index + 1.0 for index in range(len(micro_batches))]
        for index, (calls, how) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1 and kind != "given up"
            how = "" if last and how == "twice" else how  # a further backward after the last has tests of its own
            given = {"weight": weights[index], "total": sum(weights)} if kind == "weighted" else {}
            with zm.accumulate(sharded, last=last, **given):
                backward(sharded, calls, how, 1.0, 10 * step + index)
            if kind != "given up":
                backward(plain, calls, how, weights[index] / sum(weights) if given else 1.0, 10 * step + index)
        if kind == "given up":
            zm.zero_grad(sharded)
            plain.zero_grad()
        for name, param in plain.named_parameters():
            mine = named[name].grad
            assert (mine is None) == (param.grad is None), name
            if param.grad is not None:
                expected = param.grad.to_dense() if param.grad.is_sparse else param.grad
                torch.testing.assert_close(mine.local.view_as(expected), expected, rtol=1e-12, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)


def test_autograd_adds_to_the_accumulator_itself() -> None:
    """From the second micro-batch on; a copy beside it would be a pass over all gradients."""
    sharded = zm.shard(Model(), None, "node=3")
    (buffer,) = engine_of(sharded).units[0].buffers
    seen: list[bool] = []
    for index in range(3):
        with zm.accumulate(sharded, last=index == 2):
            out = sharded(torch.ones(3, 4), ((0, NAMES, False),))
            out.register_hook(lambda grad: seen.append(buffer.adds))
            out.sum().backward()
    assert seen == [False, True, True]
    assert not buffer.adds


class AddsItself(torch.autograd.Function):
    """A product whose backward adds to the weight's gradient itself, into new memory."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        own = (grad * ctx.x).sum(0)
        ctx.weight.grad = own if ctx.weight.grad is None else ctx.weight.grad + own
        return grad * ctx.weight, None


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift, self.unused = (nn.Parameter(torch.rand(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return AddsItself.apply(x, self.weight) + self.shift


def test_a_function_that_adds_to_a_gradient_itself() -> None:
    plain = nn.Sequential(*(Product() for _ in range(3)))
    sharded = zm.shard(copy.deepcopy(plain), None, "node=3")
    for index in range(4):
        x = torch.full((2, 4), index + 1.0)
        plain(x).square().sum().backward()
        with zm.accumulate(sharded, last=index == 3):
            sharded(x).square().sum().backward()
    for mine, param in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (param.grad is None)
        if param.grad is not None:
            torch.testing.assert_close(mine.grad.local, param.grad)


@pytest.mark.parametrize("to_none", [False, True])
def test_a_sum_that_is_zeroed_is_shown_as_zeros(to_none: bool) -> None:
    """Also where no later micro-batch uses its parameter; one that is dropped is None."""
    for sharded in False, True:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        model = zm.shard(model, None, "node=3", units=[nn.Linear]) if sharded else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for last in False, True:
            with zm.accumulate(model, last=last) if sharded else nullcontext():
                for part in model[: 1 if last else 2]:
                    part(torch.ones(1, 3)).sum().backward()
            if not last:
                optimizer.zero_grad(set_to_none=to_none)
        assert [(p.grad is None, p.grad is not None and bool(p.grad.any())) for p in model.parameters()] == [
            *[(False, True)] * 2,
            *[(to_none, False)] * 2,
        ]


def test_a_gradient_that_was_zeroed_shows_no_sum_of_micro_batches() -> None:
    """Else a loop that scales the gradients that it finds, as torch's pipelines do after each run, would scale sums."""
    model = zm.shard(nn.Linear(3, 3), None, "node=3")
    params, x = [*model.parameters()], torch.ones(1, 3)
    model(x).sum().backward()
    expected = [2 * param.grad.local for param in params]
    for zero_grad in (torch.optim.SGD(params, lr=0.1).zero_grad, model.zero_grad):
        zero_grad(set_to_none=False)
        for last in False, True:
            with zm.accumulate(model, last=last):
                model(x).sum().backward()
            for param in () if last else params:
                assert not param.grad.any()
                param.grad.add_(1.0)
        for param, sums in zip(params, expected, strict=True):
            torch.testing.assert_close(param.grad.local, sums + 1.0)
