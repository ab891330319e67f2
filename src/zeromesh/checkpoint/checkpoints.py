"""Checkpoints of a sharded model and its optimizers: what users and the training loop call."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from zeromesh.checkpoint import extra
from zeromesh.checkpoint.collect import STATE, aliases_of, collect
from zeromesh.checkpoint.frozen import checksums, left_out, require_same
from zeromesh.checkpoint.groups import describe_groups, read_groups, require_kinds, restore_groups
from zeromesh.checkpoint.held import Held
from zeromesh.checkpoint.loader import Loaded, load_newest, load_path
from zeromesh.checkpoint.manifest import DamagedError
from zeromesh.checkpoint.peers import make_peers
from zeromesh.checkpoint.plain import from_plain, to_plain
from zeromesh.checkpoint.randomness import empty_pieces, random_pieces, restore_random
from zeromesh.checkpoint.read import Reader
from zeromesh.checkpoint.restore import restore_models, restore_optimizers
from zeromesh.checkpoint.saver import LOCK_WAIT_S, Saver, Snapshot
from zeromesh.checkpoint.storage import open_storage
from zeromesh.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `Checkpoints.load` found.

    Args:
        where: the checkpoint's full name.
        step: optimizer steps done; 0 for a checkpoint of another tool.
        state: what was given to `save` beside model and optimizers.
        has_optimizer: whether it held optimizer states.
    """

    where: str
    step: int
    state: dict[str, Any]
    has_optimizer: bool


