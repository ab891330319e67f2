"""Optimizers on whole tensors resume under another strategy, world and ownership, on slices, and in plain torch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import zeromesh as zm
from tests.dist.owners.optimizers import LAMB
from tests.dist.owners.test_parity import (
    ALL,
    KINDS,
    all_kinds,
    backward,
    groups_of,
    in_one_process,
    many,
    net,
    optimizers_of,
    owned_kind,
    shard,
)
from tests.dist.parity import close, same_params
from tests.dist.pool import Pool, told_by_first

RANKS = 4
SAVED, LAST = 1, 2


def owned(kind: str) -> Any:
    return lambda groups, **options: zm.by_owner(KINDS[kind][0], groups, bucket_bytes=400, **options)


def steps(model: nn.Module, optimizers: list[optim.Optimizer], first: int, stop: int) -> None:
    for step in range(first, stop):
        backward(model, step, RANKS)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def make(
    kind: str, sizes: tuple[int, ...], strategy: str, slices: bool, base: nn.Module
) -> tuple[nn.Module, list[Any]]:
    model = shard(base, sizes, strategy)
    if kind == ALL:
        return model, [*all_kinds(model, owned_kind).values()]
    return model, optimizers_of(kind, model, KINDS[kind][0] if slices else owned(kind))


def save(path: Path, kind: str = ALL, *, slices: bool = False) -> None:
    base = many() if kind == ALL else net()
    model, optimizers = make(kind, (2, 2), "node=3,cluster=1", slices, base)
    steps(model, optimizers, 0, SAVED)
    with zm.Checkpoints(path, model, optimizers) as checkpoints:
        checkpoints.save(SAVED)


def resume(path: Path, sizes: tuple[int, ...], strategy: str, kind: str = ALL, *, slices: bool = False) -> None:
    base = many() if kind == ALL else net()
    for param in base.parameters():
        param.data.fill_(3.0)
    model, optimizers = make(kind, sizes, strategy, slices, base)
    for optimizer in optimizers if kind != ALL else ():
        optimizer.param_groups[0]["lr"] = 7.0  # the checkpoint's counts
    steps(model, optimizers, 0, 1)  # states of another run are there already, and values at their owners
    with zm.Checkpoints(path, model, optimizers) as checkpoints:
        assert checkpoints.load() is not None
    steps(model, optimizers, SAVED, LAST)
    same_params(model, told_by_first(in_one_process_at_the_end, kind, LAST))


def in_one_process_at_the_end(kind: str, steps: int) -> nn.Module:
    return in_one_process(kind, RANKS, steps).params[-1]


def test_all_kinds_resume_anywhere(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, save, tmp_path)
    pool.run(2, resume, tmp_path, (2,), "node=3")
    pool.run(4, resume, tmp_path, (2, 2), "node=0,cluster=2")


def test_adamw_goes_from_owners_to_slices_and_back(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, save, tmp_path / "owners", "AdamW")
    pool.run(4, resume, tmp_path / "owners", (4,), "node=2", "AdamW", slices=True)
    pool.run(4, save, tmp_path / "slices", "AdamW", slices=True)
    pool.run(2, resume, tmp_path / "slices", (2,), "node=1", "AdamW")


def test_plain_torch_goes_on(pool: Pool, tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` reads it in one process that knows nothing of zeromesh."""
    pool.run(4, save, tmp_path, "LAMB")
    expected = in_one_process("LAMB", RANKS, SAVED)
    model = net()
    for param in model.parameters():
        param.data.zero_()
    optimizer = LAMB(groups_of(model, matrices=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        some = StateDictOptions(strict=False)  # parameters without gradients have no states
        for name in ("blocks.0.unused.weight", "blocks.0.unused.bias"):
            state["optim"]["state"].pop(name, None)
        for group in state["optim"]["param_groups"]:
            group["step"] = 0
        dcp.load(state, checkpoint_id=tmp_path / f"step-{SAVED:08d}", no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=some)
    for (name, ours), theirs in zip(model.named_parameters(), expected.params[-1].parameters(), strict=True):
        close(ours, theirs, name)
        for key, value in expected.optimizers["LAMB"].state.get(theirs, {}).items():
            close(optimizer.state[ours][key], value, f"{key} of {name}")
    assert [group["step"] for group in optimizer.param_groups] == [SAVED, SAVED]


def state_dicts() -> None:
    model = shard(net(), (2, 2), "node=3,cluster=1")
    first = optimizers_of("Muon", model, owned("Muon"))
    steps(model, first, 0, SAVED)
    saved = [optimizer.state_dict() for optimizer in first]
    second = optimizers_of("Muon", model, owned("Muon"))
    for optimizer, state in zip(second, saved, strict=True):
        optimizer.load_state_dict(state)
    steps(model, second, SAVED, LAST)
    same_params(model, told_by_first(in_one_process_at_the_end, "Muon", LAST))


def test_state_dict_holds_what_this_rank_owns(pool: Pool) -> None:
    pool.run(4, state_dicts)


def plain_states_come() -> None:
    """A plain optimizer's state dict, whole on every rank."""
    expected = in_one_process("LAMB", RANKS, SAVED)
    model = shard(expected.params[-1], (2, 2), "node=3,cluster=1")
    optimizers = optimizers_of("LAMB", model, owned("LAMB"))
    optimizers[0].load_state_dict(expected.optimizers["LAMB"].state_dict())
    steps(model, optimizers, SAVED, LAST)
    same_params(model, told_by_first(in_one_process_at_the_end, "LAMB", LAST))
    assert all(torch.is_tensor(value) for state in optimizers[0].state.values() for value in state.values())
    assert dist.get_world_size() == RANKS


def test_a_plain_optimizers_state_dict_is_taken(pool: Pool) -> None:
    pool.run(4, plain_states_come)
