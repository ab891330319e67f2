"""One rank's data file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO
from zlib import crc32

import torch

from zeromesh.checkpoint.container import MAX_ITEM_BYTES, Container
from zeromesh.checkpoint.manifest import BLOCK_BYTES, Chunk, TensorEntry
from zeromesh.checkpoint.storage import Storage
from zeromesh.pieces.piece import DTYPE_NAMES, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A box of a tensor, as a rank has written it.

    Args:
        name, dtype, shape: of the tensor.
        offsets, sizes: of the box.
        chunk: the same as a range, and where it is.
        position, length: of the zip around it in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    chunk: Chunk
    position: int
    length: int


def write_file(storage: Storage, directory: str, file: str, pieces: Sequence[Piece]) -> list[Written]:
    """Writes the pieces, in host memory, box by box.

    Raises:
        OSError: as the file system has it.
    """
    written: list[Written] = []
    with storage.create(directory, file) as stream:
        position = 0
        for piece in pieces:
            for start, stop in _cuts(piece):
                for box in piece.part(start, stop).boxes:
                    data = piece.part(box.start, box.stop).local
                    container = Container(dtype=data.dtype, sizes=box.sizes, position=position)
                    content = memoryview(data.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs
                    stream.write(container.head)
                    crcs = _write_blocks(stream, content)
                    tail = container.tail(crcs[-1], len(content))
                    stream.write(tail)
                    length = len(container.head) + len(content) + len(tail)
                    chunk = Chunk(
                        start=box.start,
                        stop=box.stop,
                        file=file,
                        offset=container.data_offset,
                        crcs=crcs,
                        within=piece.within,
                    )
                    written.append(
                        Written(
                            name=piece.name,
                            dtype=DTYPE_NAMES[data.dtype],
                            shape=piece.shape,
                            offsets=box.offsets,
                            sizes=box.sizes,
                            chunk=chunk,
                            position=position,
                            length=length,
                        )
                    )
                    position += length
    return written


def _cuts(piece: Piece) -> Iterator[tuple[int, int]]:
    step = MAX_ITEM_BYTES // piece.local.itemsize
    for start in range(piece.start, piece.stop, step):
        yield start, min(start + step, piece.stop)


def _write_blocks(stream: IO[bytes], content: memoryview) -> tuple[int, ...]:
    """Writes each block when its checksum is known: it is in the processor's cache then, and the disk begins early."""
    crcs, crc = [], 0
    for start in range(0, len(content), BLOCK_BYTES):
        block = content[start : start + BLOCK_BYTES]
        crc = crc32(block, crc)
        crcs.append(crc)
        stream.write(block)
    return tuple(crcs)


def files_of(written: Iterable[Written]) -> dict[str, int]:
    """Bytes of each file that ranks have written."""
    files: dict[str, int] = {}
    for row in written:
        files[row.chunk.file] = max(files.get(row.chunk.file, 0), row.position + row.length)
    return files


def entries_of(written: Iterable[Written], empty: Iterable[Piece] = ()) -> dict[str, TensorEntry]:
    """What all ranks have written, by tensor.

    Args:
        written: by all ranks.
        empty: pieces of tensors without elements, of which nothing is written.
    """
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
