"""Saves checkpoints: copies to host memory, then writes in the background.

::

    every rank   copy its share to host memory          the caller waits for this
    rank 0       make .saving-step-00000020             from here on in a thread
    every rank   write __<rank>_0.distcp                each file's sync begins when it is written
    rank 0       write .metadata and manifest.json
    every rank   wait for its syncs
    rank 0       rename to step-00000020
    rank 0       delete what retention does not keep

A rank that fails, whatever its error is, tells the others; then rank 0 deletes what was written, and all of them raise
the same error. A rank that dies or stops is named by the others when the group's timeout is over: what was being
written stays invisible.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from zeromesh.checkpoint.dcp import METADATA, write_metadata
from zeromesh.checkpoint.directory import SAVING, clear_leftovers, free_name, list_checkpoints, superfluous
from zeromesh.checkpoint.groups import groups_for_torch, join_groups
from zeromesh.checkpoint.manifest import MANIFEST, Manifest, TensorEntry
from zeromesh.checkpoint.peers import Peers
from zeromesh.checkpoint.staging import Staging
from zeromesh.checkpoint.storage import Storage, reason
from zeromesh.checkpoint.write import Written, entries_of, files_of, write_file
from zeromesh.errors import CheckpointError
from zeromesh.pieces.piece import Piece

LOCK_WAIT_S = 10.0
"""A job that is restarted may find its predecessor still ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is to be saved.

    Args:
        step: optimizer steps done.
        pieces: what this rank writes; all ranks' together cover every tensor once.
        empty: tensors without elements, of which nothing is written.
        state: what is not a tensor, for `Manifest.state`; rank 0's is taken.
        about: for `Manifest.about`; rank 0's.
        aliases: further names, for readers other than zeromesh, with the tensor's own.
        groups: the optimizers' options, `describe_groups`; from one rank of each stage.
        common: names that several ranks write, which must be alike; the same on all ranks.
    """

    step: int
    pieces: Sequence[Piece]
    empty: Sequence[Piece] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[Any] = ()
    common: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What a rank tells rank 0 of its part.

    Args:
        written: what its file holds.
        empty, aliases, groups: of its snapshot.
        problem: why it could not write.
    """

    written: Sequence[Written] = ()
    empty: Mapping[str, TensorEntry] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[Any] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """What rank 0 tells the others at the start.

    Args:
        name: of the checkpoint.
        directory: its name while it is written.
        serial: its place in the order of checkpoints.
        problem: why it cannot be written.
    """

    name: str = ""
    directory: str = ""
    serial: int = 0
    problem: str = ""


