"""Checkpoints of `zeromesh train`: resumed equals uninterrupted, and what a damaged or foreign directory leads to."""

from __future__ import annotations

import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.dist.pool import Pool, kept
from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.engine.api import engine_of
from zeromesh.errors import CheckpointError
from zeromesh.launch.ranks import Ranks
from zeromesh.train import loop
from zeromesh.train.config import ModelConfig, TrainConfig

Mesh = tuple[tuple[str, int], ...]
TWO: Mesh = (("cluster", 1), ("node", 2))
FOUR: Mesh = (("cluster", 2), ("node", 2))
THREE: Mesh = (("cluster", 3), ("node", 1))


def config(directory: Path, mesh: Mesh, strategy: str, **changes: Any) -> TrainConfig:
    tables: dict[str, Any] = {
        "strategy": strategy,
        "mesh": dict(mesh),
        "run": {"directory": str(directory / "run"), "steps": 40, "seed": 7},
        "model": {"config": {"layers": 2, "dropout": 0.1}},
        "data": {"files": [f"{directory}/text/*.txt"], "seq_len": 12, "holdout": 0.0},
        "batch": {"global_sequences": 5, "micro": 2},
        "optimizer": {"lr": 0.02, "warmup_steps": 2},
        "checkpoint": {"every": 10},
    }
    for key, value in changes.items():
        table, _, name = key.partition("__")
        tables[table][name] = value
    return TrainConfig.model_validate(tables)


class Tiny(nn.Module):
    """In place of a Hugging Face model, whose library takes longer to import than all of these tests to run."""

    def __init__(self, layers: int, dropout: float, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + self.dropout(torch.tanh(block(hidden)))
        return SimpleNamespace(logits=self.head(hidden))


def build_tiny(config: ModelConfig, vocab_size: int, *, values: bool = True) -> nn.Module:
    assert isinstance(config.config, dict)
    return Tiny(**config.config, vocab_size=vocab_size)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text(f"line {number} of a text that repeats itself. " * 8)
    return tmp_path


def train(config: TrainConfig, stop_after: int | None = None) -> tuple[bool, Any]:
    """One rank's run, asked to end after some step; whether it finished, and what it holds at the end."""
    torch.set_num_threads(1)
    mesh = kept(init_device_mesh, "cpu", tuple(config.mesh.values()), mesh_dim_names=tuple(config.mesh))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    ranks = Ranks(rank=rank, world=world, device=device, mesh=mesh)
    trainers: list[loop.Trainer] = []

    class Watched(loop.Trainer):
        def step(self, step: int) -> loop.StepOutcome:
            trainers[:] = [self]
            if stop_after is not None and step + 1 == stop_after:
                self._stop_asked = rank == world - 1  # as the signal's handler does, on one rank
            return super().step(step)

    with mock.patch.multiple(loop, Trainer=Watched, build_language_model=build_tiny):
        finished = loop.run_training(config, ranks)
    if not trainers:
        return finished, None
    engine, optimizer = engine_of(trainers[0].model), trainers[0].optimizer
    params = {p.full_name: p.local.clone() for p in engine.optimizer_params()}
    states = {
        f"{param.full_name}/{key}": value.clone()  # type: ignore[attr-defined]  # a ShardedParameter
        for param, values in optimizer.state.items()
        for key, value in values.items()
    }
    return finished, (params, states)


def losses(config: TrainConfig) -> list[float]:
    return [json.loads(line)["loss"] for line in (config.run.directory / "metrics.jsonl").read_text().splitlines()]


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "run" / "checkpoints").iterdir() if path.name != ".lock")


def test_20_and_20_steps_are_40(pool: Pool, directory: Path) -> None:
    """With dropout, warm-up, decay and a global batch that does not divide; ended as SIGTERM ends it."""
    whole = config(directory, TWO, "node=3,cluster=0")
    uninterrupted = pool.run(2, train, whole)
    expected = losses(whole)
    shutil.rmtree(directory / "run")
    first = pool.run(2, train, whole, stop_after=20)
    assert [finished for finished, _ in first] == [False, False]
    assert steps_in(directory) == ["step-00000010", "step-00000020"]
    assert len(losses(whole)) == 20
    second = pool.run(2, train, whole)
    assert losses(whole) == expected
    for (finished, (params, states)), (_, (wanted, wanted_states)) in zip(second, uninterrupted, strict=True):
        assert finished
        assert all(torch.equal(params[name], wanted[name]) for name in wanted)
        assert sorted(states) == sorted(wanted_states)
        assert all(torch.equal(states[name], wanted_states[name]) for name in wanted_states)
    assert steps_in(directory) == ["step-00000030", "step-00000040"]


