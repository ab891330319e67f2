"""Writes the index with which torch.distributed.checkpoint reads our checkpoints, and reads its checkpoints.

Its index is a pickle: a program that names the functions it calls. Only names on a short list are accepted, and these
stand for inert records, so no code of the checkpoint's choice can run. Memory is bounded by the size of the file:
numbers in the pickle cannot make it take more.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zeromesh.checkpoint.manifest import Chunk, DamagedError, Manifest, TensorEntry
from zeromesh.checkpoint.storage import Storage, read_at, read_index
from zeromesh.checkpoint.write import Written
from zeromesh.errors import CheckpointError
from zeromesh.pieces.boxes import runs_of
from zeromesh.pieces.piece import DTYPES

METADATA = ".metadata"
OBJECTS = "objects.distcp"
Sizes = tuple[int, ...]


def write_metadata(
    storage: Storage,
    directory: str,
    written: Iterable[Written],
    empty: Mapping[str, TensorEntry],
    objects: Mapping[str, Any],
) -> None:
    """Writes the index that torch's reader needs; zeromesh itself never reads it. `written` is that of all ranks,
    `empty` are tensors without elements, and `objects` are values other than tensors, under the names that `dcp.load`
    looks for."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for row in written:
        entry = tensors.setdefault(row.name, _tensor(row.dtype, row.shape))
        entry.chunks.append(ChunkStorageMetadata(offsets=torch.Size(row.offsets), sizes=torch.Size(row.sizes)))
        index = MetadataIndex(row.name, row.offsets, len(entry.chunks) - 1)
        places[index] = _StorageInfo(row.chunk.file, row.position, row.length)
    for name, described in empty.items():
        tensors.setdefault(name, _tensor(described.dtype, described.shape))
    with storage.create(directory, OBJECTS) as stream:
        position = 0
        for name, value in objects.items():
            file = io.BytesIO()
            torch.save(value, file)
            places[MetadataIndex(name)] = _StorageInfo(OBJECTS, position, stream.write(file.getvalue()))
            position += file.tell()
    names = [*tensors, *objects]
    metadata = Metadata(
        state_dict_metadata={**tensors, **{name: BytesStorageMetadata() for name in objects}},
        planner_data={name: _path(name) for name in names},
        storage_data=places,
        version=CURRENT_DCP_VERSION,
    )
    with storage.create(directory, METADATA) as stream:
        stream.write(pickle.dumps(metadata))


def _tensor(dtype: str, shape: tuple[int, ...]) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=DTYPES[dtype])
    return TensorStorageMetadata(properties=properties, size=torch.Size(shape), chunks=[])


def _path(name: str) -> tuple[str | int, ...]:
    """Where a flat name stood in the nested state dict. Parameters' names contain dots themselves."""
    kind, _, rest = name.partition(".")
    if kind == "optim" and rest.startswith("state."):
        param, _, key = rest.removeprefix("state.").rpartition(".")
        return kind, "state", param, key
    if kind == "optim" and rest.startswith("param_groups."):
        _, index, key = rest.split(".", 2)
        return kind, "param_groups", int(index), key
    return (kind, rest) if rest else (kind,)


class _Record:
    """Stands for any object of the pickle."""

    state: Any = None

    def __new__(cls, *arguments: Any) -> _Record:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state[1] if isinstance(state, tuple) and len(state) == 2 else state


_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"device", "strided"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}  # fmt: skip


_MAX_BYTES = 1 << 30
"""Longer indexes are not read. This is enough for about ten million chunks."""

_MAX_DESCRIPTION_BYTES = 1 << 16
"""Longer descriptions of a tensor in one of torch's zips are not read. A usual one has a few hundred bytes."""


class _Bounded(pickle._Unpickler):
    """Python's own unpickler: unlike the one in C, it takes no memory for an index or a length in the pickle.

    The one in C makes a table as large as the highest index that it reads. One changed byte can make that four billion.
    """

    # A bytearray takes the memory that the pickle names before its content is read; no index has a bytearray.
    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }


class _Inert(_Bounded):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return _Record
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise CheckpointError(f"the index of the checkpoint names {module}.{name}, which no checkpoint needs: not read")


def read_foreign(storage: Storage, directory: str) -> Manifest:
    """Reads a checkpoint of torch.distributed.checkpoint into a manifest: tensors only, without checksums. Raises
    DamagedError if the index cannot be read; CheckpointError if it names a class that no checkpoint needs, or a tensor
    is stored in an unsupported way."""
    where = storage.where(directory, METADATA)
    try:
        index = _Inert(io.BytesIO(read_index(storage, directory, METADATA, _MAX_BYTES))).load()
        entries = dict(_tensors(storage, directory, index))
    except CheckpointError as error:
        text = str(error)
        raise type(error)(text if where in text else f"{where}: {text}") from error
    except OSError as error:
        raise DamagedError(f"{where} or a file that it names cannot be read: {error}") from error
    except Exception as error:  # a broken pickle or zip may raise anything
        raise DamagedError(f"{where} is not an index of torch.distributed.checkpoint: {error!r}") from error
    return Manifest(
        step=0, serial=0, tensors=entries, about={"written_by": "torch.distributed.checkpoint"}, index=METADATA
    )


