"""Experts divided over some ranks, shared by the others: their own axes, groups and divisor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zeromesh as zm
from tests.dist.parallel.experts import build, example, keep_own, tokens, train_experts
from tests.dist.parallel.tensor import FP64
from tests.dist.parity import adamw, mesh_of, same_params
from tests.dist.pool import kept, on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.errors import MeshError, MismatchError, ModelError


def sharded(own: str, part: str, *, shared: bool, dtensors: bool):
    """Experts over the node, shared over the cluster."""
    mesh, model = mesh_of(2, 2), build(shared=shared)
    if dtensors:
        model.spread(mesh["node"])
    else:
        keep_own(model, mesh["node"])
    parts = {"*.experts": zm.Part(mesh=mesh["cluster"], strategy=part)}
    return zm.shard(model, mesh, own, parts=parts, **FP64)


@on_ranks(4)
def test_mixtral_like():
    model = sharded("node=3,cluster=1", "cluster=1", shared=False, dtensors=True)
    train_experts(model, shared=False)
    model = sharded("host=1,node=0,cluster=0", "host=2,cluster=0", shared=False, dtensors=True)
    train_experts(model, shared=False, steps=1)


@on_ranks(4)
def test_deepseek_like():
    model = sharded("node=1,cluster=3k", "cluster=3", shared=True, dtensors=True)
    train_experts(model, shared=True, weighted=True)
    with zm.accumulate(model, last=True, weight=1.0, total=4.0):
        loss = example.next_token_loss(model, tokens(0, 0, 0))
        with pytest.raises(ModelError, match=r"part \*\.experts come of several ranks' tokens.*weigh\(loss\)"):
            loss.backward()


@on_ranks(8)
def test_on_eight_ranks():
    """Experts over the node, shared by the ranks of two axes."""
    mesh = kept(init_device_mesh, "cpu", (2, 2, 2), mesh_dim_names=("region", "cluster", "node"))
    model = build(shared=False)
    model.spread(mesh["node"])
    parts = {example.Experts: zm.Part(mesh=mesh["region", "cluster"])}
    text = "node=3,cluster=1,region=0 | <Experts>: cluster=3,region=1"
    zm.Sharding(strategy=text, mesh=mesh, parts=parts, **FP64).shard(model)
    train_experts(model, shared=False, steps=1)


@on_ranks(8)
def test_beside_tensor_parallelism():
    """Experts over the node, the same on both ranks of `tp`, as the first of them has them; the head over `tp`."""
    mesh = kept(init_device_mesh, "cpu", (2, 2, 2), mesh_dim_names=("cluster", "node", "tp"))
    for dtensors in (True, False):
        model = build(shared=True)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(mesh.get_local_rank("tp"))
        if dtensors:
            model.spread(mesh["node"])
        else:
            keep_own(model, mesh["node"])
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
        parts = {"*.experts": zm.Part(mesh=mesh["cluster"], strategy="cluster=3")}
        model = zm.shard(model, mesh["cluster", "node"], "node=3,cluster=1", parts=parts, **FP64)
        train_experts(model, shared=True, steps=1)


@on_ranks(4)
def test_experts_that_are_plain_tensors_train_and_are_not_saved(tmp_path):
    model = sharded("node=3,cluster=1", "cluster=3", shared=False, dtensors=False)
    train_experts(model, shared=False, steps=1)
    for save in (
        zm.full_state_dict,
        lambda model: model.state_dict(),
        lambda model: zm.Checkpoints(tmp_path, model).save(0),
    ):
        with pytest.raises(
            ModelError, match=r"part \*\.experts are other tensors on other ranks.*distribute_tensor\(param"
        ):
            save(model)


def over_all_ranks(strategy: str, own: DeviceMesh | None = None):
    """Experts over 4 ranks: one copy of all."""
    sparse, model = kept(init_device_mesh, "cpu", (1, 4), mesh_dim_names=("copies", "experts")), build(shared=False)
    model.spread(sparse["experts"])
    parts = {"*.experts": zm.Part(mesh=sparse["copies"], strategy="copies=0")}
    return zm.shard(model, own or mesh_of(2, 2), strategy, parts=parts, **FP64)


def step(model, optimizer, number: int) -> None:
    example.next_token_loss(model, tokens(number, 0, dist.get_rank())).backward()
    zm.clip_grad_norm_(model, 0.3)
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(4)
def test_states_are_of_whole_tensors(tmp_path):
    """Saved with experts over the node, loaded without parts and with experts over all ranks, and back."""
    model = sharded("node=3,cluster=1", "cluster=1", shared=False, dtensors=True)
    optimizer = adamw(model.parameters())
    step(model, optimizer, 0)
    full = zm.full_state_dict(model)
    checkpoints = zm.Checkpoints(tmp_path, model, optimizer)
    checkpoints.save(1)
    checkpoints.close()
    step(model, optimizer, 1)
    next_full = zm.full_state_dict(model)
    whole = zm.shard(build(shared=False), mesh_of(2, 2), "node=1,cluster=3", **FP64)
    for other in (whole, over_all_ranks("node=3,cluster=0")):
        loaded = adamw(other.parameters())
        zm.Checkpoints(tmp_path, other, loaded).load()
        after = zm.full_state_dict(other)
        assert full.keys() == after.keys() and all(torch.equal(full[name], after[name]) for name in full)
        step(other, loaded, 1)
        for name, value in zm.full_state_dict(other).items():
            torch.testing.assert_close(value, next_full[name], rtol=1e-10, atol=1e-10)
        zm.check_replicas(other, loaded)
    again = sharded("node=0,cluster=0", "cluster=3", shared=False, dtensors=True)
    zm.load_full_state_dict(again, full)
    before = zm.full_state_dict(again)
    assert all(torch.equal(full[name], before[name]) for name in full)
    zm.check_replicas(again, ())
    assert dist.get_rank() or full["layers.0.mlp.experts.up"].shape == (4, 5, 6)


@on_ranks(4)
def test_a_scaler_skips_where_one_ranks_experts_are_infinite():
    model = over_all_ranks("node=1,cluster=0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, params = torch.amp.GradScaler("cpu", init_scale=8.0), list(engine_of(model).optimizer_params())
    before = [param.local.clone() for param in params]
    scaler.scale(example.next_token_loss(model, tokens(0, 0, dist.get_rank()))).backward()
    if dist.get_rank() == 3:
        next(p.grad.local for p in params if ".experts." in p.full_name)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(value, param.local) for value, param in zip(before, params, strict=True))


@on_ranks(4)
def test_from_the_meta_device_with_buffers_of_its_own():
    """Each rank's experts are those of the whole that is initialised, and their buffers its own."""

    def init(module: torch.nn.Module) -> None:
        for name, param in module.named_parameters(recurse=False):
            generator = torch.Generator().manual_seed(param.numel() + len(name))
            param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype))
        if hasattr(module, "first"):
            module.first.fill_(mesh["node"].get_local_rank() + 10 * mesh["cluster"].get_local_rank())

    mesh, plain = mesh_of(2, 2), build(shared=True)
    with torch.no_grad():
        for module in plain.modules():
            init(module)
    with torch.device("meta"):
        model = build(shared=True)
        for layer in model.layers[1:]:
            layer.mlp.experts.register_buffer("first", torch.empty(2), persistent=False)
    model.spread(mesh["node"])
    parts = {"*.experts": zm.Part(mesh=mesh["cluster"], strategy="cluster=1")}
    model = zm.shard(model, mesh, "node=3,cluster=1", parts=parts, init=init, **FP64)
    same_params(model, plain)
    assert model.layers[1].mlp.experts.first.tolist() == [mesh["node"].get_local_rank()] * 2


