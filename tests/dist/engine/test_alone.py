"""What goes from where autograd leaves a gradient straight to the wire has the bits of what passes the accumulator:
[Note: Alone] of `zeromesh.schedule.buffer_layout`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeromesh as zm
from tests.dist.engine.reference import Case, backward, check, mesh_of
from tests.dist.engine.test_native import native
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.engine.backend import DeviceBackend
from zeromesh.engine.engine import Engine
from zeromesh.schedule import BufferLayout

NARROW = {"param_dtype": torch.bfloat16}
CASE = Case(precision="bf16-wire", steps=2, micro_batches=1)
ONCE = replace(CASE, steps=1)
"""Settings whose dtypes differ, while a step leaves the same state for the next."""

AXES = ("node=0,cluster=0", "node=1,cluster=0", "node=0,cluster=1", "node=1,cluster=1", "node=3d,cluster=1")
"""Of these, nothing is reduced before the boundary."""


@contextmanager
def accumulated() -> Iterator[None]:
    """Every gradient passes the accumulator, alone or not."""
    dtype = BufferLayout.collected_dtype
    with mock.patch.object(BufferLayout, "collected_dtype", lambda self, *, alone: dtype(self, alone=False)):
        yield


def trained(strategy: str, case: Case, options: dict[str, torch.dtype], *shape: int) -> list[Tensor]:
    """Every gradient and every norm of a training, and what that leaves."""
    model = zm.shard(case.build(), mesh_of(*shape), strategy, **{**case.shard_options(), **options})
    optimizer = case.make_optimizer(p for p in model.parameters() if p.requires_grad)
    found = []
    for step in range(case.steps):
        backward(model, case, step)
        found += [param.grad.local.clone() for param in model.parameters() if param.grad is not None]
        found.append(zm.clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    engine_of(model).at_rest(follow=True)
    return [*found, *(param.local.clone() for param in model.parameters())]


def require_same_bits(strategy: str, case: Case, options: dict[str, torch.dtype], *shape: int) -> None:
    ours = trained(strategy, case, options, *shape)
    with accumulated():
        theirs = trained(strategy, case, options, *shape)
    assert len(ours) == len(theirs) > 0
    assert all(map(torch.equal, ours, theirs)), strategy


ALL = (*AXES, "node=2,cluster=1", "node=3,cluster=0", "node=3,cluster=3")


@pytest.mark.parametrize(
    ("strategies", "case", "options"),
    [
        (ALL, CASE, NARROW),
        (AXES[:2], ONCE, {"param_dtype": torch.float16}),
        (AXES[2:], ONCE, {"param_dtype": torch.float32}),
        (AXES[1:4], ONCE, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
        (AXES[::2], ONCE, {"param_dtype": torch.float32, "reduce_dtype": torch.bfloat16}),
        (AXES[:3], replace(ONCE, optimizer="sgd"), {"param_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}),
        (AXES[3:], replace(ONCE, optimizer="sgd"), {"param_dtype": torch.bfloat16, "grad_dtype": torch.float16}),
        (ALL, replace(CASE, micro_batches=2, weighted=True), NARROW),
        (AXES[::2], replace(ONCE, weighted=True), NARROW),
        (AXES[1:4], replace(ONCE, micro_batches=2, every_last=True), NARROW),
        (AXES[::2], replace(ONCE, bucket_bytes=1 << 20), NARROW),
    ],
    ids=str,
)
@on_ranks(4)
def test_the_same_bits(strategies, case, options):
    for strategy in strategies:
        require_same_bits(strategy, case, options, 2, 2)


@pytest.mark.parametrize("strategy", ["node=1,cluster=0@/int8", "node=0@/int8,cluster=1", "node=1@/int4+ef,cluster=1"])
@on_ranks(4)
def test_the_same_bits_beside_coded_wires(strategy):
    require_same_bits(strategy, ONCE, NARROW, 2, 2)


@on_ranks(4)
def test_the_same_bits_on_other_backends():
    for at, strategy in enumerate(AXES):
        with native():
            require_same_bits(strategy + ";collective=ho_ring" * (at % 2), ONCE, NARROW, 2, 2)


@on_ranks(2)
def test_the_same_bits_on_two_ranks():
    for strategy in ("node=0", "node=1", "node=2", "node=3"):
        require_same_bits(strategy, replace(ONCE, world=2), NARROW, 2)


@on_ranks(6)
def test_the_same_bits_on_odd_axes():
    for strategy in AXES[1:4]:
        require_same_bits(strategy, replace(ONCE, world=6), NARROW, 3, 2)


@on_ranks(4)
def test_training_is_that_of_one_process():
    for strategy in AXES:
        check(strategy, CASE, 2, 2)


@on_ranks(6)
def test_the_same_bits_of_what_is_sent_in_pieces():
    """While the first ones are summed the last are yet to be sent."""
    for strategy, shape in (("node=1", (6,)), ("node=1,cluster=0", (3, 2)), ("node=0,cluster=1", (3, 2))):
        found = []
        for way in (nullcontext(), accumulated()):
            torch.manual_seed(0)
            with way:
                model = zm.shard(nn.Linear(1024, 2048), mesh_of(*shape), strategy, **NARROW)
            generator = torch.Generator().manual_seed(dist.get_rank())
            model(torch.randn(4, 1024, generator=generator).bfloat16()).square().sum().backward()
            found.append([param.grad.local.clone() for param in model.parameters()])
        assert all(map(torch.equal, *found)), strategy


def collected(strategy: str, case: Case) -> list[set[torch.dtype]]:
    """In which dtypes each micro-batch's gradients are copied to where they are reduced."""
    found: list[set[torch.dtype]] = []
    collect, enter = DeviceBackend._collect, Engine._begin_backward

    def noted(self, unit, index, factor, to, reduction, *, accumulate):
        found[-1].update(part.dtype for part in to.parts)
        collect(self, unit, index, factor, to, reduction, accumulate=accumulate)

    def begun(self, running):
        found.append(set())
        return enter(self, running)

    model = zm.shard(case.build(), mesh_of(2, 2), strategy, **case.shard_options())
    with mock.patch.object(DeviceBackend, "_collect", noted), mock.patch.object(Engine, "_begin_backward", begun):
        backward(model, case, 0)
    return found


