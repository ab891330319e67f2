"""torch.distributed.checkpoint reads and writes zeromesh's; FSDP2 users come and leave with their optimizer."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import zeromesh as zm
from tests.dist.checkpoint.models import Mesh, Odd, adamw, assemble, make, require_equal, slices, train
from tests.dist.parity import mesh_of
from tests.dist.pool import Pool
from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.engine.param import Slice
from zeromesh.engine.whole import whole_state
from zeromesh.errors import InputError

TWO: Mesh = (("cluster", 1), ("node", 2))
FOUR: Mesh = (("cluster", 2), ("node", 2))


def plain() -> nn.Module:
    model = Odd()
    del model.scale, model.none  # FSDP2 takes neither 0-d nor empty parameters well
    model.scale, model.none = 1.0, torch.zeros(0, 3)  # type: ignore[assignment]
    return model


def fsdp2(seed: int, *, columns: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model under FSDP2 on two ranks; optionally with a parameter cut along its last dimension."""
    from torch.distributed.tensor import Shard

    torch.manual_seed(seed)
    model, mesh = plain(), mesh_of(2)
    place = (lambda p: Shard(p.ndim - 1) if p.ndim > 1 and p.shape[-1] % 2 == 0 else None) if columns else None
    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    return model, adamw(model)


def full(state: dict[str, Any]) -> dict[str, Tensor]:
    """Whole tensors of FSDP2's two state dicts, by the names that `slices` gives."""
    found: dict[str, Tensor] = {}
    for name, value in state["model"].items():
        found[name] = value
    for name, values in state["optim"]["state"].items():
        found |= {f"{name}/{key}": value for key, value in values.items()}
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).reshape(-1).clone() for k, v in found.items()}


def untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without second names, and without running statistics, of which each rank of FSDP2's has its own."""
    return {name: value for name, value in state.items() if not name.startswith(("head.", "norm.running"))}


def fsdp_saves(path: Path) -> dict[str, Tensor]:
    model, optimizer = fsdp2(0, columns=True)
    train(model, optimizer, 2)
    state = told(model, optimizer)
    expected = full(state)
    dcp.save(state, checkpoint_id=path)
    return untied(expected)


def we_load(path: Path, mesh: Mesh, strategy: str):
    model, optimizer = make(mesh, strategy, seed=1, build=plain)
    checkpoints = Checkpoints(path.parent / "mine", model, optimizer)
    restored = checkpoints.load(path)
    assert restored is not None and restored.has_optimizer
    held = slices(model, optimizer)
    train(model, optimizer, 1)
    return held


def test_fsdp2_users_come(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(2, fsdp_saves, tmp_path / "theirs")[0]
    found = assemble(pool.run(4, we_load, tmp_path / "theirs", FOUR, "node=3,cluster=1"))
    require_equal(untied(found), expected)


def we_save(path: Path, mesh: Mesh, strategy: str):
    model, optimizer = make(mesh, strategy, build=plain)
    train(model, optimizer, 2)
    with Checkpoints(path, model, optimizer) as checkpoints:
        checkpoints.save(2)
        checkpoints.wait()
    return slices(model, optimizer)


def fsdp_loads(path: Path) -> dict[str, Tensor]:
    model, optimizer = fsdp2(1)
    state = told(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    found = full(told(model, optimizer))
    train(model, optimizer, 1)
    return untied(found)


def test_fsdp2_users_leave(pool: Pool, tmp_path: Path) -> None:
    expected = assemble(pool.run(4, we_save, tmp_path, FOUR, "node=3,cluster=1"))
    require_equal(pool.run(2, fsdp_loads, tmp_path / "step-00000002")[0], untied(expected))


def told(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def dcp_saves(path: Path, mesh: Mesh, strategy: str):
    model, optimizer = make(mesh, strategy)
    train(model, optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writing = dcp.async_save(told(model, optimizer), checkpoint_id=path)
    held = slices(model, optimizer)
    train(model, optimizer, 1)  # beside it
    writing.result()
    return held


def dcp_loads(path: Path, mesh: Mesh, strategy: str):
    model, optimizer = make(mesh, strategy, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = told(model, optimizer)
        assert all(
            value.shape == p.shape for value, p in zip(state["model"].values(), model.parameters(), strict=False)
        )
        dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    held = slices(model, optimizer)
    train(model, optimizer, 1)
    return held


def test_state_dict_goes_through_dcp_to_any_layout(pool: Pool, tmp_path: Path) -> None:
    expected = assemble(pool.run(4, dcp_saves, tmp_path / "c", FOUR, "node=3,cluster=1"))
    found = assemble(pool.run(2, dcp_loads, tmp_path / "c", TWO, "node=1,cluster=0"))
    require_equal(untied(found), untied(expected))


def told_by_torch(mesh: Mesh, strategy: str) -> None:
    """All of torch's options: whole tensors where they are asked for, as a plain model has them, and back."""
    model, optimizer = make(mesh, strategy, build=plain)
    train(model, optimizer, 2)
    whole = [whole_state(state, everywhere=True) for state in get_state_dict(model, optimizer)]
    for offload, unfrozen in ((False, True), (True, False)):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload, ignore_frozen_params=unfrozen)
        found = get_state_dict(model, optimizer, options=options)
        if offload and dist.get_rank():
            assert found == ({}, {})
            continue
        assert not any(isinstance(value, Slice) for value in tree_leaves(found))
        names = found[0].keys()
        assert names == whole[0].keys() - ({"frozen"} if unfrozen else set())
        torch.testing.assert_close(found[0], {name: whole[0][name] for name in names}, rtol=0, atol=0)
        torch.testing.assert_close(found[1]["state"], whole[1]["state"], rtol=0, atol=0)
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        given = copy.deepcopy(whole) if not broadcast or dist.get_rank() == 0 else [{}, {}]
        other, others = make(mesh, strategy, seed=1, build=plain)
        set_model_state_dict(other, given[0], options=options)
        set_optimizer_state_dict(other, others, given[1], options=options)
        here, there = ({row[0]: row[-1] for row in slices(*pair)} for pair in ((other, others), (model, optimizer)))
        torch.testing.assert_close(here, there, rtol=0, atol=0)
    owner = zm.by_owner(torch.optim.AdamW, [*model.parameters()])
    with pytest.raises(
        InputError, match="full_state_dict=True gathers tensors of which every rank has a slice, and an"
    ):
        get_optimizer_state_dict(model, owner, options=StateDictOptions(full_state_dict=True))


def test_state_dict_options(pool: Pool) -> None:
    pool.run(4, told_by_torch, FOUR, "node=3,cluster=1")
