"""Storage for checkpoints: directories of files on a local (or mounted) file system, or behind fsspec.

A directory is made under a name that readers ignore, filled, and then published under its own name by an atomic rename.
An object store has no renames. There files are written under their final name, and the manifest, which is written last,
makes the checkpoint visible. Failures are OSError.

A file that has been written is not yet on the medium. Its sync begins in a thread when the file is closed, and runs
while other files and exchanges between ranks follow; `settle` waits for all syncs. A file system commits syncs that
come together once, but syncs in sequence once each.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO

from zeromesh.checkpoint.manifest import MANIFEST, DamagedError
from zeromesh.errors import CheckpointError, InternalError

LOCK = ".lock"
_SYNC_THREADS = 4
"""A rank creates about as many files."""


class LocalStorage:
    """A directory of a file system with atomic renames."""

    renames = True  # `publish` can give a directory another name

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: int | None = None
        self._syncing: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(max_workers=_SYNC_THREADS, thread_name_prefix="zeromesh-sync")

    def where(self, *parts: str) -> str:
        """Returns the full name, for people."""
        return str(self.root.joinpath(*parts))

    def names(self) -> list[str]:
        """Returns the names of all its directories and files; none if the storage does not exist yet."""
        try:
            return sorted(os.listdir(self.root))
        except FileNotFoundError:
            return []

    def make(self, name: str) -> None:
        self.root.joinpath(name).mkdir(parents=True)

    @contextmanager
    def create(self, name: str, file: str) -> Iterator[IO[bytes]]:
        """Creates a file. When the context ends without an error, its content is on the way to the medium."""
        path = self.root / name / file
        with open(path, "xb") as stream:
            yield stream
            stream.flush()
            # A duplicate of the same open file, since only there the kernel reports failed writes at the sync.
            self._syncing.append(self._threads.submit(_sync, os.dup(stream.fileno()), path))

    def settle(self) -> None:
        """Waits until everything that this process has created is on the medium."""
        syncing, self._syncing = self._syncing, []
        wait(syncing)  # for all of them, before one raises
        for future in syncing:
            future.result()

    def open(self, name: str, file: str) -> BufferedReader:
        return open(open_regular(self.root / name / file), "rb")

    def publish(self, temporary: str, final: str) -> None:
        _sync(os.open(self.root / temporary, os.O_RDONLY), self.root / temporary)
        os.rename(self.root / temporary, self.root / final)
        _sync(os.open(self.root, os.O_RDONLY), self.root)

    def remove(self, name: str) -> None:
        hidden = self.root / name
        if not name.startswith("."):
            # Hides it first: a half deleted directory must not look like a checkpoint.
            hidden = self.root / f".removed-{name}"
            os.rename(self.root / name, hidden)
        if hidden.is_symlink() or not hidden.is_dir():
            hidden.unlink()  # a link's target is not ours
        else:
            shutil.rmtree(hidden, ignore_errors=True)

    def lock(self, wait_s: float) -> None:
        """Keeps all other writers out until `unlock`. The kernel releases a flock when the process ends, in any way.
        Raises CheckpointError if another job holds the lock."""
        self.root.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        end, own = time.monotonic() + wait_s, f"process {os.getpid()} on {socket.gethostname()}"
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    owner = os.pread(lock, 200, 0).decode(errors="replace") or "unknown"
                    os.close(lock)
                    by = f"another job ({owner})" if owner != own else "zm.Checkpoints of this process, still open"
                    raise CheckpointError(
                        f"{self.root} is being written by {by}; two cannot save to one directory: give each its own, "
                        f"or end the other"
                    ) from None
                time.sleep(min(0.1, wait_s))
        os.ftruncate(lock, 0)
        os.pwrite(lock, own.encode(), 0)
        self._lock = lock
        _LOCKED.add(self)

    def unlock(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # releases it even if a forked process still has the file open
            self._leave()

    def _leave(self) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None
        _LOCKED.discard(self)


_LOCKED: set[LocalStorage] = set()


def _leave_all() -> None:
    """Closes the lock in a forked child. A lock belongs to the open file, which a fork shares, so the child of a killed
    job would hold it as long as it lives."""
    for storage in tuple(_LOCKED):
        storage._leave()


os.register_at_fork(after_in_child=_leave_all)


class RemoteStorage:
    """A directory of any fsspec file system. It cannot be locked: two jobs must not save to one URL."""

    renames = False

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped]  # fsspec has no stubs

            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"cannot open {url}: {error}; install fsspec and what it needs for this URL"
            ) from error
        self._url = url

    def where(self, *parts: str) -> str:
        return "/".join((self._url.rstrip("/"), *parts))

    def names(self) -> list[str]:
        try:
            entries = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory")

    def make(self, name: str) -> None:
        self._files.makedirs(self._path(name), exist_ok=True)

    @contextmanager
    def create(self, name: str, file: str) -> Iterator[IO[bytes]]:
        with self._files.open(self._path(name, file), "wb") as stream:
            yield stream

    def settle(self) -> None:
        """Does nothing: a file is on the medium when it has been closed."""

    def open(self, name: str, file: str) -> BufferedReader:
        found: BufferedReader = self._files.open(self._path(name, file), "rb")
        return found

    def publish(self, temporary: str, final: str) -> None:
        raise InternalError(f"{self._url} has no renames: files are written under their final name")

    def remove(self, name: str) -> None:
        # The manifest goes first: without it a half deleted directory does not look like a checkpoint.
        manifest = self._path(name, MANIFEST)
        if self._files.exists(manifest):
            self._files.rm(manifest)
        if self._files.exists(self._path(name)):
            self._files.rm(self._path(name), recursive=True)

    def lock(self, wait_s: float) -> None:
        """Does nothing: fsspec has no locks."""

    def unlock(self) -> None:
        """Does nothing."""

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))


Storage = LocalStorage | RemoteStorage


def open_storage(location: str | os.PathLike[str]) -> Storage:
    """Opens a local directory, or any URL that fsspec knows (``s3://bucket/run``)."""
    text = os.fspath(location)
    return RemoteStorage(text) if "://" in text else LocalStorage(Path(text))


def reason(error: Exception) -> str:
    """Returns an error as text for a message: the system's text, or the error's class and message."""
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def has_file(storage: Storage, name: str, file: str) -> bool:
    """Whether the directory `name` has a readable file `file`."""
    try:
        with storage.open(name, file) as stream:
            stream.read(1)
    except OSError:
        return False
    return True


def read_index(storage: Storage, name: str, file: str, most: int) -> bytes:
    """Reads a manifest or index. Raises DamagedError if it has more than `most` bytes, which no such file has; OSError
    if it cannot be read."""
    with storage.open(name, file) as stream:
        if (length := stream.seek(0, os.SEEK_END)) > most:
            raise DamagedError(
                f"{storage.where(name, file)} is longer than any index is: {length} bytes of at most {most}"
            )
        stream.seek(0)
        return stream.read(length)


def read_at(stream: BufferedReader, offset: int, target: memoryview) -> int:
    """Fills `target` from `offset` on. Returns the number of bytes, which is smaller only at the end of the file."""
    if stream.seek(0, os.SEEK_END) <= offset:  # file systems refuse offsets that are too large
        return 0
    stream.seek(offset)
    done = 0
    while done < len(target) and (count := stream.readinto(target[done:])):
        done += count
    return done


def open_regular(path: Path) -> int:
    """Opens a file and refuses anything else: opening a pipe would wait for its other end for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def _sync(descriptor: int, path: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
