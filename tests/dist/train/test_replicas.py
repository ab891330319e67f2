"""Bits that differ between ranks that must hold the same are found, and where; intact runs find nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from tests.dist.pool import Pool, kept
from zeromesh.engine.api import engine_of
from zeromesh.engine.control import Control
from zeromesh.errors import MismatchError
from zeromesh.observe.replicas import CHUNK, digest

MESH = ("cluster", "node")
Flip = tuple[int, str, int]
"""Rank, name, and which element: its lowest bit is flipped."""


def run(strategy: str, flips: list[Flip], dtype: torch.dtype = torch.float32) -> str:
    """Two steps on 2 x 2 ranks, the flips, and the check's message."""
    mesh = kept(init_device_mesh, "cpu", (2, 2), mesh_dim_names=MESH)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))
    zm.shard(model, mesh, strategy, param_dtype=dtype, units=[nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 5).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    zm.check_replicas(model, optimizer)
    for rank, what, element in flips:
        if rank == dist.get_rank():
            flip(find(model, optimizer, what), element)
    try:
        zm.check_replicas(model, optimizer)
    except MismatchError as error:
        return str(error)
    return ""


def find(model: nn.Module, optimizer: torch.optim.Optimizer, what: str) -> Tensor:
    buffers = [buffer for unit in engine_of(model).units for buffer in unit.buffers]
    chosen = next(buffer for buffer in buffers if any(p.full_name == "2.weight" for p in buffer.optimizer_params))
    if what in ("params", "master", "kept"):
        found = getattr(chosen, what)
        assert found is not None
        return found
    params = [param for param in chosen.optimizer_params if param.full_name == "2.weight"]
    return optimizer.state[params[0]][what]


def flip(tensor: Tensor, element: int) -> None:
    plain = tensor.as_subclass(Tensor).detach().reshape(-1)
    integer = {2: torch.int16, 4: torch.int32}[plain.element_size()]
    plain.view(integer)[element] ^= 1


@pytest.mark.parametrize(
    ("strategy", "flipped", "message"),
    [
        # Rank 2 is rank 0's replica over the cluster; of two nobody knows which is right.
        ("node=3,cluster=0", (2, "master", 1), "ranks 0, 2 have drifted apart: over axis cluster they must hold"),
        ("node=3,cluster=0", (3, "step", 0), "optimizer states of unit '2' to the bit, and differ in step of 2.weight"),
        ("node=0,cluster=0", (3, "exp_avg", 5), "rank 3 drifted away from rank 0: over axis node, cluster"),
        ("node=1,cluster=2", (1, "params", 4), "rank 1 drifted away from rank 0: over axis node they must hold the"),
        ("node=3,cluster=3k", (1, "kept", 3), "over axis cluster they must hold the same kept copy of unit"),
        ("node=3,cluster=1@int8/", (3, "params", 2), "ranks 1, 3 have drifted apart: over axis cluster"),
    ],
)
def test_one_bit_is_found_and_named(pool: Pool, strategy: str, flipped: Flip, message: str) -> None:
    # With a second dtype masters and parameters are two tensors.
    said = pool.run(4, run, strategy, [flipped], torch.bfloat16)
    assert len(set(said)) == 1
    assert message in said[0]
    what = {"params": "parameters", "master": "master copy", "kept": "kept copy"}.get(flipped[1], "optimizer states")
    assert f"the same {what} of unit" in said[0]
    state = f"{flipped[1]} of " if what == "optimizer states" else ""
    assert re.search(rf"and differ in {state}\d\.(weight|bias)", said[0])


def test_several_differences_are_counted(pool: Pool) -> None:
    (said, *_) = pool.run(4, run, "node=3,cluster=0", [(2, "master", 0), (2, "exp_avg", 0), (3, "exp_avg", 1)])
    assert "(2 more differences in other places)" in said


def pending(shape: tuple[int, ...], strategy: str, flips: list[Flip]) -> str:
    """Two optimizers step in turn, then masters are changed in place: copies that follow later are no differences, no
    traffic of the next step, and no events of it. Then the flips, and the check's message."""
    mesh = kept(init_device_mesh, "cpu", shape, mesh_dim_names=("pod", "cluster", "node")[-len(shape) :])
    torch.manual_seed(0)
    model = zm.shard(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), mesh, strategy)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (model[0], model[2])]
    x = torch.randn(4, 5)
    for step in range(4):
        model(x).square().mean().backward()
        for optimizer in optimizers[: 1 + step % 2]:
            optimizer.step()
            zm.check_replicas(model, optimizers)
        zm.zero_grad(model)

    def clamp(bound: float) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-bound, bound)

    clamp(0.1)
    zm.check_replicas(model, optimizers)
    clamp(0.05)
    with zm.traffic_report(model, micro_batches=1) as traffic, torch.no_grad():
        model(x)
    assert not traffic.calls
    clamp(0.01)
    with zm.record_trace(model) as recording:
        model(x).square().mean().backward()
        optimizers[0].step()
    assert not [event for event in recording.steps[0].events if event.name.startswith("refresh")]
    model(x)
    for rank, what, element in flips:
        if rank == dist.get_rank():
            flip(find(model, optimizers[0], what), element)
    try:
        zm.check_replicas(model, optimizers)
    except MismatchError as error:
        return str(error)
    return ""