@on_ranks(4)
def test_where_gradients_are_copied_to():
    narrow, wide = {torch.bfloat16}, {torch.float32}
    for strategy in AXES:
        assert collected(strategy, Case(precision="bf16-wire", micro_batches=1)) == [narrow]
        assert collected(strategy, Case(precision="bf16-wire", micro_batches=2)) == [wide] * 2
        assert collected(strategy, Case(precision="bf16-wire", micro_batches=2, every_last=True)) == [narrow] * 2
        assert collected(strategy, Case(precision="bf16", micro_batches=1)) == [wide]  # as they are sent


@on_ranks(6)
def test_what_is_scattered_over_an_even_axis_is_sent_from_there():
    """A rank in the middle of an odd axis has its sum in both halves of the accumulator, and one that sums in place has
    it in all of it: those send a copy."""
    for strategy, shape, expected in (
        ("node=1,cluster=1", (2, 3), set()),
        ("node=3d,cluster=0", (2, 3), set()),
        ("node=0,cluster=1", (2, 3), {(0, 1), (1, 1)}),
        ("node=1,cluster=1", (3, 2), {(1, 0), (1, 1)}),
        ("node=1,cluster=0", (6, 1), set()),
        ("node=0,cluster=1", (6, 1), {(rank, 0) for rank in range(6)}),
    ):
        engine = engine_of(zm.shard(CASE.build(), mesh_of(*shape), strategy, **CASE.shard_options()))
        chains = [chain for of_unit in engine.backend.chains for chain in of_unit.reduce.values()]
        place = dist.get_rank() % shape[0], dist.get_rank() // shape[0]
        for first in (chain.boundary_alone[0] for chain in chains):
            assert first.call.args[0].dtype == torch.bfloat16
            assert (first.before is not None) == (place in expected), strategy
