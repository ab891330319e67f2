"""A rank's slice of a tensor, as torch.distributed.checkpoint and DTensors see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from zeromesh.errors import CheckpointError
from zeromesh.pieces.boxes import Box
from zeromesh.pieces.piece import Piece
from zeromesh.pieces.region import Region


class Sliced:
    """A tensor as torch.distributed.checkpoint needs it: its whole shape, and the boxes of it that are held here.

    `dcp.save` writes the boxes, `dcp.load` writes into them, and so into the memory of the slice.

    Attributes:
        piece: gives the slice.
        writes: whether `dcp.save` writes it here: no other rank does that has some of it and not just the same.
    """

    piece: Callable[[], Piece]
    writes: bool

    @property
    def boxes(self) -> tuple[Box, ...]:
        piece = self.piece()
        if math.prod(piece.shape):
            return piece.boxes
        # Without a chunk the tensor would not be in the checkpoint at all.
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


def dtensor_region(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], coordinate: Sequence[int] | None = None
) -> Region:
    """The region of a DTensor that a rank holds.

    Args:
        coordinate: of the rank on the mesh; None for this rank's, which is there.
    """
    index, at_mesh = folding(shape, mesh, placements), [*(coordinate or mesh.get_coordinate() or ())]
    boxes = [Replicate() if at == index else placement for at, placement in enumerate(placements)]
    sizes, offsets = map(list, _compute_local_shape_and_global_offset(tuple(shape), mesh.shape, at_mesh, boxes))
    # Torch puts the empty box of a rank that has nothing where the tensor ends, or beyond.
    offsets, fold = [*map(min, offsets, shape)], (0, 1)
    if index is not None:
        placement = placements[index]
        assert isinstance(placement, _StridedShard)
        dim, fold = placement.dim % len(shape), (placement.dim % len(shape), int(placement.split_factor))
        sizes[dim] = shape[dim] // mesh.size(index)
        offsets[dim] = sizes[dim] // fold[1] * at_mesh[index]
    return Region(shape=tuple(shape), offsets=tuple(offsets), sizes=tuple(sizes), fold=fold)


def folding(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> int | None:
    """The dimension of the mesh over which a DTensor is divided in equal parts, each of them evenly: [Note: Folds] of
    `zeromesh.pieces.region`. None if there is none, or if the axis that divides a dimension so has others beside it."""
    divided = [placement.dim % len(shape) for placement in placements if isinstance(placement, Shard | _StridedShard)]
    strided = [at for at, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    if len(strided) != 1:
        return None
    placement = placements[strided[0]]
    assert isinstance(placement, _StridedShard)
    dim, parts = placement.dim % len(shape), int(placement.split_factor) * mesh.size(strided[0])
    return strided[0] if divided.count(dim) == 1 and shape[dim] % parts == 0 else None
