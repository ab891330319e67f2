"""What runs on other backends than gloo, on gloo ranks that are told it is another: the same bits, the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.dist.pool import kept, on_ranks
from zeromesh.comm import AxisGroup, Sent, all_gather, all_reduce, make_groups, reduce_scatter
from zeromesh.comm.quantised import (
    noise_generator,
    quantised_all_gather,
    quantised_all_reduce,
    quantised_reduce_scatter,
)
from zeromesh.strategy import Layout
from zeromesh.wires import QuantFormat

WORLD = 3
INT8, INT4 = QuantFormat(bits=8), QuantFormat(bits=4, stochastic=True)


def make_line() -> AxisGroup:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("line",))
    return make_groups(mesh, Layout.of("line=3", [("line", WORLD)]).axes)["line"]


def values(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any) -> None:
    """Gloo has none of lists: through its own of one tensor."""
    received = torch.cat(list(outputs))
    arriving, leaving = ([len(tensor) for tensor in tensors] for tensors in (outputs, inputs))
    dist.all_to_all_single(received, torch.cat(list(inputs)), arriving, leaving, group=group)
    for output, part in zip(outputs, received.split(arriving), strict=True):
        output.copy_(part)


def uneven_all_gather(outputs: Sequence[Tensor], own: Tensor, group: Any) -> None:
    """Gloo has none of unequal lengths: a broadcast from every rank, as NCCL's backend does it."""
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank():
            output.copy_(own.clone())
        dist.broadcast(output, rank, group=group)


def gather(group: AxisGroup, room: Tensor) -> list[Tensor]:
    region = values(3 * 70_001, torch.bfloat16)
    all_gather(region, group)
    return [region]


def scatter(group: AxisGroup, room: Tensor) -> list[Tensor]:
    found = []
    for wire, out, accumulate in ((torch.bfloat16, torch.float32, True), (torch.float32, torch.bfloat16, False)):
        for chunk in (1, 70_001):
            result = values(chunk, out)
            reduce_scatter(values(3 * chunk, wire), result, group, workspace=room, scale=1 / 3, accumulate=accumulate)
            found.append(result)
    return found


def reduce(group: AxisGroup, room: Tensor) -> list[Tensor]:
    tensors = [values(numel, torch.bfloat16) for numel in (1, 4, 200_003)]  # the last chunks shorter, or empty
    for tensor in tensors:
        all_reduce(tensor, group, workspace=room, scale=0.5)
    return tensors


def quantised_gather(group: AxisGroup, room: Tensor) -> list[Tensor]:
    region, keep = values(3 * 70_001, torch.bfloat16), torch.zeros(3 * INT8.message_bytes(70_001), dtype=torch.uint8)
    quantised_all_gather(region, group, INT8, workspace=room, keep=keep)
    return [region, keep]


def quantised_scatter(group: AxisGroup, room: Tensor) -> list[Tensor]:
    out, residual = torch.ones(70_001), torch.zeros(3 * 70_001)
    region = values(3 * 70_001, torch.float32)
    noise = noise_generator(group)
    quantised_reduce_scatter(region, out, group, INT4, workspace=room, accumulate=True, generator=noise)
    quantised_reduce_scatter(region, out, group, INT8, workspace=room, accumulate=True, residual=residual)
    return [out, residual]


def quantised_reduce(group: AxisGroup, room: Tensor) -> list[Tensor]:
    tensors = [values(numel, torch.float32) for numel in (4, 200_003)]
    noise = noise_generator(group)
    for tensor in tensors:
        quantised_all_reduce(tensor, group, INT4, workspace=room, scale=1 / 3, generator=noise)
    return tensors


def ran(collective: Callable[[AxisGroup, Tensor], list[Tensor]], backend: str) -> tuple[list[Tensor], list[Sent]]:
    group, seen = kept(make_line), list[Sent]()
    room = torch.zeros(1 << 21, dtype=torch.uint8)  # several parts on both
    group.backend, group.record = backend, seen.append
    try:
        return collective(group, room), seen
    finally:
        group.backend = "gloo"


@pytest.mark.parametrize("collective", [gather, scatter, reduce, quantised_gather, quantised_scatter, quantised_reduce])
@on_ranks(WORLD)
def test_other_backends_give_the_same_bits_for_the_same_bytes(collective):
    expected, by_pieces = ran(collective, "gloo")
    calls: list[str] = []

    def counted(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            calls.append(name)
            call(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all", counted("all_to_all", all_to_all))
        patch.setattr(dist, "all_gather", counted("all_gather", uneven_all_gather))
        found, natively = ran(collective, "nccl")
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)
    pairs = [[(sent.operation, sent.axis, sent.sent_bytes) for sent in seen] for seen in (by_pieces, natively)]
    assert pairs[0] == pairs[1]
    assert collective is gather or "all_to_all" in calls
    assert collective is not reduce or "all_gather" in calls
