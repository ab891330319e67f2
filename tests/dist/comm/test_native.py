"""Collectives of the native transport, on gloo ranks that are given it: the backend's own sums, in at most a few
launches, and quantised ones, with the bits and the bytes of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.comm.axes import line, values
from tests.dist.pool import on_ranks
from zeromesh.comm import collectives
from zeromesh.comm.collectives import all_gather, all_reduce, reduce_scatter
from zeromesh.comm.exchange import AxisGroup, Sent
from zeromesh.comm.messages import Messages
from zeromesh.comm.quantised import noise_generator
from zeromesh.comm.transport import Native, Transport
from zeromesh.wires.blocks import QuantFormat

WORLD = 3
MESSAGES, NATIVE = Messages("cpu"), Native("cpu")
INT8, INT4 = QuantFormat(bits=8), QuantFormat(bits=4, stochastic=True)


def own(numel: int, dtype: torch.dtype) -> Tensor:
    return values(dist.get_rank(), numel, dtype)


def gather(group: AxisGroup, room: Tensor) -> list[Tensor]:
    region = own(3 * 70_001, torch.bfloat16)
    all_gather(region, group)
    return [region]


def scatter(group: AxisGroup, room: Tensor) -> list[Tensor]:
    found = []
    for wire, out, accumulate in ((torch.bfloat16, torch.float32, True), (torch.float32, torch.bfloat16, False)):
        for chunk in (1, 70_001):
            result = own(chunk, out)
            reduce_scatter(own(3 * chunk, wire), result, group, workspace=room, scale=1 / 3, accumulate=accumulate)
            found.append(result)
    return found


def reduce(group: AxisGroup, room: Tensor) -> list[Tensor]:
    tensors = [own(numel, torch.bfloat16) for numel in (3, 200_004)]
    for tensor in tensors:
        all_reduce(tensor, group, workspace=room, scale=0.5)
    return tensors


def quantised_gather(group: AxisGroup, room: Tensor) -> list[Tensor]:
    region, keep = own(3 * 70_001, torch.bfloat16), torch.zeros(3 * INT8.message_bytes(70_001), dtype=torch.uint8)
    all_gather(region, group, INT8, workspace=room, keep=keep)
    return [region, keep]


def quantised_scatter(group: AxisGroup, room: Tensor) -> list[Tensor]:
    out, residual = torch.ones(70_001), torch.zeros(3 * 70_001)
    region = own(3 * 70_001, torch.float32)
    noise = noise_generator(group)
    reduce_scatter(region, out, group, INT4, workspace=room, accumulate=True, generator=noise)
    reduce_scatter(region, out, group, INT8, workspace=room, accumulate=True, residual=residual)
    return [out, residual]


def quantised_reduce(group: AxisGroup, room: Tensor) -> list[Tensor]:
    tensors = [own(numel, torch.float32) for numel in (3, 200_004)]
    noise = noise_generator(group)
    for tensor in tensors:
        all_reduce(tensor, group, INT4, workspace=room, scale=1 / 3, generator=noise)
    return tensors


def ran(
    collective: Callable[[AxisGroup, Tensor], list[Tensor]], transport: Transport
) -> tuple[list[Tensor], list[Sent]]:
    group, seen = line(), list[Sent]()
    room = torch.zeros(1 << 21, dtype=torch.uint8)  # several parts on both
    group.transport, group.record = transport, seen.append
    try:
        return collective(group, room), seen
    finally:
        group.transport = MESSAGES


@pytest.mark.parametrize("collective", [gather, quantised_gather, quantised_scatter, quantised_reduce])
@on_ranks(WORLD)
def test_other_backends_give_the_same_bits_for_the_same_bytes(collective):
    expected, by_pieces = ran(collective, MESSAGES)
    calls: list[str] = []

    def counted(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            calls.append(name)
            call(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted("all_to_all", dist.all_to_all_single))
        found, natively = ran(collective, NATIVE)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)
    pairs = [[(sent.operation, sent.axis, sent.sent_bytes) for sent in seen] for seen in (by_pieces, natively)]
    assert pairs[0] == pairs[1]
    assert ("all_to_all" in calls) == (collective not in (gather, quantised_gather))


LOSSLESS = pytest.mark.parametrize("collective", [gather, scatter, reduce])


class Launches(TorchDispatchMode):
    """Counts the work that a lane's stream would be given: kernels that compute or copy, and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@LOSSLESS
@on_ranks(WORLD)
def test_the_backend_s_own_sums_differ_by_roundings_of_the_wire(collective):
    expected, by_pieces = ran(collective, MESSAGES)
    found, natively = ran(collective, NATIVE)
    for got, wanted in zip(found, expected, strict=True):
        # Two sums of three terms that are up to some 5, each rounded to bf16.
        assert torch.allclose(got.float(), wanted.float(), rtol=2**-7, atol=2 * 2**-8 * 6)
    assert {(s.operation, s.axis) for s in natively} == {(s.operation, s.axis) for s in by_pieces}
    assert len(natively) == len(found) and all(sent.messages == 1 for sent in natively)
    if collective is not reduce:  # which on gloo is two halves
        assert [s.sent_bytes for s in by_pieces] == [s.sent_bytes for s in natively]


@on_ranks(WORLD)
def test_a_native_reduction_is_a_collective_and_one_kernel():
    group = line()
    region, out = own(3 * 70_001, torch.bfloat16), own(70_001, torch.float32)
    part, nothing = region[group.rank * 70_001 :][:70_001], torch.empty(0)
    group.transport = NATIVE
    try:
        for to, accumulate, after in (
            (out, True, ["aten::add_.Tensor"]),
            (out, False, ["aten::copy_"]),
            (part, False, []),
        ):
            # Gloo's copies its input first.
            with mock.patch.object(collectives, "reduce_scatter_single") as backends, Launches() as launches:
                reduce_scatter(region, to, group, workspace=nothing, accumulate=accumulate)
            assert backends.call_count == 1 and launches.names == after
    finally:
        group.transport = MESSAGES
