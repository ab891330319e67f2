"""Reads ranges of tensors from a checkpoint, and verifies every byte before it is used."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BufferedReader
from typing import Self
from zlib import crc32

import torch
from torch import Tensor

from zeromesh.checkpoint.directory import require_named
from zeromesh.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    MAX_BYTES,
    Chunk,
    DamagedError,
    Manifest,
    TensorEntry,
    check_cover,
)
from zeromesh.checkpoint.storage import Storage, read_at, read_index
from zeromesh.errors import CheckpointError
from zeromesh.pieces.boxes import Box
from zeromesh.pieces.piece import DTYPES, Piece, copy_shared, whole
from zeromesh.pieces.region import Region, shared
from zeromesh.progress import note


class Reader:
    """Reads tensors of one checkpoint, a directory of the storage. Leaving it as a context closes its files."""

    def __init__(self, storage: Storage, directory: str, manifest: Manifest) -> None:
        self.manifest = manifest
        self._storage = storage
        self._directory = directory
        self._sources: dict[str, BufferedReader] = {}
        self._checked: set[str] = set()
        self._regions: dict[str, dict[Region | None, list[Chunk]]] = {}
        self._scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu")

    @property
    def where(self) -> str:
        return self._storage.where(self._directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def entry(self, name: str) -> TensorEntry:
        """Returns a tensor's entry, after checking that each element is there once. Raises DamagedError if not;
        CheckpointError if the dtype is not supported."""
        entry = self.manifest.tensors[name]
        if name not in self._checked:
            where = self._storage.where(self._directory, self.manifest.index)
            check_cover(name, entry, where)
            if entry.dtype not in DTYPES:
                raise CheckpointError(f"{where}: {name} has dtype {entry.dtype}, which is not supported")
            self._checked.add(name)
        return entry

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Fills each piece's memory with its range of the tensor of its name, converted to its dtype and device. Raises
        DamagedError if a file is missing, too short, or damaged."""
        for piece in pieces:
            note(piece.name)
            entry, boxes = self.entry(piece.name), piece.boxes
            for chunk in self._chunks(piece):
                for block, (region, start, stop) in enumerate(_blocks(entry, chunk)):
                    if _meets(piece, boxes, region, start, stop):
                        values = self._block(piece.name, chunk, block, DTYPES[entry.dtype])
                        copy_shared(replace(piece, start=start, local=values, within=region), piece)

    def whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns a whole tensor in host memory. Raises as `entry` and `fill` do."""
        found = torch.empty(self.entry(name).shape, dtype=dtype, device="cpu")
        self.fill([whole(name, found)])
        return found

    def _chunks(self, piece: Piece) -> Iterator[Chunk]:
        """Yields the chunks that may hold elements of the piece."""
        if piece.name not in self._regions:
            regions = self._regions[piece.name] = {}
            for chunk in self.entry(piece.name).chunks:
                regions.setdefault(chunk.within, []).append(chunk)
        for within, chunks in self._regions[piece.name].items():
            first, last = 0, len(chunks)
            if within == piece.within:
                first = max(0, bisect_right(chunks, piece.start, key=lambda chunk: chunk.start) - 1)
                last = bisect_left(chunks, piece.stop, key=lambda chunk: chunk.start)
            yield from chunks[first:last]

    def _block(self, name: str, chunk: Chunk, block: int, dtype: torch.dtype) -> Tensor:
        begin = block * BLOCK_BYTES
        length = min(BLOCK_BYTES, (chunk.stop - chunk.start) * dtype.itemsize - begin)
        view = memoryview(self._scratch.numpy())[:length]  # type: ignore[arg-type]  # numpy's stubs
        file = self._storage.where(self._directory, chunk.file)
        try:
            found = read_at(self._source(chunk.file), chunk.offset + begin, view)
        except OSError as error:
            raise DamagedError(f"{file} cannot be read: {error.strerror or error}") from error
        if found < length:
            raise DamagedError(
                f"{file} is too short: {name} needs {length} bytes from {chunk.offset + begin} on, {found} are there"
            )
        if chunk.crcs is not None:
            if block >= len(chunk.crcs):
                raise DamagedError(f"{file}: the manifest has no checksum for block {block} of {name}")
            crc = crc32(view, chunk.crcs[block - 1] if block else 0)
            if crc != chunk.crcs[block]:
                raise DamagedError(
                    f"{file} is damaged: {length} bytes of {name} at {chunk.offset + begin} must have CRC-32 "
                    f"{chunk.crcs[block]:#010x}; got {crc:#010x}"
                )
        return self._scratch[:length].view(dtype)

    def _source(self, file: str) -> BufferedReader:
        if file not in self._sources:
            source = self._sources[file] = self._storage.open(self._directory, file)
            expected, where = self.manifest.files.get(file), self._storage.where(self._directory, file)
            if expected is not None and (size := source.seek(0, os.SEEK_END)) != expected:
                too = "short" if size < expected else "long"
                raise DamagedError(f"{where} is too {too}: it must have {expected} bytes, and has {size}")
        return self._sources[file]


def _blocks(entry: TensorEntry, chunk: Chunk) -> Iterator[tuple[Region, int, int]]:
    """Yields the range of each block of a chunk: (flattened region, first element, end)."""
    step, region = BLOCK_BYTES // DTYPES[entry.dtype].itemsize, chunk.within or Region.whole(entry.shape)
    for start in range(chunk.start, chunk.stop, step):
        yield region, start, min(start + step, chunk.stop)


def _meets(piece: Piece, boxes: Sequence[Box], region: Region, start: int, stop: int) -> bool:
    """Whether a piece, which consists of `boxes`, has any elements of a range."""
    if piece.region == region:
        return start < piece.stop and stop > piece.start
    return any(shared(own, other) for other in region.boxes(start, stop) for own in boxes)


def require_match(
    where: str, entries: Mapping[str, TensorEntry], wanted: Mapping[str, TensorEntry], prefix: str
) -> None:
    """Raises CheckpointError, which names the differences, unless the tensors under `prefix` are the `wanted` ones.

    Values of another precision are converted. Floating-point numbers and integers are not converted into each other.
    """
    shapes = {name: entry.shape for name, entry in wanted.items()}
    found = {name: entry.shape for name, entry in entries.items() if name.startswith(prefix)}
    lines = [f"{n.removeprefix(prefix)}: in the model, not in the checkpoint" for n in shapes if n not in found]
    lines += [f"{n.removeprefix(prefix)}: in the checkpoint, not in the model" for n in found if n not in shapes]
    lines += [
        f"{name.removeprefix(prefix)}: shape {shape} in the model, {found[name]} in the checkpoint"
        for name, shape in shapes.items()
        if name in found and found[name] != shape
    ]
    lines += [
        f"{n.removeprefix(prefix)}: {DTYPES[w.dtype]} in the model, {entries[n].dtype} in the checkpoint"
        for n, w in wanted.items()
        if n in found and not same_kind(DTYPES[w.dtype], DTYPES.get(entries[n].dtype))
    ]
    if lines:
        more = f"\n  and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise CheckpointError(
            f"{where} is a checkpoint of another model; {len(lines)} of its tensors differ:\n  "
            + "\n  ".join(lines[:10])
            + more
        )


def same_kind(one: torch.dtype, other: torch.dtype | None) -> bool:
    """Whether both are floating-point, integer or bool dtypes, so that one converts to the other. None, for an unknown
    dtype, passes."""
    return other is None or (one.is_floating_point, one is torch.bool) == (other.is_floating_point, other is torch.bool)


def read_manifest(storage: Storage, directory: str) -> Manifest:
    """Reads the manifest of a checkpoint. Raises DamagedError if it is missing or damaged."""
    where = storage.where(directory, MANIFEST)
    try:
        data = read_index(storage, directory, MANIFEST, MAX_BYTES)
    except OSError as error:
        raise DamagedError(f"{where} cannot be read: {error.strerror or error}") from error
    manifest = Manifest.from_bytes(data, where)
    require_named(directory, manifest.step, where)
    return manifest
