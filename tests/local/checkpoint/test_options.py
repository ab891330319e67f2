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
