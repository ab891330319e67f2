"""A rank's slice as a tensor: what state dicts of a sharded model and of its optimizers hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from zeromesh.errors import CheckpointError
from zeromesh.pieces.boxes import Box
from zeromesh.pieces.piece import Piece, copy_shared
from zeromesh.pieces.region import Region


class SlicedTensor(torch.Tensor):
    """A rank's slice of a tensor, as torch.distributed.checkpoint wants it: whole shape, boxes held here.

    What `state_dict()` of a sharded model holds. `dcp.save` writes the boxes, `dcp.load` writes into them, and so into
    the memory of the slice; the model's `load_state_dict` takes it back.

    Attributes:
        piece: the slice.
        writes: whether `dcp.save` writes it here: no other rank does that has some of it and not just the same.
        elements: which elements every rank has, in a form that can be compared; None where it is not known.
    """

    piece: Piece
    writes: bool
    elements: object
    boxes: tuple[Box, ...]

    @staticmethod
    def __new__(cls, piece: Piece, *, writes: bool = True, elements: object = None) -> SlicedTensor:
        local = piece.local
        self = torch.Tensor._make_wrapper_subclass(cls, piece.shape, dtype=local.dtype, device=local.device)
        assert isinstance(self, SlicedTensor)
        self.piece = piece
        self.writes = writes
        self.elements = elements
        self.boxes = piece.boxes
        if not math.prod(piece.shape):
            # Without a chunk the tensor would not be in the checkpoint at all.
            self.boxes = (Box(offsets=(0,) * len(piece.shape), sizes=piece.shape, start=0),)
        return self

    def __init__(self, piece: Piece, *, writes: bool = True, elements: object = None) -> None:
        super().__init__()

    def over(self, piece: Piece) -> SlicedTensor:
        """The same elements, with another name or other values."""
        return SlicedTensor(piece, writes=self.writes, elements=self.elements)

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor's takes tensor_contents
        piece = self.piece
        within = "" if piece.region.is_whole else f" of {piece.region}"
        return f"SlicedTensor({piece.name!r}, shape={piece.shape}, {piece.start}..{piece.stop}{within})"

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedTensor:
        return self.over(replace(self.piece, local=self.piece.local.clone()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.piece.is_whole:
            raise CheckpointError(
                f"{self!r} is one rank's part of a state dict, and pickled alone (torch.save) the others' would be "
                f"lost: save with zm.Checkpoints or torch.distributed.checkpoint, or zm.full_state_dict(model)"
            )
        whole = self.piece.local.view(self.piece.shape)
        return whole.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it so

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].over(args[0].piece)
        if func is torch.ops.aten.clone.default:
            return args[0].__deepcopy__({})
        if func is torch.ops.aten._to_copy.default:  # an optimizer that loads its states gives them its dtype
            piece = args[0].piece
            local = piece.local.to(dtype=kwargs.get("dtype"), device=kwargs.get("device"), copy=True)
            return args[0].over(replace(piece, local=local))
        held = next((arg for arg in args if isinstance(arg, SlicedTensor)), "a sliced tensor")
        raise CheckpointError(
            f"{func} on {held}: this rank holds a slice of it only; save it with torch.distributed.checkpoint, give it "
            f"to load_state_dict, or use zm.full_state_dict(model)"
        )

    # What torch.distributed.checkpoint asks of a tensor.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.piece.shape)),
            )
            for box, chunk in zip(self.boxes, self.__create_chunk_list__(), strict=True)
            if self.writes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self.boxes:
            if index.offset is None or tuple(index.offset) == box.offsets:
                return self.piece.view(box)
        raise CheckpointError(f"{self!r} has no box at {index.offset}")


def dtensor_region(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    coordinate: Sequence[int] | None = None,
) -> Region:
    """What a rank has of a DTensor.

    Args:
        coordinate: of the rank on the mesh; None for this rank's, which is there.
    """
    index, at_mesh = folding(shape, mesh, placements), [*(coordinate or mesh.get_coordinate() or ())]
    boxes = [Replicate() if at == index else placement for at, placement in enumerate(placements)]
    sizes, offsets = map(list, _compute_local_shape_and_global_offset(tuple(shape), mesh.shape, at_mesh, boxes))
    # Of a rank that has nothing, torch puts the box where the tensor ends, or beyond.
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
    `zeromesh.pieces.region`. None if there is none, or if what divides a dimension so has others beside it."""
    divided = [placement.dim % len(shape) for placement in placements if isinstance(placement, Shard | _StridedShard)]
    strided = [at for at, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    if len(strided) != 1:
        return None
    placement = placements[strided[0]]
    assert isinstance(placement, _StridedShard)
    dim, parts = placement.dim % len(shape), int(placement.split_factor) * mesh.size(strided[0])
    return strided[0] if divided.count(dim) == 1 and shape[dim] % parts == 0 else None


def part_of(value: Tensor, name: str, region: Region, start: int, numel: int) -> Tensor:
    """Elements `start` to `start + numel` of a flattened region of a tensor that is given whole, as a slice, or as a
    DTensor; shares its memory where they lie there in a row.

    Raises:
        CheckpointError: what is given does not hold them all.
    """
    given = _piece_of(value, name)
    if region == given.region and given.start <= start <= start + numel <= given.stop:
        return given.part(start, start + numel).local
    wanted = Piece(name=name, shape=region.shape, start=start, local=given.local.new_empty(numel), within=region)
    if copy_shared(given, wanted) != numel:
        raise CheckpointError(
            f"{name}: this rank needs elements {_shown(wanted)}, and load_state_dict was given slice {_shown(given)} "
            f"of another layout: use zm.Checkpoints or torch.distributed.checkpoint"
        )
    return wanted.local


def _piece_of(value: Tensor, name: str) -> Piece:
    if isinstance(value, SlicedTensor):
        return value.piece
    region, local = Region.whole(value.shape), value.detach()
    if isinstance(value, DTensor):
        region, local = dtensor_region(value.shape, value.device_mesh, value.placements), value._local_tensor.detach()
    return Piece(name=name, shape=region.shape, start=0, local=local.reshape(-1), within=region)


def _shown(piece: Piece) -> str:
    region = piece.region
    within = "" if region.is_whole else f" of the box of {region}"
    return f"{piece.start} to {piece.stop}{within}"
