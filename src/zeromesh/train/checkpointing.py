"""The seam between the training loop and what saves and loads its state."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from zeromesh.errors import ConfigError
from zeromesh.train.config import TrainConfig
from zeromesh.train.ranks import Ranks


class Checkpointer(Protocol):
    """Saves and restores a run. Every method is collective: all ranks call it at the same step.

    The data's order needs no state: it follows from the seed and the step.
    """

    def resume(self) -> int:
        """Load what `checkpoint.resume` names into model and optimizer; the number of steps done, 0 for a new run."""
        ...

    def step_done(self, step: int) -> None:
        """Called after every step; saves where `checkpoint.every` says so. May go on writing in the background."""
        ...

    def save_now(self, step: int) -> None:
        """Save and return only when the checkpoint is complete: the run is about to be ended from outside."""
        ...

    def close(self) -> None:
        """Wait for what is still being written."""
        ...


def make_checkpointer(
    config: TrainConfig, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Checkpointer | None:
    """What the configuration asks for; None where nothing is to be saved or loaded.

    Raises:
        ConfigError: checkpoints are asked for, which this version does not have.
    """
    if config.checkpoint.every == 0 and config.checkpoint.resume in ("auto", "never"):
        return None
    raise ConfigError(
        "checkpoint.every and a path in checkpoint.resume need checkpoints, which this version cannot write or read;"
        ' set checkpoint.every = 0 and checkpoint.resume = "auto"'
    )
