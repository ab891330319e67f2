"""A rank of `zeromesh train` on the virtual device: the run's own model, optimizer and steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from zeromesh.launch.ranks import Ranks
from zeromesh.rehearsal.result import Rehearsal
from zeromesh.rehearsal.steps import Stage
from zeromesh.rehearsal.virtual import virtual_rank
from zeromesh.train.config import AUTO, TrainConfig
from zeromesh.train.corpus import read_corpus
from zeromesh.train.loop import build_language_model, make_trainer, plan_run


def rehearse_rank(_store_file: Path | None, *, config: str, rank: int) -> dict[str, Any]:
    """The task of a process that rehearses one rank. Returns the rehearsal as JSON values."""
    found = rehearse_training(TrainConfig.model_validate_json(config), rank)
    dumped: dict[str, Any] = TypeAdapter(Rehearsal).dump_python(found, mode="json")
    return dumped


def rehearse_training(config: TrainConfig, rank: int) -> Rehearsal:
    """Rehearses the steps of a run on one of its ranks. Raises InputError if the configuration is wrong, or the virtual
    device is not available."""
    corpus = read_corpus(config)
    with torch.device("meta"):
        model = build_language_model(config.model, corpus.tokenizer.vocab_size, values=False)
    if config.strategy == AUTO:
        config = config.model_copy(update={"strategy": str(plan_run(config, model).strategy)})
    with virtual_rank(config.mesh, rank) as mesh:
        stage = Stage(config.hardware() if config.cluster else None)
        device = torch.device(mesh.device_type, 0)
        ranks = Ranks(rank=rank, world=config.world, device=device, mesh=mesh)
        stage.places.go("shard")
        trainer = make_trainer(config, ranks, corpus, model)
        return stage.take(lambda: trainer.step(0), trainer.model, trainer.optimizer, rank=rank)
