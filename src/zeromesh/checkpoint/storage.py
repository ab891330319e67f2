"""Where checkpoints lie: a directory of directories of files, on a local (or mounted) file system or behind fsspec.

Only what checkpoints need. A directory is made under a name that readers do not look at, filled, and then published
under its own: by a rename where that is atomic. On an object store there is no rename, so files are written under their
final name, and the manifest, which is written last, makes the checkpoint visible.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

from zeromesh.errors import CheckpointError

LOCK = ".lock"


class Source(Protocol):
    """A file that is being read."""

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fills `target` from `offset` on; the number of bytes, fewer only at the end of the file."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """A directory of checkpoints. Failures are OSError."""

    def where(self, *parts: str) -> str:
        """The full name, for people."""
        ...

    def names(self) -> list[str]:
        """Directories; none where the storage does not exist yet."""
        ...

    def make(self, name: str) -> None: ...

    def create(self, name: str, file: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A new file; when the context ends without an error its content is on the medium."""
        ...

    def read(self, name: str, file: str, limit: int = -1) -> bytes: ...

    def open(self, name: str, file: str) -> Source: ...

    def publish(self, temporary: str, final: str) -> None: ...

    def remove(self, name: str) -> None: ...

    def lock(self, wait_s: float) -> None:
        """Refuses all other writers until `unlock`, or the end of the process. Raises CheckpointError if refused."""
        ...

    def unlock(self) -> None: ...

    @property
    def renames(self) -> bool:
        """Whether `publish` can give a directory another name."""
        ...


def open_storage(location: str | os.PathLike[str]) -> Storage:
    """A local directory, or any URL that fsspec knows (``s3://bucket/run``)."""
    text = os.fspath(location)
    if "://" not in text:
        return LocalStorage(Path(text))
    from zeromesh.checkpoint.remote import RemoteStorage

    return RemoteStorage(text)


class LocalStorage:
    """A directory of a file system with atomic renames."""

    renames = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: int | None = None

    def where(self, *parts: str) -> str:
        return str(self.root.joinpath(*parts))

    def names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
        except FileNotFoundError:
            return []

    def make(self, name: str) -> None:
        self.root.joinpath(name).mkdir(parents=True)

    @contextmanager
    def create(self, name: str, file: str) -> Iterator[IO[bytes]]:
        # Unbuffered: tensors are written from their own memory.
        with open(self.root / name / file, "xb", buffering=0) as stream:
            yield cast(IO[bytes], _Whole(stream))
            os.fsync(stream.fileno())

    def read(self, name: str, file: str, limit: int = -1) -> bytes:
        with open(self.root / name / file, "rb") as stream:
            return stream.read(limit)

    def open(self, name: str, file: str) -> Source:
        return _LocalSource(self.root / name / file)

    def publish(self, temporary: str, final: str) -> None:
        _sync_directory(self.root / temporary)
        os.rename(self.root / temporary, self.root / final)
        _sync_directory(self.root)

    def remove(self, name: str) -> None:
        # Out of sight at once: what is half deleted must not look like a checkpoint.
        hidden = self.root / f".removed-{name.lstrip('.')}"
        if not name.startswith("."):
            os.rename(self.root / name, hidden)
        else:
            hidden = self.root / name
        shutil.rmtree(hidden, ignore_errors=True)

    def lock(self, wait_s: float) -> None:
        """flock: the kernel releases it with the process, however that ends."""
        self.root.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        end = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    owner = os.pread(lock, 200, 0).decode(errors="replace") or "unknown"
                    os.close(lock)
                    raise CheckpointError(
                        f"{self.root} is being written by another job ({owner}); two jobs cannot save to one "
                        f"directory: give each its own, or end the other"
                    ) from None
                time.sleep(min(0.1, wait_s))
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._lock = lock

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _Whole:
    """A raw file whose `write` writes everything; the kernel takes at most 2 GiB at once."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += self._raw.write(view[done:])
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class _LocalSource:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)

    def read_into(self, offset: int, target: memoryview) -> int:
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        os.close(self._descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
