"""What torch.distributed.checkpoint needs to read a checkpoint of zeromesh's."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

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

from zeromesh.checkpoint.manifest import TensorEntry
from zeromesh.checkpoint.storage import Storage
from zeromesh.checkpoint.write import Written
from zeromesh.pieces.piece import DTYPES

METADATA = ".metadata"
OBJECTS = "objects.distcp"


def write_metadata(
    storage: Storage,
    directory: str,
    written: Iterable[Written],
    empty: Mapping[str, TensorEntry],
    objects: Mapping[str, Any],
) -> None:
    """Writes what torch's reader needs, for other tools. zeromesh itself never reads these two files.

    Args:
        storage: where.
        directory: the checkpoint's.
        written: by all ranks.
        empty: tensors without elements.
        objects: what is not a tensor, under the names that `dcp.load` looks for.
    """
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
    """Where a flat name stood in the nested state dict: parameters' names have dots of their own."""
    kind, _, rest = name.partition(".")
    if kind == "optim" and rest.startswith("state."):
        param, _, key = rest.removeprefix("state.").rpartition(".")
        return kind, "state", param, key
    if kind == "optim" and rest.startswith("param_groups."):
        _, index, key = rest.split(".", 2)
        return kind, "param_groups", int(index), key
    return (kind, rest) if rest else (kind,)
