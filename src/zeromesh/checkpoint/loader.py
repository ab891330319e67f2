"""Finds a checkpoint that loads, and loads it. All ranks take the same checkpoint, or raise the same error."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial

from zeromesh.checkpoint.dcp import METADATA, OBJECTS, read_foreign
from zeromesh.checkpoint.directory import Listing, list_checkpoints
from zeromesh.checkpoint.manifest import MANIFEST, DamagedError
from zeromesh.checkpoint.peers import Peers
from zeromesh.checkpoint.read import Reader, read_manifest
from zeromesh.checkpoint.storage import Storage, has_file, open_storage, reason
from zeromesh.errors import CheckpointError, MismatchError, ZeromeshError

Restore = Callable[[Reader], object]
"""Takes a rank's part out of a checkpoint. Raises CheckpointError; DamagedError if another checkpoint may do."""


def load_newest(storage: Storage, peers: Peers, restore: Restore) -> Reader | None:
    """Loads the newest complete checkpoint whose content is intact, and returns its reader; None if there never was
    one. Warns of checkpoints that it passes over. Raises CheckpointError if there are checkpoints but none can be
    loaded, or if one is of another model; CommunicationError if a rank did not take part."""
    names, refused = _candidates(storage, peers)
    for problem in refused:
        _warn(peers, problem)
    for name in names:
        try:
            return load_one(storage.where(name), partial(_open, storage, name), peers, restore)
        except DamagedError as error:
            refused.append(str(error))
            _warn(peers, str(error))
    if refused:
        raise CheckpointError(
            f"{storage.where()} has checkpoints, but none that can be loaded:\n  " + "\n  ".join(refused) + "\nStart "
            "again in a new directory, or give the path of a checkpoint elsewhere"
        )
    return None


def load_path(location: str | os.PathLike[str], peers: Peers, restore: Restore) -> Reader:
    """Loads the checkpoint at `location`: a checkpoint by zeromesh or torch, or the newest in a directory of
    zeromesh's. Raises CheckpointError if there is none, or it is damaged or of another model."""
    parent, name = os.path.split(os.fspath(location).rstrip("/"))
    storage = open_storage(parent or ".")
    single = has_file(storage, name, MANIFEST) or has_file(storage, name, METADATA)
    if peers.broadcast(single, "what is to be loaded"):
        return load_one(storage.where(name), partial(_open, storage, name), peers, restore)
    loaded = load_newest(open_storage(location), peers, restore)
    if loaded is None:
        raise CheckpointError(
            f"{os.fspath(location)} is no checkpoint (it has neither {MANIFEST} nor an index of "
            f"torch.distributed.checkpoint), and no directory of checkpoints: give the path of one"
        )
    return loaded


def _candidates(storage: Storage, peers: Peers) -> tuple[list[str], list[str]]:
    listing, problem = Listing(complete=(), refused=(), unfinished=()), ""
    if peers.rank == 0:
        try:
            listing = list_checkpoints(storage)
        except Exception as error:  # any error: other ranks wait for it
            problem = f"cannot read {storage.where()}: {reason(error)}"
    listing, problem = peers.broadcast((listing, problem), "the list of checkpoints")
    if problem:
        raise CheckpointError(problem)
    return [found.name for found in listing.complete], list(listing.refused)


_WORST = (MismatchError, DamagedError, CheckpointError)
"""Errors by precedence: the first of these that any rank has is raised, since the others may follow from it."""


def _open(storage: Storage, name: str) -> Reader:
    foreign = not has_file(storage, name, MANIFEST) and has_file(storage, name, METADATA)
    if foreign and has_file(storage, name, OBJECTS):
        missing = storage.where(name, MANIFEST)
        raise DamagedError(f"{missing} is missing or no file: a checkpoint of zeromesh's is not complete without it")
    return Reader(storage, name, read_foreign(storage, name) if foreign else read_manifest(storage, name))


def load_one(where: str, opened: Callable[[], Reader], peers: Peers, restore: Restore) -> Reader:
    """Loads from the reader that `opened` returns; all ranks raise the error of any rank."""
    loaded: Reader | None = None
    kind: type[ZeromeshError] = DamagedError
    problem, other = "", None
    try:
        with opened() as reader:
            restore(reader)
        loaded = reader
    except CheckpointError as error:
        problem, kind = str(error), DamagedError if isinstance(error, DamagedError) else CheckpointError
    except OSError as error:
        problem = f"{where} cannot be read: {reason(error)}"
    except Exception as error:  # any error: other ranks wait. It is not the checkpoint's fault: out of memory, say
        problem = f"rank {peers.rank} has not loaded {where}: {reason(error)}"
        kind, other = MismatchError, error
    step = None if loaded is None else loaded.manifest.step
    found = peers.all_gather((problem, _WORST.index(kind), step), f"whether all have loaded {where}")
    if other is not None:
        raise other
    for problem, index, _ in sorted((f for f in found if f[0]), key=lambda f: f[1]):
        raise _WORST[index](problem)
    if loaded is None or any(other_step != step for _, _, other_step in found):
        raise MismatchError(f"ranks do not see the same checkpoint {where}: steps {[f[2] for f in found]}")
    return loaded


def _warn(peers: Peers, problem: str) -> None:
    if peers.rank == 0:
        warnings.warn(f"a checkpoint is passed over: {problem}", stacklevel=4)
