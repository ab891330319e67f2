"""Between the training loop and what saves and loads its state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from zeromesh.checkpoint.checkpoints import Checkpoints, Restored
from zeromesh.checkpoint.directory import list_checkpoints
from zeromesh.checkpoint.storage import open_storage
from zeromesh.errors import CheckpointError
from zeromesh.launch.ranks import Ranks, collective, from_first, on_any
from zeromesh.train.config import TrainConfig
from zeromesh.train.corpus import TOKENIZER, Corpus
from zeromesh.train.nonfinite import NonFinite
from zeromesh.train.resize import mesh_text

LOOKING = "waiting for rank 0 to look for checkpoints"


class Checkpointer(Protocol):
    """Saves and restores a run. Every method but `due` is collective: all ranks call it at the same step.

    The data's order needs no state but what `NonFinite` counts: it follows from the seed and the step.
    """

    def resume(self) -> int:
        """Load what `checkpoint.resume` names into model and optimizer; the number of steps done, 0 for a new run."""
        ...

    def due(self, step: int) -> bool:
        """Whether `checkpoint.every` says that the state after `step` steps is to be saved."""
        ...

    def save(self, step: int) -> None:
        """Save; may go on writing in the background."""
        ...

    def save_now(self, step: int) -> None:
        """Save and return only when the checkpoint is complete: the run is about to be ended from outside."""
        ...

    def roll_back(self) -> int | None:
        """Load the newest checkpoint of this run again; its number of steps done, None where there is none yet."""
        ...

    def close(self) -> None:
        """Wait for what is still being written."""
        ...


def make_checkpointer(
    config: TrainConfig,
    ranks: Ranks,
    corpus: Corpus,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    counts: NonFinite,
) -> Checkpointer | None:
    """What the configuration asks for; None where nothing is to be saved or loaded.

    Args:
        config: of the run.
        ranks: this rank among the others.
        corpus: what is trained on.
        model: sharded.
        optimizer: of the model's sharded parameters.
        counts: saved and loaded too.
    """
    saves = config.checkpoint.every > 0
    directory = config.run.directory / "checkpoints"
    found = config.checkpoint.resume == "auto" and from_first(lambda: _newest_serial(directory), LOOKING) != 0
    if not saves and not found and config.checkpoint.resume in ("auto", "never"):
        return None
    checkpoints = Checkpoints(
        directory,
        model,
        optimizer,
        keep=config.checkpoint.keep,
        keep_every=config.checkpoint.keep_every,
        frozen=config.model.pretrained is None,  # else a resume takes what is frozen from there
    )
    return RunCheckpoints(config, ranks, corpus, checkpoints, counts)


def _newest_serial(directory: Path) -> int:
    """Serial of the newest complete checkpoint, 0 where there has never been one.

    -1 where there are only damaged ones, or the directory cannot be read: a run that cannot go on must not start anew
    unasked, and loading says why.
    """
    try:
        listing = list_checkpoints(open_storage(str(directory)))
    except OSError:
        return -1
    return listing.next_serial - 1 or (-1 if listing.refused else 0)


class RunCheckpoints:
    """The checkpoints in a run's directory.

    Args:
        config: of the run.
        ranks: this rank among the others.
        corpus: what is trained on.
        checkpoints: not opened yet.
        counts: saved and loaded too.
    """

    def __init__(
        self, config: TrainConfig, ranks: Ranks, corpus: Corpus, checkpoints: Checkpoints, counts: NonFinite
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._corpus = corpus
        self._checkpoints = checkpoints
        self._counts = counts
        self._last: str | None = None  # what to go back to
        self._since = 0  # checkpoints up to this serial are other runs'

    def resume(self) -> int:
        which = self._config.checkpoint.resume
        with collective("opening and loading checkpoints"):
            started_after = 0 if which == "auto" else self._started_after()
            if started_after is not None:
                self._since = started_after
                self._checkpoints.open()
                return self._load("auto")
            # Before anything is made: where it is refused, nothing has changed.
            done = 0 if which == "never" else self._load(which)
            self._checkpoints.open()
            self._since = self._note_start()
            return done

    def due(self, step: int) -> bool:
        every, last = self._config.checkpoint.every, step == self._config.run.steps
        return every > 0 and (step % every == 0 or last)

    def save(self, step: int) -> None:
        with collective(f"saving the checkpoint of step {step}"):
            self._settle(f"training goes on, and saves again after step {step}")
            state = {"data": self._data(), "run": self._layout(), "faults": self._counts.state()}
            self._checkpoints.save(step, state)

    def save_now(self, step: int) -> None:
        self.save(step)
        with collective(f"saving the checkpoint of step {step}"):
            self._checkpoints.wait()

    def roll_back(self) -> int | None:
        with collective("loading the newest checkpoint"):
            self._settle("the one before is used")
            if self._last is None:
                return None
            # Random states too: the steps that follow are then those of a run that was resumed from there.
            found = self._checkpoints.load(self._last, since=self._since, optimizer_options=False)
            return None if found is None else found.step

    def close(self) -> None:
        with collective("saving the last checkpoint"):
            self._checkpoints.close()

    def _load(self, which: str) -> int:
        # The configuration is the truth about learning rate and decay, also where it was edited since.
        found = self._checkpoints.load(which, since=self._since, optimizer_options=False)
        if found is None:
            return 0
        self._last = which
        self._counts.restore(found.state.get("faults", {}))
        self._require_tokenizer(found)
        self._warn_of_changes(found)
        if self._ranks.rank == 0:
            print(f"resumed from {found.where} after step {found.step}{self._change_of_layout(found)}", flush=True)
        return found.step

    def _started_after(self) -> int | None:
        """The newest serial at this run's first start, where it has saved since then and is started again; else None.

        The first start notes it under the job's name; later ones compare.
        """
        # On a node that came later, the launcher has counted nothing.
        again = on_any(self._ranks.again, "agreeing whether the run was started before")

        def compare() -> int | None:
            try:
                job, _, noted = self._note.read_text().rpartition(" ")
                serial = int(noted)
            except (OSError, ValueError):
                return None
            ours = again and job == self._ranks.job and _newest_serial(self._note.parent) > serial
            return serial if ours else None

        return from_first(compare, LOOKING)

    def _note_start(self) -> int:
        def note() -> int:
            newest, temporary = _newest_serial(self._note.parent), self._note.with_suffix(".writing")
            temporary.write_text(f"{self._ranks.job} {newest}")
            temporary.replace(self._note)
            return newest

        return from_first(note, "noting the start of the run")

    @property
    def _note(self) -> Path:
        return self._config.run.directory / "checkpoints" / ".job"

    def _settle(self, consequence: str) -> None:
        """Waits for the save before. Training is worth more than one checkpoint; the last one of a run raises."""
        try:
            if self._checkpoints.wait():
                self._last = "auto"
        except CheckpointError as error:
            if self._ranks.rank == 0:
                warnings.warn(f"{error}; {consequence}", stacklevel=3)

    def _data(self) -> dict[str, Any]:
        """What decides which sample comes at which step."""
        config = self._config
        return {
            "run.seed": config.run.seed,
            "data.seq_len": config.data.seq_len,
            "batch.global_sequences": config.batch.global_sequences,
            **self._corpus.identity(),
        }

    def _layout(self) -> dict[str, str]:
        return {"strategy": self._config.strategy, "mesh": mesh_text(self._config.mesh)}

    def _change_of_layout(self, found: Restored) -> str:
        saved, now = found.state.get("run", {}), self._layout()
        if not saved or saved == now:
            return ""
        before = f"strategy {saved.get('strategy')} on mesh {saved.get('mesh')}"
        return f"; it was made under {before}, and is loaded under strategy {now['strategy']} on mesh {now['mesh']}"

    def _require_tokenizer(self, found: Restored) -> None:
        now = self._data()[TOKENIZER]
        saved = found.state.get("data", {}).get(TOKENIZER, now)
        if saved != now:
            raise CheckpointError(
                f"{found.where} needs the tokenizer of digest {saved}; this run has {now}, whose tokens mean other "
                f"text. A bpe tokenizer is trained anew at each start, and is another where the files have changed: "
                f"set data.tokenizer to the tokenizer.json in that run's directory, or start anew with "
                f'checkpoint.resume = "never"'
            )

    def _warn_of_changes(self, found: Restored) -> None:
        saved: Mapping[str, Any] = found.state.get("data", {})
        changed = [f"{k} was {saved[k]!r}, is {v!r}" for k, v in self._data().items() if k in saved and saved[k] != v]
        if changed and self._ranks.rank == 0:
            warnings.warn(
                f"{found.where} was saved by a run with other data or batches, so samples will repeat or be left out: "
                + "; ".join(changed),
                stacklevel=2,
            )
        if not found.has_optimizer and self._ranks.rank == 0:
            warnings.warn(f"{found.where} has no optimizer states: the optimizer starts anew", stacklevel=2)
