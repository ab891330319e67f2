"""Saves checkpoints: copies to host memory, then writes in the background.

::

    every rank   copy its share to host memory          the caller waits for this
    rank 0       make .saving-step-00000020             from here on in a thread
    every rank   write __<rank>_0.distcp                each file's sync begins when it is written
    rank 0       write .metadata and manifest.json
    every rank   wait for its syncs
    rank 0       rename to step-00000020
    rank 0       delete checkpoints beyond retention

If a rank fails, with any error, it tells the others; rank 0 then deletes the directory, and all ranks raise the same
error. If a rank dies or hangs, the others name it when the group's timeout is over, and the unfinished checkpoint stays
invisible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from zeromesh.checkpoint.dcp import write_metadata
from zeromesh.checkpoint.directory import SAVING, clear_leftovers, free_name, list_checkpoints, superfluous
from zeromesh.checkpoint.manifest import MANIFEST, Manifest, TensorEntry
from zeromesh.checkpoint.peers import Peers
from zeromesh.checkpoint.states import groups_for_torch, join_groups
from zeromesh.checkpoint.storage import Storage, reason
from zeromesh.checkpoint.write import Written, entries_of, files_of, write_file
from zeromesh.comm.host import HostArena, padded
from zeromesh.errors import CheckpointError, CommunicationError
from zeromesh.pieces.piece import Piece

CHUNK_BYTES = 1 << 30
"""Memory is pinned in chunks of this size. Each takes about .3 s, in which the device's driver does nothing else."""

LOCK_WAIT_S = 10.0
"""A restarted job may have to wait for its predecessor to end."""

T = TypeVar("T")


class Staging:
    """Host memory that pieces are copied to, so that training can go on while they are written.

    Training waits for `copy`. Saves hold the same pieces each time, so the memory is kept.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._arena: HostArena | None = None

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies)

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Pins memory for pieces of these sizes, unless it has enough."""
        wanted = max(1, sum(padded(piece.local.nbytes) for piece in pieces))
        if self._arena is None or self._arena.memory.numel() < wanted:
            self._copies, self._arena = [], None  # frees the old memory first: never both at once
            device = _device_of(pieces)
            try:
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # a thread has its own
                    self._arena = HostArena(wanted, device, CHUNK_BYTES)
            except CommunicationError:  # not pinned: copies then wait for each other
                self._arena = HostArena(wanted, torch.device("cpu"))

    def copy(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Copies the pieces. Returns the elements of each in host memory, valid until the next call."""
        sources = [piece.local for piece in pieces]
        if [(s.numel(), s.dtype) for s in sources] != [(copy.numel(), copy.dtype) for copy in self._copies]:
            self.reserve(pieces)
            assert self._arena is not None
            ends = [0, *accumulate(padded(source.nbytes) for source in sources)]
            memory = self._arena.memory
            self._copies = [memory[at : at + s.nbytes].view(s.dtype) for at, s in zip(ends, sources, strict=False)]
        to, of, start = list[Tensor](), list[Tensor](), 0
        for copy, source in zip(self._copies, sources, strict=True):
            first, each = ((CHUNK_BYTES - start % CHUNK_BYTES) // copy.itemsize, CHUNK_BYTES // copy.itemsize)
            cuts = [*range(first, copy.numel(), each)]  # so that each copy stays within a chunk
            to += torch.tensor_split(copy, cuts)
            of += torch.tensor_split(source, cuts)
            start += padded(source.nbytes)
        if sources:
            torch._foreach_copy_(to, of, non_blocking=True)
        if (device := _device_of(pieces)).type != "cpu":
            torch.accelerator.current_stream(device).synchronize()
        return self._copies


def _device_of(pieces: Sequence[Piece]) -> torch.device:
    devices = (piece.local.device for piece in pieces)
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state to save.

    `pieces` are those that this rank writes; together, those of all ranks cover every tensor once. For tensors without
    elements only a description is saved, from any rank. `state` and `about` go to the manifest from rank 0.
    """

    step: int  # optimizer steps done
    pieces: Sequence[Piece]
    state: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)  # tensor names by further names, for other readers
    groups: Sequence[Any] = ()  # the optimizers' options from `describe_groups`; from one rank of each stage
    numbers: Sequence[str] = ()  # names of this rank's states that are Python numbers, from `tensors.number_names`
    common: frozenset[str] = frozenset()  # names that several ranks write, with equal values; the same on all ranks