@on_ranks(4)
def test_what_is_held_and_sent():
    model = sharded("node=3,cluster=1", "cluster=3", shared=False, dtensors=True)
    optimizer = adamw(model.parameters())

    def backward() -> None:
        for micro in range(2):
            with zm.accumulate(model, last=micro == 1):
                example.next_token_loss(model, tokens(0, micro, dist.get_rank())).backward()

    backward()
    with zm.traffic_report(model, micro_batches=2) as traffic:
        optimizer.step()
        optimizer.zero_grad()
        backward()
    lines = {line.axis: line for line in traffic.lines()}
    assert list(lines) == ["node", "cluster", "*.experts:cluster"]
    assert all(line.sent_bytes == line.predicted_bytes for line in lines.values())
    # Two experts of 90 elements in fp64, padded to 8 for each of two ranks. Both layers have a slot, and are gathered
    # and reduced once in a micro-batch: a rank sends its half.
    assert lines["*.experts:cluster"].sent_bytes == 2 * (2 + 2) * 192 // 2 * 8
    assert all(line.allocated_bytes == line.predicted_bytes for line in zm.memory_report(model, optimizer))
    zm.check_replicas(model, optimizer)
    experts = next(unit for unit in engine_of(model).units if unit.name == "layers.1")
    if dist.get_rank() == 2:  # (cluster 1, node 0)
        next(buffer for buffer in experts.buffers if buffer.spec.part == "").params.view(torch.uint8)[3] ^= 1
    with pytest.raises(
        MismatchError, match=r"over axis cluster they must hold the same parameters of unit 'layers\.1'"
    ):
        zm.check_replicas(model, optimizer)


