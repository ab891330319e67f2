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


def test_some_of_a_state_dict() -> None:
    model = zm.shard(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), None, "node=3")
    names = {"1.running_mean", "0.bias", "unknown"}
    found, whole = zm.full_state_dict(model, names=names), zm.full_state_dict(model)
    assert list(found) == ["0.bias", "1.running_mean"]
    assert all(torch.equal(value, whole[name]) for name, value in found.items())