_Share = tuple[list[Written], dict[str, TensorEntry], Snapshot]
"""One rank's report to rank 0: the contents of its file, its tensors without elements, and its snapshot without pieces
and without values that are the same on all ranks."""


class Saver:
    """Writes the checkpoints of one run to one directory, and keeps those that `superfluous` does not list. It locks
    the directory, waiting at most `lock_wait_s` for another job to leave. All ranks make, use and close it together.
    Raises CheckpointError if the directory cannot be written, or another job writes to it; CommunicationError if a rank
    did not take part."""

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
        self._reserving: Future[None] | None = None

        def enter() -> None:
            storage.lock(lock_wait_s)
            clear_leftovers(storage)

        _, problem = _tried(storage.where(), enter) if peers.rank == 0 else (None, "")
        try:
            problem = peers.broadcast(problem, "the lock of the checkpoints' directory")
            if problem:
                raise CheckpointError(problem)
        except BaseException:
            storage.unlock()
            raise

    @property
    def staging_bytes(self) -> int:
        """Host memory held for copies."""
        return self._staging.num_bytes

    def save(self, snapshot: Snapshot) -> None:
        """Copies the snapshot, returns, and writes it in the background. First waits for the save before. Raises
        CheckpointError if that one failed."""
        self.wait()
        if self._reserving is not None:
            self._reserving.result()
        copies = self._staging.copy(snapshot.pieces)
        self._pending = self._thread.submit(self._write, snapshot, copies)

    def give_up(self, step: int, problem: str) -> None:
        """Tells other ranks that this one has nothing to save; they may have copied their share and wait for all. It
        neither waits for them nor learns the outcome."""
        if self.peers.size > 1:
            self._thread.submit(self._write, Snapshot(step=step, pieces=()), (), problem)

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Begins to pin memory for copies of pieces like these, in the background, unless they lie on the host."""
        if _device_of(pieces).type != "cpu":
            self._reserving = self._thread.submit(self._staging.reserve, pieces)

    def wait(self) -> str | None:
        """Waits for the save in progress. Returns the full name of its checkpoint, or None if there was no save. Raises
        CheckpointError, on all ranks, if it failed; CommunicationError if a rank did not take part."""
        if self._pending is None:
            return None
        wait([self._pending])  # if interrupted here, the save stays pending
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        """Waits, and unlocks the directory."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.storage.unlock()

    def _write(self, snapshot: Snapshot, copies: Sequence[Tensor], own_problem: str = "") -> str:
        peers, storage, what = self.peers, self.storage, f"the checkpoint of step {snapshot.step}"
        begun = _tried(storage.where(), lambda: self._begin(snapshot.step)) if peers.rank == 0 else (None, "")
        made, problem = peers.broadcast(begun, f"the name of {what}")
        name, directory, serial = made or ("", "", 0)
        if not problem:
            where, manifest = storage.where(directory), None
            share, problem = (None, own_problem) if own_problem else self._write_own(directory, snapshot, copies)
            gathered = peers.gather((share, problem), f"what each rank has written of {what}")
            if gathered is not None:
                problem = next((problem for _, problem in gathered if problem), "")
                shares = [share for share, _ in gathered if share is not None]
                if not problem:
                    manifest, problem = _tried(where, lambda: self._describe(snapshot, directory, serial, shares))
            _, unsettled = _tried(where, storage.settle)  # in any case: the next save must not find leftovers
            problems = peers.gather(problem or unsettled, f"the syncs of {what}")
            if problems is not None:
                problem = next(filter(None, problems), "")
                if manifest is not None and not problem:
                    _, problem = _tried(where, lambda: self._publish(name, directory, manifest))
            problem = peers.broadcast(problem, f"the end of {what}")
        if problem:
            if peers.rank == 0 and directory:
                with suppress(Exception):  # if the disk is gone as well, the next job deletes it
                    storage.remove(directory)
            raise CheckpointError(f"{what} was not saved: {problem}")
        self._retire()
        return storage.where(name)

    def _begin(self, step: int) -> tuple[str, str, int]:
        """Rank 0 makes the directory. Returns (its final name, its name while it is written, its serial)."""
        name = free_name(step, self.storage.names())
        directory = f"{SAVING}{name}-{os.getpid()}" if self.storage.renames else name
        self.storage.make(directory)
        return name, directory, list_checkpoints(self.storage).next_serial

    def _write_own(self, directory: str, snapshot: Snapshot, copies: Sequence[Tensor]) -> tuple[_Share | None, str]:
        file = f"__{self.peers.rank}_0.distcp"
        copied = [replace(piece, local=local) for piece, local in zip(snapshot.pieces, copies, strict=True)]

        def write() -> _Share:
            written = write_file(self.storage, directory, file, copied) if any(copy.numel() for copy in copies) else []
            empty = entries_of((), [piece for piece in copied if not prod(piece.shape)])
            return written, empty, replace(snapshot, pieces=(), state={}, about={}, common=frozenset())

        return _tried(self.storage.where(directory, file), write)

    def _describe(self, snapshot: Snapshot, directory: str, serial: int, shares: Sequence[_Share]) -> Manifest:
        """Rank 0 writes the manifest and torch's index, and returns the manifest."""
        rows = _once([row for written, _, _ in shares for row in written], snapshot.common)
        empty = {name: entry for _, own, _ in shares for name, entry in own.items()}
        groups = join_groups([own.groups for _, _, own in shares])
        told = {"groups": groups, "numbers": sorted({name for _, _, own in shares for name in own.numbers})}
        aliases = {alias: name for _, _, own in shares for alias, name in own.aliases.items()}
        aliased = [replace(row, name=alias) for alias, name in aliases.items() for row in rows if row.name == name]
        manifest = Manifest(
            step=snapshot.step,
            serial=serial,
            tensors=empty | entries_of(rows),
            files=files_of(rows),
            state={**snapshot.state, **{key: value for key, value in told.items() if value}},
            about=snapshot.about,
        )
        objects = {**groups_for_torch(groups), "step": snapshot.step}
        write_metadata(self.storage, directory, [*rows, *aliased], empty, objects)
        if self.storage.renames:  # the directory is still hidden, so the manifest need not wait for the data
            self._write_manifest(directory, manifest)
        return manifest

    def _write_manifest(self, directory: str, manifest: Manifest) -> None:
        with self.storage.create(directory, MANIFEST) as stream:
            stream.write(manifest.to_bytes())

    def _publish(self, name: str, directory: str, manifest: Manifest) -> None:
        """Rank 0 makes the checkpoint visible."""
        if self.storage.renames:
            self.storage.publish(directory, name)
        else:
            self._write_manifest(directory, manifest)

    def _retire(self) -> None:
        # The checkpoint itself is complete. A directory that cannot be deleted now is tried again after the next save.
        if self.peers.rank != 0:
            return
        with suppress(Exception):
            listing = list_checkpoints(self.storage)
            old = superfluous(listing.complete, keep=self._keep, keep_every=self._keep_every)
            for name in (*(found.name for found in old), *listing.unfinished):
                self.storage.remove(name)


def _once(rows: Sequence[Written], common: frozenset[str]) -> list[Written]:
    """Removes duplicates of rows that several ranks wrote under a name in `common`. Raises CheckpointError if those
    ranks wrote different values."""
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


def _tried(where: str, work: Callable[[], T]) -> tuple[T | None, str]:
    """Returns the result of `work`, and its error as text: other ranks wait to hear it."""
    try:
        return work(), ""
    except CheckpointError as error:
        return None, str(error)
    except Exception as error:
        return None, f"cannot write {getattr(error, 'filename', None) or where}: {reason(error)}"
