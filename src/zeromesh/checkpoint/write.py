"""Writes one rank's data file: boxes of tensors, each in its own zip as torch makes it, one zip after another.

torch.distributed.checkpoint reads such files. The zips are not made by `torch.save`, for two reasons. A tensor's bytes
go to the file without a copy. And their position is known, so they are read without looking into the zip and without
unpickling anything.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any
from zipfile import ZipFile, ZipInfo

import torch
from torch import Tensor
from torch.storage import TypedStorage

from zeromesh.checkpoint.manifest import BLOCK_BYTES, Chunk, TensorEntry
from zeromesh.checkpoint.storage import Storage
from zeromesh.pieces.piece import DTYPE_NAMES, Piece

_ALIGNMENT = 64
"""A tensor's bytes begin at multiples of this in a file, as with `torch.save`."""

_HEADER_BYTES = 30 + 4
"""The headers before a zip entry's data: the entry's own and its padding's, without the name and the padding itself."""

_MAX_ITEM_BYTES = 1 << 30
"""Longer slices are cut, so that no entry needs zip's 64-bit form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A box of a tensor that a rank has written: by offsets and sizes, and as a range (`chunk`). `position` and
    `length` tell where the zip around it lies in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    chunk: Chunk
    position: int
    length: int


def write_file(storage: Storage, directory: str, file: str, pieces: Sequence[Piece]) -> list[Written]:
    """Writes the pieces, which are in host memory, box by box."""
    written: list[Written] = []
    with storage.create(directory, file) as stream:
        position = 0
        for piece in (part for whole in pieces for part in _cut(whole)):
            for box in piece.boxes:
                data = piece.part(box.start, box.stop).local
                begin, crcs, length = write_tensor(stream, position, data, box.sizes)
                chunk = Chunk(
                    start=box.start, stop=box.stop, file=file, offset=position + begin, crcs=crcs, within=piece.within
                )
                row = Written(
                    name=piece.name,
                    dtype=DTYPE_NAMES[data.dtype],
                    shape=piece.shape,
                    offsets=box.offsets,
                    sizes=box.sizes,
                    chunk=chunk,
                    position=position,
                    length=length,
                )
                written.append(row)
                position += length
    return written


def _cut(piece: Piece) -> Iterator[Piece]:
    step = _MAX_ITEM_BYTES // piece.local.itemsize
    for start in range(piece.start, piece.stop, step):
        yield piece.part(start, min(start + step, piece.stop))


def write_tensor(
    stream: IO[bytes], position: int, data: Tensor, sizes: Sequence[int]
) -> tuple[int, tuple[int, ...], int]:
    """Writes a tensor's elements, flat in host memory, as the zip file that `torch.save` would make.

    `position` is that of the stream in its own file, and the tensor's bytes are aligned to it. Returns the offset of
    the tensor's bytes, running CRC-32s of their blocks, and the total length.
    """
    content = data.view(torch.uint8).numpy()
    alone = torch.from_numpy(content).view(data.dtype).view(tuple(sizes))  # its storage has no other tensors
    description = io.BytesIO()
    _Pickler(description, protocol=2).dump(alone)
    counted, crcs = _Counted(stream), list[int]()
    with ZipFile(counted, "w") as archive:  # type: ignore[call-overload]  # it has all methods that ZipFile needs
        archive.writestr(ZipInfo("archive/data.pkl"), description.getvalue())
        archive.writestr(ZipInfo("archive/byteorder"), b"little")
        entry = ZipInfo("archive/data/0")
        entry.file_size = len(content)
        padding = -(position + counted.tell() + _HEADER_BYTES + len(entry.filename)) % _ALIGNMENT
        entry.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding  # marked as in torch
        with archive.open(entry, "w") as opened:
            begin, view = counted.tell(), memoryview(content)  # type: ignore[arg-type]  # numpy's stubs
            # In blocks, so that a block is still in the processor's cache when it is written, and the disk begins
            # early.
            for start in range(0, len(view), BLOCK_BYTES):
                opened.write(view[start : start + BLOCK_BYTES])
                crcs.append(opened._crc)  # computing it ourselves would sum each byte twice
        archive.writestr(ZipInfo("archive/version"), b"3\n")
    return begin, tuple(crcs), counted.tell()


class _Counted:
    """Wraps a stream for an archive in the middle of a file: it cannot seek, and counts from here."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._count = stream, 0

    def write(self, data: Any) -> int:
        count = self._stream.write(data)
        self._count += count
        return count

    def tell(self) -> int:
        return self._count

    def flush(self) -> None:
        """Does nothing: flushing for each tensor is slow."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, TypedStorage):
            kind = getattr(torch, obj._pickle_storage_type())  # type: ignore[no-untyped-call]
            return "storage", kind, "0", "cpu", obj._size()  # type: ignore[no-untyped-call]
        if isinstance(obj, torch.UntypedStorage):  # dtypes that came later
            return "storage", torch.UntypedStorage, "0", "cpu", obj.nbytes()
        return None


def files_of(written: Iterable[Written]) -> dict[str, int]:
    """Returns the bytes of each file that ranks have written."""
    files: dict[str, int] = {}
    for row in written:
        files[row.chunk.file] = max(files.get(row.chunk.file, 0), row.position + row.length)
    return files


def entries_of(written: Iterable[Written], empty: Iterable[Piece] = ()) -> dict[str, TensorEntry]:
    """Returns the manifest's entries for everything that all ranks wrote, and for tensors without elements, for which
    nothing is written."""
    rows: dict[str, list[Written]] = {}
    for row in written:
        rows.setdefault(row.name, []).append(row)
    entries = {}
    for name, found in rows.items():
        chunks = tuple(sorted((row.chunk for row in found), key=lambda chunk: chunk.start))
        entries[name] = TensorEntry(dtype=found[0].dtype, shape=found[0].shape, chunks=chunks)
    for piece in empty:
        entries.setdefault(piece.name, TensorEntry(dtype=DTYPE_NAMES[piece.local.dtype], shape=piece.shape, chunks=()))
    return entries