class Checkpoints:
    """The checkpoints of one run. All ranks make it, those of all stages of a pipeline, and call its methods together.

    A checkpoint loads under any strategy, on any number of ranks, and with the model cut into any stages or none. It is
    complete or invisible: a kill at any moment leaves the one before. Its directory can be read by
    torch.distributed.checkpoint.

    Args:
        directory: where they lie: a path that all ranks see, or a URL that fsspec knows.
        model: sharded; or all of this rank's stages of a pipeline (`zm.pipeline`), under the names of the whole model.
        optimizers: one or several, made from the model's parameters, or from those of all of this rank's stages.
        keep: newest checkpoints to keep, at least 1.
        keep_every: checkpoints of steps that this divides are kept for good; 0 keeps none.
        frozen: also save frozen parameters; else checksums of them, by which a load finds out whether they are there.
        lock_wait_s: how long to wait for another job that saves to the same directory.

    Raises:
        CheckpointError: `keep` or `keep_every` is too low.
        ModelError: the model is not sharded.
        InputError: stages that are not all of this rank's, that are spread over different numbers of ranks, or have
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
        self._held = Held.of(model, directory)
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self._storage = open_storage(directory)
        self._peers = make_peers(self._held.control)
        self._options = {"keep": keep, "keep_every": keep_every}
        self._frozen = frozen
        self._lock_wait_s = lock_wait_s
        self._saver: Saver | None = None

    @property
    def staging_bytes(self) -> int:
        """Host memory that copies take on this rank."""
        return self._saver.staging_bytes if self._saver else 0

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._saver is not None and self._saver.busy

    def open(self) -> None:
        """Locks the directory for saving; the first `save` does it where this has not.

        Raises:
            CheckpointError: it cannot be written, or another job saves to it.
        """
        if self._saver is None:
            self._saver = Saver(self._storage, self._peers, **self._options, lock_wait_s=self._lock_wait_s)

    def save(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Copies everything to host memory and returns; the copy is written in the background.

        Saves parameters, buffers, modules' extra states, optimizer states and options, and the ranks' random states.

        Args:
            step: optimizer steps done; names the checkpoint.
            state: anything made of numbers, text, 0-d tensors, lists, tuples and dicts, such as the `state_dict()` of a
                scheduler or a GradScaler. Rank 0's is taken.

        Raises:
            CheckpointError: `step` is none, the save before failed, or something cannot be saved.
        """
        step = _require_step(step)
        self.open()
        assert self._saver is not None
        held = self._held
        for engine in held.engines:
            engine.at_rest()
        collected = collect(held.models, held.engines, self._optimizers, frozen=self._frozen)
        collected.pieces += random_pieces(held.control.number)
        firsts = [model for model, engine in zip(held.models, held.engines, strict=True) if engine.control.first]
        collected.pieces += [piece for model in firsts for piece in extra.extra_pieces(model)]
        groups = describe_groups(self._optimizers)
        plain = {"user": to_plain(state or {}, "state")} | ({} if self._frozen else {"frozen": checksums(held)})
        snapshot = Snapshot(
            step=step,
            pieces=collected.pieces,
            empty=collected.empty,
            state=plain,
            about=_about(held),
            aliases={a: name for e in held.engines for a, name in aliases_of(e, frozen=self._frozen).items()},
            groups=groups if firsts else (),
            common=held.common,
        )
        self._saver.save(snapshot)

    def wait(self) -> str | None:
        """Waits until what was saved last is complete; its full name, None where nothing was being written.

        Raises:
            CheckpointError: it could not be written, on all ranks.
            CommunicationError: a rank did not take part within the timeout of the process group: names it. What was
                being written stays invisible.
        """
        return self._saver.wait() if self._saver else None

    def load(
        self,
        which: str | os.PathLike[str] = "auto",
        *,
        since: int = 0,
        optimizers: bool = True,
        optimizer_options: bool = True,
        random_states: bool = True,
    ) -> Restored | None:
        """Fills model and optimizers from a checkpoint.

        Args:
            which: "auto" is the newest complete one in the directory; else the path of a checkpoint, of zeromesh's or
                of torch.distributed.checkpoint's, or of a directory of zeromesh's.
            since: for "auto", only checkpoints that were made after that of this serial (in the manifest's first line).
            optimizers: also fill them; else they are left as they are, and the model alone is loaded.
            optimizer_options: also take learning rates and the like from it, as torch's `load_state_dict` does.
            random_states: also set the random number generators, where the number of ranks is the same.

        Returns:
            None where "auto" found none.

        Raises:
            CheckpointError: on all ranks, the checkpoint is damaged (with "auto": all of them are), or of another
                model, or another optimizer. Of another model or class of optimizer, nothing is changed. Otherwise a
                part of this one may have been filled: load another before going on.
            CommunicationError: a rank did not take part.
        """
        self.wait()

        def restore(reader: Reader) -> None:
            groups = read_groups(reader)
            user[:] = [_read_state(reader)]
            if optimizers:
                require_kinds(self._optimizers, groups, reader.where)
            restore_models(held, reader)
            if optimizers:
                restore_optimizers(held, self._optimizers, reader)
            for model in held.models:
                _restore_extra(model, reader)
            if optimizers and optimizer_options:
                restore_groups(self._optimizers, groups, reader.where)
            if random_states and reader.manifest.about.get("world") == held.control.world:
                _restore_random(held.control.number, reader)
            found.append(any(name.startswith(STATE) for name in reader.manifest.tensors))

        held, found = self._held, list[bool]()
        user: list[dict[str, Any]] = []
        loaded: Loaded | None
        try:
            if which == "auto":
                loaded = load_newest(self._storage, self._peers, restore, since=since)
            else:
                loaded = load_path(which, self._peers, restore)
            if loaded is not None:
                require_same(held, left_out(loaded.state, loaded.where), loaded.where)
        except CheckpointError:  # on all ranks; parameters may be the checkpoint's though others, or states, do not fit
            self._changed()
            raise
        if loaded is None:
            return None
        self._changed()  # not before all ranks have loaded the same
        return Restored(where=loaded.where, step=loaded.step, state=user[-1], has_optimizer=found[-1])

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _require_step(step: int) -> int:
    """As an int of Python's, whose text is the checkpoint's name and is in its manifest."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(
            f"step must be a whole number of steps done, 0 or more, since it names the checkpoint; got {step!r}"
        )
    return number


def _about(held: Held) -> dict[str, Any]:
    from zeromesh import __version__

    engine = held.engines[0]
    layout = engine.schedule.layout
    return {
        "strategy": str(engine.schedule.strategy),
        "mesh": {name: size for name, size in reversed(layout.mesh)},
        "world": held.control.world,
        "zeromesh": __version__,
        "torch": torch.__version__,
    }


def _read_state(reader: Reader) -> dict[str, Any]:
    try:
        state = from_plain(reader.manifest.state.get("user", {}))
    except CheckpointError as error:
        raise DamagedError(f"{reader.where}: {error}") from error
    if not isinstance(state, dict):
        raise DamagedError(f"{reader.where}: its state must be a dict; got {type(state).__name__}")
    return state


def _restore_extra(model: nn.Module, reader: Reader) -> None:
    try:
        pieces = extra.empty_pieces({name: entry.shape for name, entry in reader.manifest.tensors.items()})
        reader.fill(pieces)
        extra.restore_extra(model, pieces)
    except DamagedError:
        raise
    except CheckpointError as error:
        raise DamagedError(f"{reader.where}: {error}") from error


def _restore_random(rank: int, reader: Reader) -> None:
    shapes = {name: entry.shape for name, entry in reader.manifest.tensors.items()}
    try:
        pieces = empty_pieces(rank, shapes)
        reader.fill(pieces)
        restore_random(pieces)
    except DamagedError:
        raise
    except CheckpointError as error:
        raise DamagedError(f"{reader.where}: {error}") from error