def _tensors(storage: Storage, directory: str, index: _Record) -> Iterator[tuple[str, TensorEntry]]:
    places = {(i.state["fqn"], i.state.get("offset")): place for i, place in index.state["storage_data"].items()}
    for name, found in index.state["state_dict_metadata"].items():
        if not found.state or "chunks" not in found.state:  # not a tensor
            continue
        shape = tuple(found.state["size"])
        dtype = found.state["properties"].state[0]
        chunks: list[Chunk] = []
        for box in found.state["chunks"]:
            offsets, sizes = tuple(box.state["offsets"]), tuple(box.state["sizes"])
            chunks += _runs(storage, directory, places[name, offsets], shape, offsets, sizes, dtype)
        yield name, TensorEntry(dtype=dtype, shape=shape, chunks=tuple(sorted(chunks, key=lambda c: c.start)))


def _runs(
    storage: Storage, directory: str, place: _Record, shape: Sizes, offsets: Sizes, sizes: Sizes, dtype: str
) -> list[Chunk]:
    file = place.state["relative_path"]
    if "/" in file or "\\" in file:
        raise CheckpointError(f"data file {file!r} is not in the checkpoint's own directory")
    if place.state.get("transform_descriptors"):
        raise CheckpointError(f"{file} is compressed or encrypted, which is not supported")
    size = DTYPES[dtype].itemsize
    begin, stored = _data_offset(storage, directory, file, place.state["offset"], place.state["length"], sizes)
    if stored != prod(sizes) * size:
        raise CheckpointError(f"{file} has {stored} bytes for a box of {sizes} elements of {dtype}")
    return [
        Chunk(start=start, stop=start + length, file=file, offset=begin + at * size, crcs=None)
        for start, length, at in runs_of(shape, offsets, sizes)
    ]


class _Window(io.RawIOBase):
    """Part of a file, as a stream for the zip reader."""

    def __init__(self, stream: io.BufferedReader, begin: int, length: int) -> None:
        self._stream, self._begin, self._length, self._at = stream, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = read_at(self._stream, self._begin + self._at, memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += count
        return count


class _Layout(_Bounded):
    """Reads the description of the one tensor in a zip of torch, as (offset, sizes, strides)."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return lambda storage, offset, sizes, strides, *_: (offset, tuple(sizes), tuple(strides))
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage") and (name.endswith("Storage") or name in DTYPES):
            return name
        raise CheckpointError(f"a tensor's description names {module}.{name}, which no plain tensor needs: not read")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _data_offset(storage: Storage, directory: str, file: str, begin: int, length: int, sizes: Sizes) -> tuple[int, int]:
    """Returns the offset of a tensor's bytes in the file, and their number."""
    with storage.open(directory, file) as stream:
        archive = zipfile.ZipFile(io.BufferedReader(_Window(stream, begin, length)))
        entries = archive.infolist()
        names = {"data" if "/data/" in e.filename else e.filename.rpartition("/")[2]: e for e in entries}
        info, description = names["data"], names["data.pkl"]
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size > length for entry in (info, description)):
            raise CheckpointError(f"{file} has compressed entries, or longer ones than it is itself: not read")
        if description.file_size > _MAX_DESCRIPTION_BYTES:
            raise CheckpointError(f"{file} describes a tensor in {description.file_size} bytes: not read")
        first, stored, strides = _Layout(io.BytesIO(archive.read(description))).load()
        header = bytearray(30)
        read_at(stream, begin + info.header_offset, memoryview(header))
        skip = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = begin + info.header_offset + 30 + skip
        if info.file_size and not read_at(stream, start + info.file_size - 1, memoryview(bytearray(1))):
            raise DamagedError(f"{file} is too short: a tensor needs {info.file_size} bytes from {start} on")
    dense = [1] * len(sizes)
    for dim in reversed(range(len(sizes) - 1)):
        dense[dim] = dense[dim + 1] * max(1, sizes[dim + 1])
    relevant = [(s, d) for s, d, n in zip(strides, dense, stored, strict=True) if n > 1]
    if stored != sizes or first != 0 or any(s != d for s, d in relevant):
        raise CheckpointError(f"{file}: a tensor of shape {stored} does not lie row by row, which is not supported")
    return start, info.file_size