def test_goes_on_under_another_strategy_and_world(pool: Pool, directory: Path) -> None:
    """In fp64, without dropout (its masks depend on the number of ranks)."""
    fp64 = {"param": "fp64", "reduce": "fp64", "grad": "fp64", "master": "fp64"}

    def plain(mesh: Mesh, strategy: str) -> TrainConfig:
        made = config(directory, mesh, strategy, run__steps=8, checkpoint__every=4)
        document = made.model_dump(mode="json")
        document["model"]["config"]["dropout"] = 0.0
        document["dtypes"] = fp64
        return TrainConfig.model_validate(document)

    pool.run(2, train, plain(TWO, "node=3,cluster=0"))
    expected = losses(plain(TWO, "node=3,cluster=0"))
    for mesh, strategy in [(FOUR, "node=3,cluster=1"), (THREE, "node=0,cluster=2")]:
        shutil.rmtree(directory / "run")
        pool.run(2, train, plain(TWO, "node=3,cluster=0"), stop_after=4)
        other = plain(mesh, strategy)
        assert all(finished for finished, _ in pool.run(other.world, train, other))
        assert losses(other) == pytest.approx(expected, rel=1e-6)


def outcome(config: TrainConfig) -> tuple[list[str], str]:
    """One rank's warnings, and its error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(config)
            error = ""
        except CheckpointError as refusal:
            error = str(refusal)
    return [str(warning.message) for warning in caught], error


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(pool: Pool, directory: Path) -> None:
    run = config(directory, TWO, "node=3,cluster=0", run__steps=6, checkpoint__every=3)
    pool.run(2, train, run)
    expected = losses(run)
    newest = directory / "run/checkpoints/step-00000006"
    data = bytearray((newest / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "__1_0.distcp").write_bytes(data)
    longer = config(directory, TWO, "node=3,cluster=0", run__steps=6, checkpoint__every=3)
    (told, error), (others, _) = pool.run(2, outcome, longer)
    assert error == "" and others == []
    assert len(told) == 1 and "__1_0.distcp is damaged" in told[0] and "CRC-32" in told[0]
    assert losses(run) == expected
    assert "step-00000006.1" in steps_in(directory)


def test_when_all_are_damaged_the_run_does_not_start_anew(pool: Pool, directory: Path) -> None:
    run = config(directory, TWO, "node=3,cluster=0", run__steps=2, checkpoint__every=1)
    pool.run(2, train, run)
    for path in (directory / "run/checkpoints").glob("step-*"):
        (path / "__0_0.distcp").unlink()
    for _, error in pool.run(2, outcome, run):
        assert "has checkpoints, but none that can be loaded" in error
        assert "__0_0.distcp cannot be read: No such file or directory" in error


def test_another_models_checkpoint_says_what_differs(pool: Pool, directory: Path) -> None:
    run = config(directory, TWO, "node=3,cluster=0", run__steps=1, checkpoint__every=1)
    pool.run(2, train, run)
    document = run.model_dump(mode="json")
    document["model"]["config"]["layers"] = 1
    for _, error in pool.run(2, outcome, TrainConfig.model_validate(document)):
        assert "is a checkpoint of another model" in error
        assert "blocks.1.weight: in the checkpoint, not in the model" in error


def impatient(config: TrainConfig) -> tuple[list[str], str]:
    """`outcome` without waiting for the other job to end."""
    with mock.patch.object(loop, "Checkpoints", partial(Checkpoints, lock_wait_s=0.0)):
        return outcome(config)


def test_two_jobs_on_one_directory(pool: Pool, directory: Path) -> None:
    from zeromesh.checkpoint.storage import LocalStorage

    run = config(directory, TWO, "node=3,cluster=0", run__steps=1, checkpoint__every=1)
    other = LocalStorage(directory / "run" / "checkpoints")
    other.lock(0)
    (_, error), (_, same) = pool.run(2, impatient, run)
    other.unlock()
    assert "is being written by another job (process " in error and same == error
