"""States saved under tensor parallelism are of whole tensors: they load under another degree, and without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zeromesh as zm
from tests.dist.features.test_huggingface import data_of, loss_of
from tests.dist.parallel.tensor import FP64, build, dividing, mesh_of, pair_of, params_of, sharded
from tests.dist.parallel.test_models import build as mixture
from tests.dist.parallel.test_models import by_its_plan
from tests.dist.parity import adamw, both_params, close, local_part, same_optimizer_states, same_params
from tests.dist.pool import kept, on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.engine.optim import take_slices

LAYOUTS = {
    "TP 1": ("node=3", (4,), 1, "blocks"),
    "TP 4": ("node=0", (1,), 4, "tensor"),
    "TP 2, other stages and parts": ("node=1", (2,), 2, "sequence"),
}


Trained = tuple[nn.Module, torch.optim.Optimizer]


def trained() -> tuple[Trained, Trained]:
    """One step on two data-parallel ranks with TP 2; and the plain model after it. No test changes either."""
    pair = pair_of("node=3", "loss", mesh_of(2, tp=2))
    with dividing("loss"):
        theirs, ours = pair.train(steps=1)
    return (pair.model, ours), (pair.plain, theirs)


def other(layout: str) -> Trained:
    strategy, shape, tp, plan = LAYOUTS[layout]
    model = sharded(strategy, plan, mesh_of(*shape, tp=tp))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model, adamw(model.parameters())


def require_states(ours: Trained, theirs: Trained) -> None:
    same_params(ours[0], theirs[0])
    same_optimizer_states(*ours, *theirs)


def shared_path(tmp_path: Path) -> Path:
    """Rank 0's: each rank of a pool is given one of its own."""
    paths = [tmp_path]
    dist.broadcast_object_list(paths)
    return paths[0]


@on_ranks(4)
def test_checkpoints_under_other_degrees(tmp_path):
    """Ours, and torch's; ours read by torch, and torch's by us."""
    path = shared_path(tmp_path)
    (model, optimizer), wanted = kept(trained)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path / "dcp")
    with zm.Checkpoints(path / "own", model, optimizer) as checkpoints:
        checkpoints.save(1)
        saved = checkpoints.wait()
    for layout, source in zip(LAYOUTS, (path / "dcp", saved, path / "dcp"), strict=True):
        model, _ = other(layout)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=source)
        model.load_state_dict(state["model"])
        same_params(model, wanted[0])
        with zm.Checkpoints(path / "none", model) as checkpoints:
            checkpoints.load(path / "dcp")
        same_params(model, wanted[0])
        model, optimizer = other(layout)
        with zm.Checkpoints(path / "own", model, optimizer) as checkpoints:
            assert checkpoints.load() is not None
        require_states((model, optimizer), wanted)


def packed(tp: int) -> Trained:
    """A mixture whose experts' projections are packed two in one, each of them divided over `tp`."""
    mesh, model = mesh_of(4 // tp, tp=tp), mixture("mixtral")
    model = zm.shard(by_its_plan(model, mesh["tp"]) if tp > 1 else model, mesh["node"], "node=3", **FP64)
    return model, adamw(model.parameters())


@on_ranks(4)
def test_packed_projections_under_other_degrees(tmp_path):
    path, (model, optimizer) = shared_path(tmp_path), packed(2)
    loss_of(model, data_of("llama", 0, 0, engine_of(model).control.rank)).backward()
    optimizer.step()
    said, plain = [zm.full_state_dict(model)], mixture("mixtral")
    dist.broadcast_object_list(said)
    plain.load_state_dict(said[0])
    same_params(model, plain)
    assert any(p.region.fold[1] == 2 for p in params_of(model))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path / "dcp")
    moments, first = dict[str, Tensor](), (model, optimizer)
    with zm.Checkpoints(path / "own", model, optimizer) as checkpoints:
        checkpoints.save(1)
        checkpoints.wait()
    for tp in (1, 4):
        model, optimizer = packed(tp)
        model.load_state_dict(plain.state_dict())
        for _, param, value in both_params(model, plain):
            assert param.local.equal(local_part(param, value))
            param.local.zero_()
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path / "dcp")
        model.load_state_dict(state["model"])
        same_params(model, plain)
        for param in params_of(model):
            param.local.zero_()
        with zm.Checkpoints(path / "own", model, optimizer) as checkpoints:
            assert checkpoints.load() is not None
        same_params(model, plain)
        if tp == 1:  # slices of whole tensors, which say nothing of how they were divided
            for param in params_of(model):
                parts: list[Any] = [None] * 4
                dist.all_gather_object(parts, (param.elements.start, optimizer.state[param]["exp_avg"]))
                flat = torch.cat([part for _, part in sorted(parts, key=lambda pair: (pair[0], pair[1].numel()))])
                moments[param.full_name] = flat.view(param.shape)
        for each, own in ((model, optimizer), first):
            for param in params_of(each):
                close(own.state[param]["exp_avg"], local_part(param, moments[param.full_name]), param.full_name)


@on_ranks(4)
def test_whole_tensors(tmp_path):
    path = shared_path(tmp_path)
    (model, _), wanted = kept(trained)  # compares the state dict
    state = zm.full_state_dict(model)
    assert list(state) == (list(build().state_dict()) if state else [])
    zm.save_safetensors(model, path)
    for layout in LAYOUTS:
        for load in (lambda model: zm.load_full_state_dict(model, state), lambda m: zm.load_safetensors(m, path)):
            model, _ = other(layout)
            load(model)
            same_params(model, wanted[0])


@on_ranks(4)
def test_state_dicts_of_whole_tensors_and_of_slices():
    (model, optimizer), wanted = kept(trained)
    own = model.state_dict(), optimizer.state_dict()
    again = sharded("node=3", "loss", mesh_of(2, tp=2))
    stepping = adamw(again.parameters())
    again.load_state_dict(own[0])
    stepping.load_state_dict(own[1])
    take_slices(stepping)  # as its first step does
    require_states((again, stepping), wanted)
    for layout in LAYOUTS:
        model, _ = other(layout)
        model.load_state_dict(wanted[0].state_dict())
        same_params(model, wanted[0])
