"""Checkpoints behind fsspec: object stores, HDFS, memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from zeromesh.checkpoint.storage import Source
from zeromesh.errors import CheckpointError, InternalError


class RemoteStorage:
    """A directory of any fsspec file system. It cannot be locked: two jobs must not save to one URL."""

    renames = False

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped]  # it has none

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
        """Nothing: a file is on the medium when it has been closed."""

    def read(self, name: str, file: str, limit: int) -> bytes:
        data: bytes
        with self._files.open(self._path(name, file), "rb") as stream:
            data = stream.read(limit)
        return data

    def open(self, name: str, file: str) -> Source:
        return _RemoteSource(self._files.open(self._path(name, file), "rb"))

    def publish(self, temporary: str, final: str) -> None:
        raise InternalError(f"{self._url} has no renames: files are written under their final name")

    def remove(self, name: str) -> None:
        # The manifest first: without it what is half deleted does not look like a checkpoint.
        manifest = self._path(name, "manifest.json")
        if self._files.exists(manifest):
            self._files.rm(manifest)
        if self._files.exists(self._path(name)):
            self._files.rm(self._path(name), recursive=True)

    def lock(self, wait_s: float) -> None:
        """Nothing: fsspec has no locks."""

    def unlock(self) -> None:
        """Nothing."""

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))


class _RemoteSource:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def num_bytes(self) -> int:
        length: int = self._stream.seek(0, 2)
        return length

    def read_into(self, offset: int, target: memoryview) -> int:
        self._stream.seek(offset)
        data = self._stream.read(len(target))
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