def spread():
    model = build(shared=False)
    model.spread(mesh_of(2, 2)["node"])
    return model


def with_part(model, pattern: str, axis: str, strategy: str):
    part = zm.Part(mesh=mesh_of(2, 2)[axis], strategy=strategy)
    return zm.shard(model, mesh_of(2, 2), "node=3,cluster=1", parts={pattern: part})


@on_ranks(4)
def test_what_cannot_be_is_refused_on_all_ranks():
    mesh, saving = mesh_of(2, 2), spread()
    saving.layers[1].mlp.experts.register_buffer("counts", torch.zeros(2))
    crossing = "node" if dist.get_rank() == 3 else "cluster"
    whole = {"head": zm.Part(mesh=mesh, strategy="zero3")}
    for error, message, make in (
        (
            ModelError,
            r"mlp\.router\.weight is divided over 1 of the model's ranks, .* one in 2 of them",
            lambda: with_part(spread(), "*.mlp", "cluster", "cluster=1"),
        ),
        (
            ModelError,
            r"experts\.counts is in part \*\.experts, which other ranks.*persistent=False",
            lambda: with_part(saving, "*.experts", "cluster", "cluster=1"),
        ),
        (
            ModelError,
            r"part \*\.experts is divided over ranks \[0, 1, 2, 3\], some of .* mesh, \[\d, \d\], nor on an axis",
            lambda: over_all_ranks("cluster=1", mesh["cluster"]),
        ),
        (
            MeshError,
            r"which are ranks of the mesh of zm\.shard too.* or name the modules in parts=",
            lambda: zm.shard(spread(), mesh, "node=3,cluster=1"),
        ),
        (
            MismatchError,
            r"part head is shared by ranks \[.*\] as rank \d has it, and by \[.*\] as rank",
            lambda: with_part(build(shared=False), "head", crossing, f"{crossing}=1"),
        ),
        (
            MeshError,
            r"the mesh of part head has ranks \[\d, \d\] that the model's has not",
            lambda: zm.shard(build(shared=False), mesh["node"], "node=3", parts=whole),
        ),
        (
            MeshError,
            r"part \*\.experts: the mesh has no axis 'node' \(it has, innermost first: cluster\)",
            lambda: with_part(build(shared=False), "*.experts", "cluster", "node=1"),
        ),
        (
            MeshError,
            r"part \*\.experts: .* needs cluster to have a multiple of 3 ranks; this mesh has 2",
            lambda: with_part(build(shared=False), "*.experts", "cluster", "cluster[3]=1,cluster[*]=0"),
        ),
    ):
        with pytest.raises(error, match=message):
            make()


@on_ranks(4)
def test_the_example_learns():
    losses = example.main(steps=3)
    assert losses[-1] < losses[0] - 0.3
