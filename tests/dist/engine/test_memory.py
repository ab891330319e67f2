"""Every byte of model state and working buffers is predicted, allocated once, and freed with the model."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import zeromesh as zm
from tests.dist.engine.reference import TIMEOUT_S, Case, Net, backward, mesh_of, sharded
from tests.dist.engine.test_communication import LOSSLESS
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of

SPECIAL = ["node=3,cluster=3k;prefetch=3", "node=1@/fp32,cluster=3@fp32/bf16"]


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [(text, "bf16-wire") for text in (*LOSSLESS, *SPECIAL)]
    + [(text, "fp64") for text in ("node=3,cluster=1", "node=1,cluster=1", *SPECIAL)],
)
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_predicted_is_allocated(strategy, precision):
    case = Case(precision=precision, micro_batches=1)
    with sharded(strategy, case, mesh_of(2, 2)) as (model, optimizer):
        buffers = [tensor.data_ptr() for tensor in engine_of(model).working_buffers()]
        for step in range(2):
            backward(model, case, step)
            optimizer.step()
            optimizer.zero_grad()
        for line in zm.memory_report(model, optimizer.members[0]):
            assert line.predicted_bytes == line.allocated_bytes, line
        assert [tensor.data_ptr() for tensor in engine_of(model).working_buffers()] == buffers


@on_ranks(4, timeout_s=TIMEOUT_S)
def test_bytes_term_by_term():
    """bf16 compute, fp32 master, on node=3,cluster=1 of 2x2."""
    case = Case(precision="bf16-wire")
    with sharded("node=3,cluster=1", case, mesh_of(2, 2)) as (model, optimizer):
        backward(model, case, 0)
        optimizer.step()
        units = engine_of(model).schedule.units
        report = {line.kind: line.allocated_bytes for line in zm.memory_report(model, optimizer.members[0])}
    trained = [-(-b.numel // 4) * 4 for unit in units for b in unit.buffers if b.trainable]
    frozen = [-(-b.numel // 4) * 4 for unit in units for b in unit.buffers if not b.trainable]
    assert sum(b.numel for unit in units for b in unit.buffers) == sum(p.numel() for p in Net().parameters())
    assert report["params"] == 2 * (sum(trained) + sum(frozen)) // 2  # w_p = 2, N3 = 2
    assert report["grads"] == 4 * sum(trained) // 2  # w_g = 4, N3 = 2
    # AdamW makes two moments for each element that has had a gradient, padding aside: over all ranks, each once.
    moments = torch.tensor(report["optimizer"] - 4 * sum(trained) // 4)  # w_m = 4, N3 * N1 = 4
    dist.all_reduce(moments)
    used = [p.numel() for n, p in Net().named_parameters() if p.requires_grad and "unused" not in n]
    assert moments == 2 * 4 * sum(used)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=1,cluster=2", "node=3,cluster=3k"])
@on_ranks(4, timeout_s=TIMEOUT_S)
def test_deleting_the_model_frees_everything_at_once(strategy):
    case = Case(micro_batches=2)
    model = zm.shard(case.build(), mesh_of(2, 2), strategy, **case.shard_options())
    optimizer = case.make_optimizer(model.parameters())
    for step in range(2):
        backward(model, case, step)
        zm.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.interpreter.quiesce()
    held = [tensor for unit in engine.units for buffer in unit.buffers for tensor in buffer.tensors().values()]
    watched = [weakref.ref(tensor) for tensor in (*held, *engine.working_buffers(), *engine.optimizer_params())]
    watched += [weakref.ref(tensor) for s in engine.backend.scratch.values()
                for tensor in (s.staging, s.workspace)]  # fmt: skip
    gc.collect()
    gc.disable()  # what only the collector can free is held until it happens to run
    try:
        del engine, held, model, optimizer
        alive = [tensor for ref in watched if (tensor := ref()) is not None]
        assert not alive, [tensor.shape for tensor in alive]
    finally:
        gc.enable()


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_originals_are_freed_by_sharding():
    net = Net()
    originals = list(net.parameters())
    zm.shard(net, mesh_of(2), "node=3")
    assert all(param.untyped_storage().nbytes() == 0 for param in originals)
