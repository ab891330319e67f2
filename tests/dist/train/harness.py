"""One rank's run of the training loop on a small model, and its outcome."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.dist.pool import kept
from zeromesh.checkpoint.full_state import full_state_dict
from zeromesh.engine.api import engine_of
from zeromesh.errors import ZeromeshError
from zeromesh.launch.ranks import Ranks
from zeromesh.train import loop
from zeromesh.train.config import ModelConfig, TrainConfig
from zeromesh.train.corpus import Rows
from zeromesh.train.sampler import Sampler

Mesh = tuple[tuple[str, int], ...]


class Output(dict[str, Tensor]):
    """As a Hugging Face model's: a mapping with attributes."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


class Tiny(nn.Module):
    """In place of a Hugging Face model, whose library takes longer to import than all of these tests to run."""

    def __init__(self, vocab_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(vocab_size, 8), nn.Dropout(dropout)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, vocab_size)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Output:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + self.dropout(torch.tanh(block(hidden)))
        return Output(logits=self.head(hidden))


def build_tiny(config: ModelConfig, vocab_size: int, *, values: bool = True) -> nn.Module:
    assert isinstance(config.config, dict)
    return Tiny(vocab_size, **config.config)


def write_text(directory: Path, files: int = 6, repeats: int = 8) -> Path:
    text = directory / "text"
    text.mkdir()
    for number in range(files):
        (text / f"{number:02}.txt").write_text(f"line {number} of a text that repeats itself. " * repeats)
    return directory


def ranks_of(config: TrainConfig) -> Ranks:
    """The configured mesh of this pool's ranks, as a launcher's process has it."""
    torch.set_num_threads(1)
    mesh = kept(init_device_mesh, "cpu", tuple(config.mesh.values()), mesh_dim_names=tuple(config.mesh))
    return Ranks(rank=dist.get_rank(), world=dist.get_world_size(), device=torch.device("cpu"), mesh=mesh)


def config(directory: Path, mesh: Mesh, strategy: str, **changes: Any) -> TrainConfig:
    tables: dict[str, Any] = {
        "strategy": strategy,
        "mesh": dict(mesh),
        "run": {"directory": str(directory / "run"), "steps": 8, "seed": 7},
        "model": {"config": {}},
        "data": {"files": [f"{directory}/text/*.txt"], "seq_len": 12, "holdout": 0.0},
        "batch": {"global_sequences": 4, "micro": 2},
        "optimizer": {"lr": 0.02, "warmup_steps": 2},
        "checkpoint": {"every": 3},
        "faults": {},
    }
    for key, value in changes.items():
        table, _, name = key.partition("__")
        if name:
            tables[table][name] = value
        else:
            tables[table] = value
    return TrainConfig.model_validate(tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meddling:
    """Changes that a test makes to a run.

    Args:
        poisoned: samples (indices into the corpus) whose loss is NaN.
        exploding: samples whose gradient is infinite, though their loss is not.
        left_out: steps, counted from 0, that are not run at all.
        batches: by step, the batch it takes; others take their own.
        stop_after: steps after which the last rank is asked to end.
    """

    poisoned: Sequence[int] = ()
    exploding: Sequence[int] = ()
    left_out: Sequence[int] = ()
    batches: dict[int, int] = field(default_factory=dict)
    stop_after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One rank's run.

    Args:
        finished: as `run_training` returns it; None after an error.
        error: its text.
        printed: to stdout.
        samples: by step that was run, the samples of this rank.
        params: the rank's slices at the end, optimizer states after them.
        at_start, at_end: the whole parameters before the first step and after the last, on rank 0.
        counts: of steps that were not finite.
        strategy: that it ran under.
    """

    finished: bool | None
    error: str
    printed: str
    samples: list[list[int]]
    params: dict[str, Tensor]
    at_start: dict[str, Tensor]
    at_end: dict[str, Tensor]
    counts: dict[str, int]
    strategy: str


def train(config: TrainConfig, meddling: Meddling = Meddling()) -> Outcome:
    """One rank's run."""
    ranks = ranks_of(config)
    trainers: list[Any] = []

    class Meddled(loop.Trainer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            trainers.append(self)
            self.samples: list[list[int]] = []
            self.at_start: dict[str, Tensor] = {}

        def step(self, step: int) -> loop.StepOutcome:
            if not self.samples:
                self.at_start = full_state_dict(self.model)
            self.samples.append([])
            if meddling.stop_after is not None and step + 1 == meddling.stop_after:
                with mock.patch.object(loop, "asked_by", lambda: int(ranks.rank == ranks.world - 1)):
                    return super().step(step)
            if step in meddling.left_out:
                return loop.StepOutcome(loss=0.0, grad_norm=0.0)
            return super().step(step)

        def _forward_backward(self, batch: int) -> Any:
            return super()._forward_backward(meddling.batches.get(batch, batch))

        def _loss(self, rows: Rows, indices: list[int]) -> Tensor:
            loss = super()._loss(rows, indices)
            self.samples[-1] += indices
            seen = set(indices or [0])
            if seen & set(meddling.poisoned):
                loss = loss * float("nan")
            if seen & set(meddling.exploding):
                loss.register_hook(lambda grad: grad * float("inf"))
            return loss

    printed = io.StringIO()
    finished, error = None, ""
    with (
        mock.patch.multiple(loop, Trainer=Meddled, build_language_model=build_tiny),
        contextlib.redirect_stdout(printed),
    ):
        try:
            finished = loop.run_training(config, ranks)
        except ZeromeshError as raised:
            error = f"{type(raised).__name__}: {raised}"
    trainer = trainers[-1]
    params = {p.full_name: p.local.clone() for p in engine_of(trainer.model).optimizer_params()}
    states = {
        f"{key} of {param.full_name}": value.clone()
        for param, values in trainer.optimizer.state.items()
        for key, value in values.items()
    }
    return Outcome(
        finished=finished,
        error=error,
        printed=printed.getvalue(),
        samples=trainer.samples,
        params=params | states,
        at_start=trainer.at_start,
        at_end={} if error else full_state_dict(trainer.model),
        counts=trainer.counts.state(),
        strategy=trainer.config.strategy,
    )


def train_plainly(
    model: nn.Module, rows: Rows, sequences: int, learning_rates: Sequence[float]
) -> list[tuple[float, float]]:
    """Losses and norms: the whole global batch at once, with torch's own optimizer and clipping."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2]},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    found = []
    for step, lr in enumerate(learning_rates):
        for group in optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = rows.batch(global_batch(len(rows), sequences, step))
        loss = nn.functional.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def global_batch(samples: int, sequences: int, step: int) -> list[int]:
    """All samples of a step of these configurations."""
    order = Sampler(num_samples=samples, global_sequences=sequences, micro=sequences, world=1, seed=7)
    return next(order.rank_batches(step, 0))


def lines(config: TrainConfig) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (config.run.directory / "metrics.jsonl").read_text().splitlines()]


def checkpoints(config: TrainConfig) -> list[str]:
    return sorted(path.name for path in (config.run.directory / "checkpoints").glob("step-*"))


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """To the bit."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
