"""Where checkpoints lie: a directory of directories of files, on a local (or mounted) file system or behind fsspec.

Only what checkpoints need. A directory is made under a name that readers do not look at, filled, and then published
under its own: by a rename where that is atomic. On an object store there is no rename, so files are written under their
final name, and the manifest, which is written last, makes the checkpoint visible.

A file that has been written is not yet on the medium. The kernel is asked to begin with its first bytes while the next
are written; its sync begins when it is closed, in a thread, and goes on while ranks exchange what they have written and
other files follow; `settle` waits for all of them. A file system commits syncs that come together once, and one after
the other once each.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

from zeromesh.errors import CheckpointError

LOCK = ".lock"
_SYNC_THREADS = 4
"""A rank creates as many files."""
_WRITEBACK_BYTES = 8 << 20
"""A disk that is idle gets its next work this early; larger than what one request can be, so that none is cut."""


class Source(Protocol):
    """A file that is being read."""

    @property
    def num_bytes(self) -> int:
        """Its length."""
        ...

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
        """What lies in it, checkpoints or not; nothing where the storage does not exist yet."""
        ...

    def make(self, name: str) -> None: ...

    def create(self, name: str, file: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A new file; when the context ends without an error its content is on its way to the medium."""
        ...

    def settle(self) -> None:
        """Returns when all that this process has created is on the medium."""
        ...

    def read(self, name: str, file: str, limit: int) -> bytes:
        """The first bytes of a file, at most `limit`."""
        ...

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


def reason(error: Exception) -> str:
    """What went wrong, for a message: the system's words, or the kind of error and its own."""
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


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
        self._syncing: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(max_workers=_SYNC_THREADS, thread_name_prefix="zeromesh-sync")

    def where(self, *parts: str) -> str:
        return str(self.root.joinpath(*parts))

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root))
        except FileNotFoundError:
            return []

    def make(self, name: str) -> None:
        self.root.joinpath(name).mkdir(parents=True)

    @contextmanager
    def create(self, name: str, file: str) -> Iterator[IO[bytes]]:
        path = self.root / name / file
        # Unbuffered: tensors are written from their own memory.
        with open(path, "xb", buffering=0) as stream:
            yield cast(IO[bytes], _Whole(stream))
            # The same open file, so that what the kernel could not write is told to the one who syncs it.
            self._syncing.append(self._threads.submit(_sync, os.dup(stream.fileno()), path))

    def settle(self) -> None:
        syncing, self._syncing = self._syncing, []
        wait(syncing)  # all of them, before one raises
        for future in syncing:
            future.result()

    def read(self, name: str, file: str, limit: int) -> bytes:
        descriptor = open_regular(self.root / name / file)
        try:
            # Never more than there is: `limit` may be much, and the memory for it is taken first.
            data = bytearray(min(limit, os.fstat(descriptor).st_size))
            return bytes(data[: _read_at(descriptor, 0, memoryview(data))])
        finally:
            os.close(descriptor)

    def open(self, name: str, file: str) -> Source:
        return _LocalSource(self.root / name / file)

    def publish(self, temporary: str, final: str) -> None:
        _sync(os.open(self.root / temporary, os.O_RDONLY), self.root / temporary)
        os.rename(self.root / temporary, self.root / final)
        _sync(os.open(self.root, os.O_RDONLY), self.root)

    def remove(self, name: str) -> None:
        hidden = self.root / name
        if not name.startswith("."):
            # Out of sight at once: what is half deleted must not look like a checkpoint.
            hidden = self.root / f".removed-{name}"
            os.rename(self.root / name, hidden)
        if hidden.is_symlink() or not hidden.is_dir():
            hidden.unlink()  # what it points to is not ours
        else:
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
        _LOCKED.add(self)

    def unlock(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also where a forked process has not closed it yet
            self._leave()

    def _leave(self) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None
        _LOCKED.discard(self)


_LOCKED: set[LocalStorage] = set()


def _leave_all() -> None:
    """A lock is the open file's, which a fork shares: the child of a killed job would hold it as long as it lives."""
    for storage in tuple(_LOCKED):
        storage._leave()


os.register_at_fork(after_in_child=_leave_all)


class _Whole:
    """A raw file whose `write` writes everything; the kernel takes at most 2 GiB at once."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._written = 0
        self._begun = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += self._raw.write(view[done:])
        self._written += done
        if self._written - self._begun >= _WRITEBACK_BYTES:
            _begin_writeback(self._raw.fileno(), self._begun, self._written - self._begun)
            self._begun = self._written
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def _find_writeback() -> Callable[[int, int, int, int], int]:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):  # Linux has it; elsewhere the sync does all of the work
        return lambda descriptor, offset, length, flags: 0
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    found: Callable[[int, int, int, int], int] = function
    return found


_sync_file_range = _find_writeback()


def _begin_writeback(descriptor: int, offset: int, length: int) -> None:
    """Has the kernel begin to write a part of a file. It may refuse: the sync comes anyway, and tells of errors."""
    sync_file_range_write = 2
    _sync_file_range(descriptor, offset, length, sync_file_range_write)


class _LocalSource:
    def __init__(self, path: Path) -> None:
        self._descriptor = open_regular(path)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_into(self, offset: int, target: memoryview) -> int:
        return _read_at(self._descriptor, offset, target)

    def close(self) -> None:
        os.close(self._descriptor)


def open_regular(path: Path) -> int:
    """Refuses what is no file: to open a pipe would wait for its other end for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def _read_at(descriptor: int, offset: int, target: memoryview) -> int:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _sync(descriptor: int, path: Path) -> None:
    """Syncs and closes."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
