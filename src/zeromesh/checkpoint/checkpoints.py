"""Checkpoints of a sharded model and its optimizers, for users and the training loop."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.checkpoint import states, tensors
from zeromesh.checkpoint.loader import load_newest, load_path
from zeromesh.checkpoint.peers import make_peers
from zeromesh.checkpoint.read import Reader
from zeromesh.checkpoint.saver import LOCK_WAIT_S, Saver, Snapshot
from zeromesh.checkpoint.storage import open_storage
from zeromesh.errors import CheckpointError
from zeromesh.pieces.piece import Piece
from zeromesh.progress import progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The checkpoint that `Checkpoints.load` restored.

    Args:
        where: the checkpoint's full name.
        step: optimizer steps done; 0 for a checkpoint of another tool.
        state: the values given to `save` beside model and optimizers.
        has_optimizer: whether it held optimizer states.
    """

    where: str
    step: int
    state: dict[str, Any]
    has_optimizer: bool


class Checkpoints:
    """The checkpoints of one run. All ranks, of all pipeline stages, make this object and call its methods together.

    A checkpoint loads under any strategy, on any number of ranks, and into any pipeline stages or none. It is complete
    or invisible: a kill at any moment leaves the previous one. torch.distributed.checkpoint can read its directory.

    Args:
        directory: a path that all ranks see, or a URL that fsspec knows.
        model: a sharded model, or all of this rank's stages of a pipeline (`zm.pipeline`), with the whole model's
            names.
        optimizers: one or several, made from the parameters of the model, or of all of this rank's stages. Give an
            optimizer that also holds other models' parameters to the checkpoints of those models as well.
        keep: number of newest checkpoints to keep, at least 1.
        keep_every: also keep checkpoints whose step is a multiple of this; 0 keeps no others.
        frozen: also save frozen parameters. False saves checksums, and a load compares the model's frozen parameters
            with them.
        lock_wait_s: seconds to wait for another job that saves to the same directory.

    Raises:
        CheckpointError: `keep` or `keep_every` is too low, or two optimizers hold the same parameter.
        ModelError: the model is not sharded.
        InputError: the stages are not all of this rank's, are spread over different numbers of ranks, or have
            parameters of the same name.

    Examples:
        >>> checkpoints = Checkpoints("run/checkpoints", model, optimizer)  # doctest: +SKIP
        >>> found = checkpoints.load("auto")  # doctest: +SKIP
        >>> checkpoints.save(step, {"scheduler": scheduler.state_dict()})  # doctest: +SKIP
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module | Sequence[nn.Module],
        optimizers: Optimizer | Sequence[Optimizer] = (),
        *,
        keep: int = 2,
        keep_every: int = 0,
        frozen: bool = True,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        if keep < 1 or keep_every < 0:
            raise CheckpointError(
                f"keep must be 1 or more and keep_every 0 or more; got keep={keep}, keep_every={keep_every}: a "
                f"checkpoint would be deleted as soon as it is complete"
            )
        self._held = tensors.Held.of(model, directory)
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        states.require_one_holder(self._optimizers)
        self._storage = open_storage(directory)
        self._peers = make_peers(self._held.control)
        self._options = {"keep": keep, "keep_every": keep_every}
        self._frozen = frozen
        self._lock_wait_s = lock_wait_s
        self._saver: Saver | None = None

    @property
    def staging_bytes(self) -> int:
        """Host memory for copies on this rank."""
        return self._saver.staging_bytes if self._saver else 0

    def open(self) -> None:
        """Locks the directory for saving. If the optimizers have states (after the first step), it also begins to pin
        host memory for copies from a device, in the background. Without this call the first `save` does both.

        Raises:
            CheckpointError: the directory cannot be written, or another job saves to it.
        """
        if self._saver is None:
            self._saver = Saver(self._storage, self._peers, **self._options, lock_wait_s=self._lock_wait_s)
        if all(optimizer.state for optimizer in self._optimizers):
            self._saver.reserve(self._pieces())

    def _pieces(self) -> list[Piece]:
        held = self._held
        extra = [
            piece
            for model, engine in zip(held.models, held.engines, strict=True)
            if engine.control.first
            for piece in states.extra_pieces(model)
        ]
        collected = tensors.collect(held, self._optimizers, frozen=self._frozen)
        return [*collected, *states.random_pieces(held.control.number), *extra]

    @progress("copying the checkpoint")
    def save(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Copies everything to host memory and returns; the copy is written in the background.

        Saves parameters, buffers, modules' extra states, optimizer states and options, and the ranks' random states.

        Args:
            step: optimizer steps done; this names the checkpoint.
            state: anything made of numbers, text, 0-d tensors, lists, tuples and dicts, such as the `state_dict()` of a
                scheduler or a GradScaler. Rank 0's is saved.

        Raises:
            CheckpointError: `step` is not a step, the save before failed, or something cannot be saved.
        """
        step = _require_step(step)
        if self._saver is None:
            self.open()
        assert self._saver is not None
        try:
            snapshot = self._snapshot(step, state or {})
        except CheckpointError as error:
            self._saver.give_up(step, str(error))
            raise
        self._saver.save(snapshot)

    def _snapshot(self, step: int, state: Mapping[str, Any]) -> Snapshot:
        held = self._held
        for engine in held.engines:
            engine.at_rest()
        pieces, own = self._pieces(), held.names()
        groups = states.describe_groups(self._optimizers, own)
        plain = {"user": states.to_plain(state, "state")}
        return Snapshot(
            step=step,
            pieces=pieces,
            state=plain if self._frozen else {**plain, "frozen": tensors.checksums(held)},
            about=_about(held),
            aliases=tensors.aliases_of(held, frozen=self._frozen),
            groups=groups if any(engine.control.first for engine in held.engines) else (),
            numbers=tensors.number_names(self._optimizers, own),
            common=held.common,
        )

    @progress("writing the checkpoint")
    def wait(self) -> str | None:
        """Waits until the last save is complete. Returns the checkpoint's full name, or None if none was being written.

        Raises:
            CheckpointError: the checkpoint could not be written; raised on all ranks.
            CommunicationError: a rank did not take part within the timeout of the process group; the message names it.
                The unfinished checkpoint stays invisible.
        """
        return self._saver.wait() if self._saver else None

    @progress("loading the checkpoint")
    def load(
        self,
        which: str | os.PathLike[str] = "auto",
        *,
        optimizers: bool = True,
        optimizer_options: bool = True,
        random_states: bool = True,
    ) -> Restored | None:
        """Fills model and optimizers from a checkpoint.

        Args:
            which: "auto" for the newest complete checkpoint in the directory. Or a path: of a checkpoint by zeromesh or
                by torch.distributed.checkpoint, or of a directory of checkpoints by zeromesh.
            optimizers: also load optimizer states. If False, optimizers are left as they are.
            optimizer_options: also load learning rates and other options, as torch's `load_state_dict` does.
            random_states: also set the random number generators, if the number of ranks is the same.

        Returns:
            The restored checkpoint; None if "auto" found none.

        Raises:
            CheckpointError: on all ranks, if the checkpoint is damaged (with "auto": all checkpoints), or is of another
                model or optimizer. Nothing is changed if the model or the optimizer's class is another. Otherwise part
                of this model may have been filled: load another checkpoint before going on.
            CommunicationError: a rank did not take part.
        """
        self.wait()

        def restore(reader: Reader) -> None:
            groups, _ = states.read_groups(reader), states.read_state(reader)  # raises before anything changes
            own = held.names()
            if optimizers:
                states.require_kinds(self._optimizers, groups, reader.where, own)
            tensors.restore_models(held, reader)
            if optimizers:
                tensors.restore_optimizers(held, self._optimizers, reader)
            for model in held.models:
                states.restore_extra(model, reader)
            if optimizers and optimizer_options:
                states.restore_groups(self._optimizers, groups, reader.where, own)
            if random_states and reader.manifest.about.get("world") == held.control.world:
                states.restore_random(held.control.number, reader)

        held = self._held
        loaded: Reader | None
        try:
            if which == "auto":
                loaded = load_newest(self._storage, self._peers, restore)
            else:
                loaded = load_path(which, self._peers, restore)
            if loaded is not None:
                tensors.require_same(held, tensors.left_out(loaded.manifest.state, loaded.where), loaded.where)
        except CheckpointError:  # on all ranks; parameters may be loaded although others, or states, do not fit
            self._changed()
            raise
        if loaded is None:
            return None
        self._changed()  # only after all ranks have loaded the same
        has_optimizer = any(name.startswith(tensors.STATE) for name in loaded.manifest.tensors)
        user = states.read_state(loaded)
        return Restored(where=loaded.where, step=loaded.manifest.step, state=user, has_optimizer=has_optimizer)

    def _changed(self) -> None:
        for engine in self._held.engines:
            engine.changed()

    def close(self) -> None:
        """Waits, unlocks the directory and frees the copies."""
        saver, self._saver = self._saver, None
        if saver:
            saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_step(step: int) -> int:
    """Converts `step` to Python's int, whose text is the checkpoint's name and is in its manifest."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(
            f"step must be a whole number of steps done, 0 or more, since it names the checkpoint; got {step!r}"
        )
    return number


def _about(held: tensors.Held) -> dict[str, Any]:
    engine = held.engines[0]
    layout = engine.schedule.layout
    return {
        "strategy": str(engine.schedule.strategy),
        "mesh": {name: size for name, size in reversed(layout.mesh)},
        "world": held.control.world,
        "zeromesh": version("zeromesh"),
        "torch": torch.__version__,
    }
