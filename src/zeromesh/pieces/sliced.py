"""A rank's slice as a tensor: what state dicts of a sharded model and of its optimizers hold."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zeromesh.errors import CheckpointError
from zeromesh.pieces.boxes import Box, boxes_of
from zeromesh.pieces.piece import Piece


class SlicedTensor(torch.Tensor):
    """A rank's slice of a tensor, as torch.distributed.checkpoint wants it: whole shape, boxes held here.

    What `state_dict()` of a sharded model holds. `dcp.save` writes the boxes, `dcp.load` writes into them, and so into
    the memory of the slice; the model's `load_state_dict` takes it back.

    Attributes:
        piece: the slice.
    """

    piece: Piece
    boxes: tuple[Box, ...]

    @staticmethod
    def __new__(cls, piece: Piece) -> SlicedTensor:
        local = piece.local
        self = torch.Tensor._make_wrapper_subclass(cls, piece.shape, dtype=local.dtype, device=local.device)
        assert isinstance(self, SlicedTensor)
        self.piece = piece
        self.boxes = boxes_of(piece.shape, piece.start, piece.stop) if piece.local.numel() else ()
        if not math.prod(piece.shape):
            # Without a chunk the tensor would not be in the checkpoint at all.
            self.boxes = (Box(offsets=(0,) * len(piece.shape), sizes=piece.shape, start=0),)
        return self

    def __init__(self, piece: Piece) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor's takes tensor_contents
        return f"SlicedTensor({self.piece.name!r}, shape={self.piece.shape}, {self.piece.start}..{self.piece.stop})"

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedTensor:
        piece = self.piece
        return SlicedTensor(Piece(name=piece.name, shape=piece.shape, start=piece.start, local=piece.local.clone()))

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
            return SlicedTensor(args[0].piece)
        if func is torch.ops.aten.clone.default:
            return args[0].__deepcopy__({})
        if func is torch.ops.aten._to_copy.default:  # an optimizer that loads its states gives them its dtype
            piece = args[0].piece
            local = piece.local.to(dtype=kwargs.get("dtype"), device=kwargs.get("device"), copy=True)
            return SlicedTensor(Piece(name=piece.name, shape=piece.shape, start=piece.start, local=local))
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
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self.boxes:
            if index.offset is None or tuple(index.offset) == box.offsets:
                first = box.start - self.piece.start
                return self.piece.local[first : first + box.numel].view(box.sizes)
        raise CheckpointError(f"{self!r} has no box at {index.offset}")


def part_of(value: Tensor, name: str, start: int, numel: int) -> Tensor:
    """Elements `start` to `start + numel` of a flattened tensor that is given whole, or as a slice; shares its memory.

    Raises:
        CheckpointError: the slice does not hold them all.
    """
    if not isinstance(value, SlicedTensor):
        return value.detach().reshape(-1)[start : start + numel]
    piece = value.piece
    if numel and not piece.start <= start <= start + numel <= piece.stop:
        raise CheckpointError(
            f"{name}: this rank needs elements {start} to {start + numel}, and load_state_dict was given slice "
            f"{piece.start} to {piece.stop} of another layout: use zm.Checkpoints or torch.distributed.checkpoint"
        )
    return piece.part(start, start + numel).local if numel else piece.local[:0]
