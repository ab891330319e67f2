"""Tensor parallelism beside other features: beginnings, norms, skipped steps, reports; and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import zeromesh as zm
from tests.dist.parallel.tensor import (
    CLIP,
    FP64,
    backward,
    build,
    divide,
    mesh_of,
    momentum,
    pair_of,
    params_of,
    sharded,
)
from tests.dist.parity import Part, adamw, close, same_params, tokens
from tests.dist.pool import kept, on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.errors import InputError, MeshError, ModelError


def from_elements(module: nn.Module) -> None:
    """Initialises each element by its place in the whole parameter, which only whole ones have."""
    for param in module.parameters(recurse=False):
        assert not isinstance(param, DTensor)
        param.copy_(torch.arange(param.numel()).view_as(param) + len(param.shape))


@on_ranks(4)
def test_from_the_meta_device():
    mesh = mesh_of(2)
    with torch.device("meta"):
        net = build()
    model = zm.shard(divide(net, mesh["tp"], "loss"), mesh["node"], "node=3", init=from_elements, **FP64)
    wanted = build()
    with torch.no_grad():
        for module in wanted.modules():
            from_elements(module)
    same_params(model, wanted)


@on_ranks(4)
def test_what_is_not_divided_begins_as_the_first_rank_has_it():
    mesh, net = mesh_of(2), divide(build(), mesh_of(2)["tp"], "blocks")
    with torch.no_grad():
        for param in (net.norm.weight, net.embed.weight):
            param.fill_(dist.get_rank() + 1)
    model = zm.shard(net, mesh["node"], "node=3", **FP64)
    for param in params_of(model):
        if param.full_name in ("norm.weight", "embed.weight"):
            assert param.local.equal(torch.ones_like(param.local))


@on_ranks(4)
def test_buffers_are_alike_where_local_tensors_are_not():
    model = sharded("node=3", "blocks", mesh_of(2))
    units = engine_of(model).units
    layout = [(b.padded, [(p.info.name, p.start) for p in b.places]) for unit in units for b in unit.buffers]
    sizes = sum(place.region.numel for unit in units for b in unit.buffers for place in b.places)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, (layout, sizes))
    assert all(other == layout for other, _ in everyone)
    assert len({sizes for _, sizes in everyone}) == 2


@on_ranks(4)
def test_norms_reports_and_replicas():
    pair = pair_of("node=1", "loss", mesh_of(2))
    model, optimizers = pair.model, [adamw(each.parameters()) for each in (pair.plain, pair.model)]
    backward(model, "loss", 0, pair.own)
    pair.plain_backward(0)
    named = {name: param.grad for name, param in pair.plain.named_parameters()}
    for param in params_of(model):
        for order in (2.0, math.inf):
            wanted = torch.linalg.vector_norm(named[param.full_name], order)
            close(torch.linalg.vector_norm(param.grad, order), wanted, param.full_name)
    norm = nn.utils.get_total_norm(named.values())
    close(nn.utils.get_total_norm([param.grad for param in model.parameters()]), norm, "norm of all")
    close(nn.utils.clip_grad_norm_(model.parameters(), CLIP), norm, "norm clipped to")
    nn.utils.clip_grad_norm_(pair.plain.parameters(), CLIP)
    for optimizer in optimizers:
        optimizer.step()
    pair.same_params()
    total = zm.memory_report(model, optimizer)[-1]
    assert total.predicted_bytes == total.allocated_bytes
    zm.check_replicas(model, optimizer)
    with zm.traffic_report(model, micro_batches=3) as traffic:
        backward(model, "loss", 1, engine_of(model).control.rank)
        optimizer.step()
    (line,) = traffic.lines()
    assert 0 < line.sent_bytes == line.predicted_bytes


def tp_has_a_stage() -> Any:
    mesh = mesh_of(2)
    return zm.shard(divide(build(), mesh["tp"], "tensor"), mesh, "tp=3,node=1")


def divided_over_node() -> Any:
    net, mesh = build(), mesh_of(2)
    net.head.weight = nn.Parameter(distribute_tensor(net.head.weight.detach(), mesh["node"], [Shard(0)]))
    return zm.shard(net, mesh["node"], "node=3")


def crossed() -> Any:
    """TP lines that go from one place on the data-parallel axis to the other."""
    lines = kept(_crossed_lines)
    return zm.shard(divide(build(), lines["tp"], "tensor"), mesh_of(2)["node"], "node=3")


def _crossed_lines() -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor([[0, 3], [2, 1]]), mesh_dim_names=("line", "tp"))


def without_the_axis() -> Any:
    mesh = mesh_of(2)
    return zm.shard(divide(build(), mesh["tp"], "tensor"), mesh["node"], "node=3,cluster=1")


def two_meshes() -> Any:
    """Parameters over the same two ranks and two others."""
    net, mesh = divide(build(), mesh_of(1, tp=4)["tp"], "blocks"), mesh_of(2)
    net.head.weight = nn.Parameter(distribute_tensor(net.head.weight.detach(), mesh["tp"], [Replicate()]))
    return zm.shard(net, mesh_of(1, tp=4)["node"], "node=3")


def packed_unevenly() -> Any:
    """Each of two packed matrices of five rows, over two ranks."""
    net, mesh = build(), mesh_of(2)
    local = torch.zeros(6 - 2 * mesh["tp"].get_local_rank(), 6, dtype=torch.float64)
    placements, shape = [_StridedShard(0, split_factor=2)], torch.Size((10, 6))
    made = DTensor.from_local(local, mesh["tp"], placements, run_check=False, shape=shape, stride=(6, 1))
    net.head.weight = nn.Parameter(made)
    return zm.shard(net, mesh["node"], "node=3", **FP64)


def divided_buffer() -> Any:
    net, mesh = divide(build(), mesh_of(2)["tp"], "blocks"), mesh_of(2)
    net.register_buffer("scale", distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]))
    return zm.shard(net, mesh["node"], "node=3")


def quantised() -> Any:
    net = build().to(torch.float32)
    return zm.shard(divide(net, mesh_of(2)["tp"], "tensor"), mesh_of(2)["node"], "node=3@int8/int4")


@on_ranks(4)
def test_what_cannot_be_is_refused_on_all_ranks():
    for make, error, message in (
        (tp_has_a_stage, MeshError, r"over tp\) over ranks .* too, node=2, tp=2: give zm\.shard the data-"),
        (divided_over_node, MeshError, r"head\.weight is a DTensor \(S.* over node\) over ranks .* of the mesh"),
        (crossed, MeshError, r"must be dimensions of one mesh, such as"),
        (without_the_axis, MeshError, r"cluster"),
        (quantised, InputError, r"axis node cannot quantise what it sends: .* is the same on ranks that"),
        (packed_unevenly, ModelError, r"head\.weight is a DTensor of \(10, 6\) .* divides each of its parts evenly"),
        (two_meshes, MeshError, r"two axes must have one rank in common"),
        (divided_buffer, ModelError, r"scale is a buffer that lies as .*: only parameters may be divided"),
    ):
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize("strategy", ["node=3;prefetch=0", "node=1"])
@on_ranks(4)
def test_leaves_that_are_kept_or_written_to(strategy):

    def compute(self, x):
        self.kept = [self.inner.weight]
        if self.writes:
            with torch.no_grad():
                self.inner.weight.mul_(2)
        return self.inner(x)

    net, mesh = divide(build(), mesh_of(2)["tp"], "tensor"), mesh_of(2)
    keeping: list[Any] = [Part(compute, inner=block.up, writes=False) for block in net.blocks]
    for block, keeps in zip(net.blocks, keeping, strict=True):
        block.up = keeps
    model: Any = zm.shard(net, mesh["node"], strategy, **FP64)
    batch = tokens(0, 0, engine_of(model).control.rank)
    model(batch)
    if strategy != "node=1":
        with pytest.raises(ModelError, match=r"gathered blocks\.0\.up\.inner\.weight, which was kept from inside"):
            keeping[0].kept[0] + 1
    optimizer = momentum(model.parameters())
    loss = model(batch).sum()
    loss.backward()
    late = model(batch).sum()
    optimizer.step()
    with pytest.raises((ModelError, RuntimeError), match=r"has changed since the forward|modified by an inplace"):
        late.backward()
    zm.zero_grad(model)
    keeping[1].writes = True
    with pytest.raises(ModelError, match=r"has written to its parameters"):
        model(batch)