class Saver:
    """Writes the checkpoints of one run to one directory, which it locks. Made, used and closed by all ranks.

    Args:
        storage: the directory.
        peers: all ranks.
        keep: newest checkpoints to keep.
        keep_every: checkpoints of steps that this divides are kept for good; 0 keeps none.
        lock_wait_s: how long to wait for another job to leave the directory.

    Raises:
        CheckpointError: the directory cannot be written, or another job writes to it.
        CommunicationError: a rank did not take part.
    """

    def __init__(
        self, storage: Storage, peers: Peers, *, keep: int, keep_every: int = 0, lock_wait_s: float = LOCK_WAIT_S
    ) -> None:
        self.storage = storage
        self.peers = peers
        self._keep = keep
        self._keep_every = keep_every
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zeromesh-checkpoint")
        self._pending: Future[str] | None = None
        problem = ""
        if peers.rank == 0:
            try:
                storage.lock(lock_wait_s)
                clear_leftovers(storage)
            except CheckpointError as error:
                problem = str(error)
            except Exception as error:
                problem = _cannot(storage.where(), error)
        try:
            problem = peers.broadcast(problem, "the lock of the checkpoints' directory")
            if problem:
                raise CheckpointError(problem)
        except BaseException:
            storage.unlock()
            raise

    @property
    def staging_bytes(self) -> int:
        """Host memory that is held for copies."""
        return self._staging.num_bytes

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written on this rank."""
        return self._pending is not None and not self._pending.done()

    def save(self, snapshot: Snapshot) -> None:
        """Copies the snapshot and returns; it is written in the background. Waits first for the save before.

        Raises:
            CheckpointError: the save before failed.
        """
        self.wait()
        copies = self._staging.copy(snapshot.pieces)
        self._pending = self._thread.submit(self._write, snapshot, copies)

    def wait(self) -> str | None:
        """Waits for the save in progress; the full name of its checkpoint, None where there was none.

        Raises:
            CheckpointError: it failed, on all ranks.
            CommunicationError: a rank did not take part.
        """
        if self._pending is None:
            return None
        wait([self._pending])  # interrupted here, it is still under way
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        """Waits, and leaves the directory to others."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.storage.unlock()

    def _write(self, snapshot: Snapshot, copies: Sequence[Tensor]) -> str:
        peers, what = self.peers, f"the checkpoint of step {snapshot.step}"
        begun = peers.broadcast(self._begin(snapshot.step), f"the name of {what}")
        problem = begun.problem
        if not problem:
            manifest = None
            own = self._write_own(begun.directory, snapshot, copies)
            problem = own.problem
            gathered = peers.gather(own, f"what each rank has written of {what}")
            if gathered is not None:
                manifest, problem = self._describe(snapshot, begun, gathered)
            unsettled = self._settle(begun.directory)  # in any case: nothing of it may be left for the next save
            problems = peers.gather(problem or unsettled, f"the syncs of {what}")
            if problems is not None:
                problem = next(filter(None, problems), "") or self._publish(begun, manifest)
            problem = peers.broadcast(problem, f"the end of {what}")
        if problem:
            self._discard(begun.directory)
            raise CheckpointError(f"{what} was not saved: {problem}")
        self._retire()
        return self.storage.where(begun.name)

    def _begin(self, step: int) -> _Begun:
        """Rank 0 makes the directory."""
        if self.peers.rank != 0:
            return _Begun()
        try:
            taken = self.storage.names()
            name = free_name(step, taken)
            directory = f"{SAVING}{name}-{os.getpid()}" if self.storage.renames else name
            self.storage.make(directory)
            serial = list_checkpoints(self.storage).next_serial
            return _Begun(name=name, directory=directory, serial=serial)
        except Exception as error:
            return _Begun(problem=_cannot(self.storage.where(), error))

    def _write_own(self, directory: str, snapshot: Snapshot, copies: Sequence[Tensor]) -> _Share:
        file = f"__{self.peers.rank}_0.distcp"
        try:
            copied = [replace(piece, local=local) for piece, local in zip(snapshot.pieces, copies, strict=True)]
            written = write_file(self.storage, directory, file, copied) if copied else []
        except Exception as error:
            return _Share(problem=_cannot(self.storage.where(directory, file), error))
        empty = entries_of((), snapshot.empty)
        return _Share(written=written, empty=empty, aliases=snapshot.aliases, groups=snapshot.groups)

    def _describe(self, snapshot: Snapshot, begun: _Begun, gathered: Sequence[_Share]) -> tuple[Manifest | None, str]:
        """Rank 0 writes what lies where; what went wrong, here or before."""
        problem = next((share.problem for share in gathered if share.problem), "")
        if problem:
            return None, problem
        try:
            rows = _once([row for share in gathered for row in share.written], snapshot.common)
            empty = {name: entry for share in gathered for name, entry in share.empty.items()}
            groups = join_groups([share.groups for share in gathered])
            aliases = {alias: name for share in gathered for alias, name in share.aliases.items()}
            manifest = Manifest(
                step=snapshot.step,
                serial=begun.serial,
                tensors=empty | entries_of(rows),
                files=files_of(rows),
                state={**snapshot.state, **({"groups": groups} if groups else {})},
                about=snapshot.about,
            )
            objects = {**groups_for_torch(groups), "step": snapshot.step}
            write_metadata(self.storage, begun.directory, [*rows, *_aliased(rows, aliases)], empty, objects)
        except CheckpointError as error:
            return None, str(error)
        except Exception as error:
            return None, _cannot(self.storage.where(begun.directory, METADATA), error)
        # Where nobody looks at this directory yet, the manifest need not wait for the data.
        return manifest, self._write_manifest(begun.directory, manifest) if self.storage.renames else ""

    def _write_manifest(self, directory: str, manifest: Manifest) -> str:
        try:
            with self.storage.create(directory, MANIFEST) as stream:
                stream.write(manifest.to_bytes())
        except Exception as error:
            return _cannot(self.storage.where(directory, MANIFEST), error)
        return ""

    def _settle(self, directory: str) -> str:
        try:
            self.storage.settle()
        except Exception as error:
            return _cannot(getattr(error, "filename", None) or self.storage.where(directory), error)
        return ""

    def _publish(self, begun: _Begun, manifest: Manifest | None) -> str:
        """Rank 0 makes the checkpoint visible; what went wrong."""
        if not self.storage.renames:
            assert manifest is not None
            return self._write_manifest(begun.directory, manifest)
        try:
            self.storage.publish(begun.directory, begun.name)
        except Exception as error:
            return _cannot(self.storage.where(begun.directory), error)
        return ""

    def _discard(self, directory: str) -> None:
        # Where the disk is gone too, the next job deletes it.
        if self.peers.rank == 0 and directory:
            with suppress(Exception):
                self.storage.remove(directory)

    def _retire(self) -> None:
        # The checkpoint itself is complete; what cannot be deleted now is tried again with the next one.
        if self.peers.rank != 0:
            return
        with suppress(Exception):
            listing = list_checkpoints(self.storage)
            old = superfluous(listing.complete, keep=self._keep, keep_every=self._keep_every)
            for name in (*(found.name for found in old), *listing.unfinished):
                self.storage.remove(name)


def _once(rows: Sequence[Written], common: frozenset[str]) -> list[Written]:
    """What several ranks have written under a name of `common`, once.

    Raises:
        CheckpointError: they have not written the same.
    """
    first: dict[tuple[str, tuple[int, ...]], Written] = {}
    kept = []
    for row in rows:
        other = first.setdefault((row.name, row.offsets), row) if row.name in common else row
        if other is row:
            kept.append(row)
        elif (row.sizes, row.dtype, row.chunk.crcs) != (other.sizes, other.dtype, other.chunk.crcs):
            name = row.name.removeprefix("model.")
            raise CheckpointError(
                f"{name} is in several stages of the pipeline, with other values in {row.chunk.file} than in "
                f"{other.chunk.file}: what is saved under one name must be the same in all stages; name it otherwise"
            )
    return kept


def _aliased(rows: Sequence[Written], aliases: Mapping[str, str]) -> list[Written]:
    """The rows of tied tensors once more under each further name: the same bytes."""
    return [replace(row, name=alias) for alias, name in aliases.items() for row in rows if row.name == name]


def _cannot(where: str, error: Exception) -> str:
    return f"cannot write {where}: {reason(error)}"
