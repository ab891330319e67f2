"""The checkpoints of a run: their names, which of them are complete, and which are kept.

A checkpoint of step 20 is ``step-00000020``. If that name is taken, because a run went back and repeats the step, it is
``step-00000020.1``. Directories whose names begin with a dot are being written or deleted. "Newest" goes by serial, the
order in which checkpoints were made, so a new run in an old directory resumes from its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count

from zeromesh.checkpoint.dcp import METADATA, OBJECTS
from zeromesh.checkpoint.manifest import HEAD_BYTES, MANIFEST, DamagedError, read_head
from zeromesh.checkpoint.storage import Storage, has_file, reason
from zeromesh.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
SAVING = ".saving-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A complete checkpoint. `serial` numbers the directory's checkpoints in the order in which they were made."""

    name: str
    step: int
    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    complete: tuple[Found, ...]  # newest first
    refused: tuple[str, ...]  # why other directories that are named like checkpoints are none, one line each
    unfinished: tuple[str, ...]  # on storage without renames: those without a manifest, that a save has begun to fill

    @property
    def next_serial(self) -> int:
        return 1 + max((found.serial for found in self.complete), default=0)


def list_checkpoints(storage: Storage) -> Listing:
    """Lists the checkpoints by the first line of each manifest. Raises OSError if the directory cannot be read."""
    complete, refused, unfinished = [], [], []
    for name in storage.names():
        if not _NAME.fullmatch(name):
            continue
        where = storage.where(name, MANIFEST)
        try:
            with storage.open(name, MANIFEST) as stream:
                head = read_head(stream.read(HEAD_BYTES), where)
            require_named(name, head["step"], where)
            complete.append(Found(name=name, step=head["step"], serial=head["serial"]))
        except CheckpointError as error:
            refused.append(str(error))
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not storage.renames and not _is_torchs(storage, name):
                unfinished.append(name)
            else:
                refused.append(f"{where} cannot be read: {reason(error)}")
    ordered = sorted(complete, key=lambda f: (-f.serial, f.name))
    return Listing(complete=tuple(ordered), refused=tuple(refused), unfinished=tuple(unfinished))


def _is_torchs(storage: Storage, name: str) -> bool:
    """Whether it has an index of torch.distributed.checkpoint, but not the file that ours have beside it."""
    return has_file(storage, name, METADATA) and not has_file(storage, name, OBJECTS)


def require_named(name: str, step: int, where: str) -> None:
    """Raises DamagedError if `name` is that of a checkpoint of another step. Names of other kinds fit any step."""
    named = _NAME.fullmatch(name)
    if named and int(named[1]) != step:
        raise DamagedError(
            f"{where} is the manifest of step {step}, in a directory that is named as one of step {int(named[1])}: "
            f"files of two checkpoints are mixed"
        )


def free_name(step: int, taken: Sequence[str]) -> str:
    """Returns an unused name for a checkpoint of `step`.

    >>> free_name(20, []), free_name(20, ["step-00000020"])
    ('step-00000020', 'step-00000020.1')
    """
    first = f"step-{step:08}"
    names = chain([first], (f"{first}.{revision}" for revision in count(1)))
    return next(name for name in names if name not in taken)


def superfluous(complete: Sequence[Found], *, keep: int, keep_every: int) -> list[Found]:
    """The checkpoints to delete: all of `complete`, newest first, except the `keep` newest and the newest of each step
    that is a multiple of `keep_every` (0: no such steps).

    >>> steps = [Found(name="", step=step, serial=step) for step in (50, 40, 30, 20, 10)]
    >>> [found.step for found in superfluous(steps, keep=2, keep_every=20)]
    [30, 10]
    """
    kept: set[int] = set()
    old = []
    for index, found in enumerate(complete):
        lasting = keep_every > 0 and found.step % keep_every == 0 and found.step not in kept
        kept.add(found.step)
        if index >= keep and not lasting:
            old.append(found)
    return old


def clear_leftovers(storage: Storage) -> None:
    """Deletes directories that a killed job left half written or half deleted. The caller holds the lock."""
    for name in storage.names():
        if name.startswith((SAVING, ".removed-")):
            storage.remove(name)