def test_copies_that_have_yet_to_follow_their_masters_are_no_difference(pool: Pool) -> None:
    assert pool.run(2, pending, (2,), "node=2", []) == [""] * 2
    flips = [(rank, "params", rank // 2) for rank in range(2, 6)]  # no value is held by most
    (said, *_) = pool.run(6, pending, (3, 1, 2), "node=0,cluster=1,pod=1", flips)
    assert "ranks 0, 1, 2, 3, 4, 5 have drifted apart: over axis pod they must hold the same parameters" in said


def exchanges(strategy: str) -> int:
    """Collectives of one check."""
    mesh = kept(init_device_mesh, "cpu", (2, 2), mesh_dim_names=MESH)
    model = zm.shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), mesh, strategy, units=[nn.Linear])
    calls: list[Any] = []
    reduce: Callable[..., Tensor] = Control.reduce

    def counted(self: Control, *args: Any) -> Tensor:
        calls.append(args)
        return reduce(self, *args)

    with mock.patch.object(Control, "reduce", counted):
        zm.check_replicas(model)
    return len(calls)


def test_costs_one_exchange_and_without_replicas_none(pool: Pool) -> None:
    assert pool.run(4, exchanges, "node=3,cluster=0") == [1] * 4
    assert pool.run(4, exchanges, "node=3,cluster=3") == [0] * 4


def test_alone_there_are_no_replicas() -> None:
    zm.check_replicas(zm.shard(nn.Linear(3, 3), None, "node=0"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_digest_sees_every_bit_and_every_place(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (8 * 13,), dtype=torch.uint8, generator=generator)
    for bytes_of in (data, data[: 8 * 12], data[8:]):
        plain = int(digest(bytes_of.view(dtype)))
        for position in range(bytes_of.numel()):
            for bit in (1, 128):
                other = bytes_of.clone()
                other[position] ^= bit
                assert int(digest(other.view(dtype))) != plain
        swapped = bytes_of.clone().view(torch.int64)
        swapped[[0, 5]] = swapped[[5, 0]]
        assert int(digest(swapped.view(dtype))) != plain


def test_digest_of_more_than_a_chunk_of_odd_lengths_and_of_nothing() -> None:
    data = torch.zeros(8 * CHUNK + 21, dtype=torch.uint8)
    seen = {int(digest(data))}
    for position in (0, 8 * CHUNK - 1, 8 * CHUNK, 8 * CHUNK + 20):
        data[position] += 1
        seen.add(int(digest(data)))
    assert len(seen) == 5
    assert int(digest(data[:0])) != int(digest(data[:1] * 0))
    assert int(digest(torch.tensor(1.5))) == int(digest(torch.tensor([1.5])))
    assert int(digest(data[3:90])) == int(digest(data[3:90].clone()))  # not on a word's boundary
