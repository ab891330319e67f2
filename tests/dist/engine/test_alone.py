"""A gradient sent from where autograd leaves it has the same bits as one that passes the accumulator:
[Note: Alone] of `zeromesh.schedule.buffer_layout`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh as zm
from tests.dist.engine.test_parity import native
from tests.dist.parity import Case, backward, mesh_of, require_same, sharded, trained
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.engine.backend import DeviceBackend
from zeromesh.engine.engine import Engine
from zeromesh.schedule.buffer_layout import BufferLayout

CASE = Case(precision="bf16-wire", steps=2, micro_batches=1)
ONCE = replace(CASE, steps=1)
"""Settings whose dtypes differ, while a step leaves the same state for the next."""

AXES = ("node=0,cluster=0", "node=1,cluster=0", "node=0,cluster=1", "node=1,cluster=1", "node=3d,cluster=1")
"""None of these reduces anything before the boundary."""


@contextmanager
def accumulated() -> Iterator[None]:
    """Every gradient passes the accumulator, alone or not."""
    dtype = BufferLayout.collected_dtype
    with mock.patch.object(BufferLayout, "collected_dtype", lambda self, *, alone: dtype(self, alone=False)):
        yield


def require_same_bits(strategies: Sequence[str], case: Case, *shape: int, **options: torch.dtype) -> None:
    for strategy in strategies:
        ours = trained(strategy, case, *shape, **options)
        with accumulated():
            require_same(strategy, ours, trained(strategy, case, *shape, **options))


BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


@pytest.mark.parametrize(
    ("strategies", "case", "options"),
    [
        (AXES[4:], CASE, {}),
        (("node=2,cluster=1",), ONCE, {}),
        (AXES[:1], ONCE, {"param_dtype": FP16}),
        (AXES[2:3], ONCE, {"param_dtype": FP32}),
        (AXES[3:4], ONCE, {"reduce_dtype": FP32}),
        (AXES[4:], ONCE, {"param_dtype": FP32, "reduce_dtype": BF16}),
        (AXES[1:2], replace(ONCE, optimizer="sgd"), {"grad_dtype": BF16}),
        (AXES[3:4], replace(ONCE, optimizer="sgd"), {"grad_dtype": FP16}),
        (AXES[:1], replace(ONCE, micro_batches=2, weighted=True), {}),
        (AXES[3:4], replace(ONCE, micro_batches=2, every_last=True, bucket_bytes=1 << 20), {}),
        # Beside coded wires.
        (("node=1@/int4+ef,cluster=1",), ONCE, {}),
    ],
    ids=str,
)
@on_ranks(4)
def test_the_same_bits(strategies, case, options):
    require_same_bits(strategies, case, 2, 2, **options)


@on_ranks(4)
def test_the_same_bits_on_other_backends():
    for at, strategy in enumerate(AXES[:2]):
        with native():
            require_same_bits([strategy + ";collective=ho_ring" * (at % 2)], ONCE, 2, 2)


@on_ranks(6)
def test_the_same_bits_on_odd_axes():
    """Also of messages in pieces: while the first ones are summed the last are yet to be sent."""
    require_same_bits(AXES[2:4], replace(ONCE, world=6), 3, 2)
    for strategy, shape in (("node=1", (6,)), ("node=0,cluster=1", (3, 2))):
        found = []
        for way in (nullcontext(), accumulated()):
            torch.manual_seed(0)
            with way:
                model = zm.shard(nn.Linear(1024, 1024), mesh_of(*shape), strategy, param_dtype=BF16)
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

    with (
        sharded(strategy, case, mesh_of(2, 2)) as (model, _),
        mock.patch.object(DeviceBackend, "_collect", noted),
        mock.patch.object(Engine, "_begin_backward", begun),
    ):
        backward(model, case, 0)
    return found


@on_ranks(4)
def test_where_gradients_are_copied_to():
    first, last = AXES[::4]
    assert collected(first, CASE) == [{BF16}]
    for strategy in (first, last):
        assert collected(strategy, replace(CASE, micro_batches=2)) == [{FP32}] * 2
    assert collected(last, replace(CASE, micro_batches=2, every_last=True)) == [{BF16}] * 2
    assert collected(first, replace(CASE, precision="bf16")) == [{FP32}]  # as they are sent


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
        for (_, (first, *_)), *_ in (chain.boundary_alone for chain in chains):
            assert first.call.args[0].dtype == BF16
            assert (first.before is not None) == (place in expected), strategy
