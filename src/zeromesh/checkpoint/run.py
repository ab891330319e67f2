"""The checkpoints of a run that may be restarted: it resumes from its own newest one, and can go back to it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from zeromesh.checkpoint.checkpoints import Checkpoints, Restored
from zeromesh.errors import CheckpointError

AUTO = "auto"


class RunCheckpoints:
    """The checkpoints of one run, for a training loop. All methods are collective.

    Args:
        checkpoints: the checkpoints in the run's own directory.
        identity: the settings, by name, that decide which sample comes at which step.
        required: names of settings that must not change, each with a remedy; a change in others warns.
        layout: strategy and mesh.
        first: whether this rank prints.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        identity: Mapping[str, Any],
        required: Mapping[str, str],
        layout: Mapping[str, str],
        first: bool,
    ) -> None:
        self._checkpoints, self._identity, self._required = checkpoints, dict(identity), required
        self._layout, self._first = dict(layout), first
        self._newest: str | None = None  # the checkpoint for a roll back

    def resume(self, beginning: str = AUTO, *, saves: bool = True) -> Restored | None:
        """Loads the run's newest checkpoint, or the one at the path `beginning` if the run has none yet. Returns None
        for a new run. Locks the directory if the run `saves`.

        Learning rates and other options stay those of the optimizer, since a user may have edited them. Nothing is
        written before a checkpoint is accepted. Raises CheckpointError if it cannot be loaded, or its run differs in a
        required setting.
        """
        found = self._load(AUTO)
        if beginning != AUTO and found is None:
            found = self._load(beginning)
        elif beginning != AUTO:
            self._say(f"{beginning} is not loaded: the run has checkpoints of its own")
        if found is not None:
            self._compare(found)
        if saves:
            self._checkpoints.open()
        return found

    def prepare(self) -> None:
        """Begins to pin memory for saves. Call it when the optimizer has states."""
        self._checkpoints.open()

    def save(self, step: int, faults: Mapping[str, Any]) -> None:
        """Saves in the background; `resume` returns `faults` in `state["faults"]`. If the save before failed, it only
        warns: training is worth more than one checkpoint."""
        self._settle(f"training goes on, and saves again after step {step}")
        self._checkpoints.save(step, {"data": self._identity, "run": self._layout, "faults": dict(faults)})

    def roll_back(self) -> Restored | None:
        """Loads the newest checkpoint again, with random states, so that the next steps are those of a run resumed from
        it. Returns None if there is no checkpoint yet."""
        self._settle("the one before is used")
        return None if self._newest is None else self._load(self._newest)

    def close(self) -> None:
        """Waits for a running save. Raises CheckpointError if the last save failed."""
        self._checkpoints.close()

    def _load(self, which: str) -> Restored | None:
        found = self._checkpoints.load(which, optimizer_options=False)
        self._newest = which if found else self._newest
        return found

    def _settle(self, consequence: str) -> None:
        try:
            if self._checkpoints.wait():
                self._newest = AUTO
        except CheckpointError as error:
            self._warn(f"{error}; {consequence}")

    def _compare(self, found: Restored) -> None:
        saved, before = found.state.get("data", {}), found.state.get("run") or self._layout
        differing = {name: own for name, own in self._identity.items() if saved.get(name, own) != own}
        for name in self._required.keys() & differing.keys():
            raise CheckpointError(
                f"{found.where} needs the {name} {saved[name]}; this run has {differing[name]}. {self._required[name]}"
            )
        made, used = (f"strategy {d.get('strategy')} on mesh {d.get('mesh')}" for d in (before, self._layout))
        moved = f"; it was made under {made}, and is loaded under {used}" if made != used else ""
        self._say(f"resumed from {found.where} after step {found.step}{moved}")
        if differing:
            changed = "; ".join(f"{name} was {saved[name]!r}, is {own!r}" for name, own in differing.items())
            self._warn(
                f"{found.where} was saved by a run with other data or batches, so samples will repeat or be left out: "
                f"{changed}"
            )
        if not found.has_optimizer:
            self._warn(f"{found.where} has no optimizer states: the optimizer starts anew")

    def _say(self, text: str) -> None:
        if self._first:
            print(text, flush=True)

    def _warn(self, text: str) -> None:
        if self._first:
            warnings.warn(text, stacklevel=4)
