"""Checkpoints of `zeromesh train`: resumed equals uninterrupted; one job at a time has a directory."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.dist.pool import Pool
from tests.dist.train.harness import Meddling, Mesh, checkpoints, equal, lines, train, write_text
from tests.dist.train.harness import config as base_config
from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.checkpoint.storage import LocalStorage
from zeromesh.train import loop
from zeromesh.train.config import TrainConfig

TWO: Mesh = (("cluster", 1), ("node", 2))


def config(directory: Path, mesh: Mesh = TWO, strategy: str = "node=3,cluster=0", **changes: Any) -> TrainConfig:
    own = {"batch__global_sequences": 5, "checkpoint__every": 2}
    return base_config(directory, mesh, strategy, **own | changes)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_text(tmp_path)


def losses(config: TrainConfig) -> list[float]:
    return [line["loss"] for line in lines(config)]


def test_half_and_half_are_the_whole(pool: Pool, directory: Path) -> None:
    """With dropout, warm-up, decay and a global batch that does not divide; ended as SIGTERM ends it."""
    whole = config(directory, model={"config": {"dropout": 0.1}})
    uninterrupted = pool.run(2, train, whole)
    expected = losses(whole)
    shutil.rmtree(directory / "run")
    assert [outcome.finished for outcome in pool.run(2, train, whole, Meddling(stop_after=4))] == [False, False]
    assert checkpoints(whole) == ["step-00000002", "step-00000004"] and len(losses(whole)) == 4
    second = pool.run(2, train, whole)
    assert losses(whole) == expected
    for outcome, wanted in zip(second, uninterrupted, strict=True):
        assert outcome.finished and equal(outcome.params, wanted.params)
    assert checkpoints(whole) == ["step-00000006", "step-00000008"]


def impatient(config: TrainConfig) -> str:
    """The error of a run that does not wait for the other job to end."""
    with mock.patch.object(loop, "Checkpoints", partial(Checkpoints, lock_wait_s=0.0)):
        return train(config).error


def test_two_jobs_on_one_directory(pool: Pool, directory: Path) -> None:
    run = config(directory, run__steps=1)
    other = LocalStorage(directory / "run" / "checkpoints")
    other.lock(0)
    error, same = pool.run(2, impatient, run)
    other.unlock()
    assert "is being written by another job (process " in error and same == error
