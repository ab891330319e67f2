"""What `zm.Checkpoints` is given that cannot be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zeromesh as zm
from zeromesh.errors import CheckpointError


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": -1}, {"keep_every": -2}])
def test_retention_that_would_keep_nothing(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match="keep must be 1 or more and keep_every 0 or more; got keep="):
        zm.Checkpoints(tmp_path, zm.shard(torch.nn.Linear(2, 2), None, "node=3"), **options)


def test_a_step_is_a_whole_number(tmp_path: Path) -> None:
    wrong: tuple[Any, ...] = (20.0, -1, "3", None)
    with zm.Checkpoints(tmp_path, zm.shard(torch.nn.Linear(2, 2), None, "node=3")) as checkpoints:
        for step in wrong:
            with pytest.raises(CheckpointError, match=r"step must be a whole number .*; got "):
                checkpoints.save(step)
        assert list(tmp_path.iterdir()) == []
        checkpoints.save(np.int64(20))
        assert checkpoints.wait() == str(tmp_path / "step-00000020")
        found = checkpoints.load("auto")
    assert found is not None and found.step == 20


def test_the_model_alone_is_loaded_and_the_optimizer_left_as_it_is(tmp_path: Path) -> None:
    model = zm.shard(torch.nn.Linear(2, 2), None, "node=3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with zm.Checkpoints(tmp_path, model, optimizer) as checkpoints:
        saved = zm.full_state_dict(model)
        checkpoints.save(0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        states = [state["exp_avg"].clone() for state in optimizer.state.values()]
        optimizer.param_groups[0]["lr"] = 0.25
        assert checkpoints.load("auto", optimizers=False) is not None
    for name, value in zm.full_state_dict(model).items():
        assert torch.equal(value, saved[name])
    left = [state["exp_avg"] for state in optimizer.state.values()]
    assert len(left) == 2 and all(map(torch.equal, left, states)) and optimizer.param_groups[0]["lr"] == 0.25


OTHERS: dict[str, Any] = {
    "SGD": lambda params: [torch.optim.SGD(params, lr=0.5, momentum=0.9)],
    "Adam": lambda params: [torch.optim.Adam(params, lr=0.5)],  # AdamW is a kind of it
    "Muon": lambda params: [zm.by_owner(torch.optim.Muon, params[:1], lr=0.5), torch.optim.AdamW(params[1:], lr=0.5)],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_class_of_optimizer_is_refused_and_nothing_changed(tmp_path: Path, kind: str) -> None:
    save_trained(zm.shard(torch.nn.Linear(2, 2), None, "node=3"), tmp_path)
    model = zm.shard(torch.nn.Linear(2, 2), None, "node=3")
    optimizers, before = OTHERS[kind]([*model.parameters()]), zm.full_state_dict(model)
    match = f"was saved with AdamW for weight, and here {kind} steps on it: make optimizers of the classes"
    with zm.Checkpoints(tmp_path, model, optimizers) as checkpoints, pytest.raises(CheckpointError, match=match):
        checkpoints.load()
    assert all(torch.equal(value, before[name]) for name, value in zm.full_state_dict(model).items())
    assert [one.param_groups[0]["lr"] for one in optimizers] == [0.5] * len(optimizers) and not optimizers[0].state


def save_trained(model: torch.nn.Module, path: Path) -> torch.optim.Optimizer:
    """After a step, at a rate that is no default."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    with zm.Checkpoints(path, model, optimizer) as checkpoints:
        checkpoints.save(1)
    return optimizer


def test_states_of_what_stays_trained_are_kept(tmp_path: Path) -> None:
    model = zm.shard(torch.nn.Linear(2, 2), None, "node=3")
    optimizer = save_trained(model, tmp_path)
    again = torch.nn.Linear(2, 2)
    again.weight.requires_grad_(False)
    zm.shard(again, None, "node=3")
    other = torch.optim.AdamW([again.bias])
    with zm.Checkpoints(tmp_path, again, other) as checkpoints:
        assert checkpoints.load() is not None
    assert other.param_groups[0]["lr"] == 0.25 and list(other.state) == [again.bias]
    assert all(torch.equal(other.state[again.bias][k], v) for k, v in optimizer.state[model.bias].items())
    assert all(map(torch.equal, zm.full_state_dict(again).values(), zm.full_state_dict(model).values()))


def test_some_of_a_state_dict() -> None:
    model = zm.shard(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), None, "node=3")
    names = {"1.running_mean", "0.bias", "unknown"}
    found, whole = zm.full_state_dict(model, names=names), zm.full_state_dict(model)
    assert list(found) == ["0.bias", "1.running_mean"]
    assert all(torch.equal(value, whole[name]) for name, value in found.items())
