"""A rank's slice of a tensor, in the form that torch.distributed.checkpoint needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zeromesh.errors import CheckpointError
from zeromesh.pieces.boxes import Box

if TYPE_CHECKING:
    from zeromesh.pieces.piece import Piece


class Sliced:
    """A tensor as torch.distributed.checkpoint needs it: its whole shape, and the boxes of it that this rank holds.

    `dcp.save` writes the boxes. `dcp.load` writes into them, and so into the slice's memory.

    Attributes:
        piece: gives the slice.
        writes: whether `dcp.save` writes it on this rank; False on further ranks with equal boxes.
    """

    piece: Callable[[], Piece]
    writes: bool

    @property
    def boxes(self) -> tuple[Box, ...]:
        piece = self.piece()
        if math.prod(piece.shape):
            return piece.boxes
        # Without a chunk, the tensor would be missing in the checkpoint.
        return (Box(offsets=(0,) * len(piece.shape), sizes=piece.shape, start=0),)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        piece = self.piece()
        properties, size = TensorProperties(dtype=piece.local.dtype), torch.Size(piece.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.__create_chunk_list__()
            if self.writes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self.boxes:
            if index.offset is None or tuple(index.offset) == box.offsets:
                return self.piece().view(box)
        raise CheckpointError(f"{self!r} has no box at {index.offset}")
