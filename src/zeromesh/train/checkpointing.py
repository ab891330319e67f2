"""Between the training loop and what saves and loads its state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from zeromesh.checkpoint.directory import list_checkpoints
from zeromesh.checkpoint.storage import open_storage
from zeromesh.engine.api import engine_of
from zeromesh.engine.checkpoint import Checkpoints, Restored
from zeromesh.errors import CheckpointError
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
        CheckpointError: the run's directory cannot be written, or another job saves to it.
    """
    saves = config.checkpoint.every > 0
    directory = config.run.directory / "checkpoints"
    found = config.checkpoint.resume == "auto" and _any_checkpoint(str(directory), model)
    if not saves and not found and config.checkpoint.resume in ("auto", "never"):
        return None
    checkpoints = Checkpoints(
        directory, model, optimizer, keep=config.checkpoint.keep, keep_every=config.checkpoint.keep_every
    )
    checkpoints.open()
    return RunCheckpoints(config, ranks, checkpoints)


def _any_checkpoint(directory: str, model: nn.Module) -> bool:
    """Whether rank 0 sees one, damaged ones included: a run that cannot go on must not start anew unasked."""
    control = engine_of(model).control
    seen = ""
    if control.rank == 0:
        try:
            listing = list_checkpoints(open_storage(directory))
            seen = "yes" if listing.complete or listing.refused else ""
        except OSError:
            seen = "yes"  # opening it reports why
    return control.say(seen) == "yes"


class RunCheckpoints:
    """The checkpoints in a run's directory.

    Args:
        config: of the run.
        ranks: this rank among the others.
        checkpoints: opened.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, checkpoints: Checkpoints) -> None:
        self._config = config
        self._ranks = ranks
        self._checkpoints = checkpoints

    def resume(self) -> int:
        which = self._config.checkpoint.resume
        if which == "never":
            return 0
        # The configuration is the truth about learning rate and decay, also where it was edited since.
        found = self._checkpoints.load(which, optimizer_options=False)
        if found is None:
            return 0
        self._warn_of_changes(found)
        if self._ranks.rank == 0:
            print(f"resumed from {found.where} after step {found.step}", flush=True)
        return found.step

    def step_done(self, step: int) -> None:
        every, last = self._config.checkpoint.every, step == self._config.run.steps
        if every and (step % every == 0 or last):
            self._save(step)

    def save_now(self, step: int) -> None:
        self._save(step)
        self._checkpoints.wait()

    def close(self) -> None:
        self._checkpoints.close()

    def _save(self, step: int) -> None:
        try:
            self._checkpoints.wait()
        except CheckpointError as error:
            # Training is worth more than one checkpoint; the last one of a run raises.
            if self._ranks.rank == 0:
                warnings.warn(f"{error}; training goes on, and saves again after step {step}", stacklevel=2)
        self._checkpoints.save(step, {"data": self._data()})

    def _data(self) -> dict[str, Any]:
        """What decides which sample comes at which step."""
        config = self._config
        return {
            "run.seed": config.run.seed,
            "data.seq_len": config.data.seq_len,
            "data.tokenizer": config.data.tokenizer,
            "batch.global_sequences": config.batch.global_sequences,
        }

    def _warn_of_changes(self, found: Restored) -> None:
        saved: Mapping[str, Any] = found.state.get("data", {})
        changed = [f"{k} was {saved[k]!r}, is {v!r}" for k, v in self._data().items() if k in saved and saved[k] != v]
        if changed and self._ranks.rank == 0:
            warnings.warn(
                f"{found.where} was saved by a run with other data, so samples will repeat or be left out: "
                + "; ".join(changed),
                stacklevel=2,
            )
        if not found.has_optimizer and self._ranks.rank == 0:
            warnings.warn(f"{found.where} has no optimizer states: the optimizer starts anew", stacklevel=2)
