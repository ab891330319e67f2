"""Which elements of a tensor this rank's slice holds, and what every rank knows of that.

[Note: Elements] A slice lies in a flat buffer that is divided over axes of a mesh. Two slices hold the same elements on
every rank if the tensors have one shape, lie alike as DTensors, and their buffers are divided over the same axes with
shard boundaries at the same places in the tensor. All of this is known on every rank, so whoever compares two slices
comes to the same answer on all ranks without communication. Lengths and values, which differ between ranks, are never
compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from zeromesh.engine.control import Control, Span
from zeromesh.engine.spread import Spread
from zeromesh.errors import CheckpointError, OptimizerError, ZeromeshError
from zeromesh.pieces.piece import Piece
from zeromesh.pieces.region import Region
from zeromesh.pieces.sliced import SlicedTensor

ACROSS = "zm.copy_values([target], [source]), called on all ranks, copies values from one layout to another"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """A flat buffer as its mesh divides it; equal where every rank has the same shard.

    Args:
        ranks: of the mesh, outermost axis first.
        mesh: size of each mesh axis, innermost first.
        axes: (mesh axis, size, stride) of each axis that divides the buffer, most significant first; none of one rank.
        numel: elements of the padded buffer.
    """

    ranks: tuple[int, ...]
    mesh: tuple[int, ...]
    axes: tuple[tuple[int, int, int], ...]
    numel: int

    def cut(self, start: int, numel: int) -> tuple[object, int, int]:
        """What decides who has which elements of a tensor at `start`: the division, the first shard that has some of
        it, and how much of the tensor comes before the next shard begins."""
        shard = self.numel // math.prod(size for _, size, _ in self.axes)
        first, before = divmod(start, shard)
        alone = before + numel <= shard
        return (self.ranks, self.mesh, self.axes, 0 if alone else shard), first, 0 if alone else shard - before


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """The elements of one slice: [Note: Elements]. Only `shape`, `spread` and `place` are compared.

    Args:
        shape: of the whole tensor.
        spread: how it lies as a DTensor; None for a plain one.
        place: what `Divided.cut` says; None where no axis divides the buffer, so every rank has all of it.
        name: of the parameter.
        layout: the strategy, for messages.
        region: of the tensor, what this rank's data-parallel ranks have together.
        start: of the slice, in the flattened region.
        numel: of the slice.
        spans: the ranks that the tensor is divided over, for sums over its elements.
        control: all ranks that have the tensor.
        agree_max: replaces a tensor by its maximum over all ranks that skip a step together.
    """

    shape: torch.Size
    spread: Spread | None = None
    place: tuple[object, int, int] | None = None
    name: str = field(compare=False)
    layout: str = field(compare=False, default="")
    region: Region = field(compare=False)
    start: int = field(compare=False)
    numel: int = field(compare=False)
    spans: tuple[Span, ...] = field(compare=False, default=())
    control: Control | None = field(compare=False, default=None)
    agree_max: Callable[[Tensor], None] | None = field(compare=False, default=None)

    def __str__(self) -> str:
        return f"{self.name} {tuple(self.shape)}" + f" under {self.layout}" * bool(self.layout)

    def piece(self, name: str, local: Tensor) -> Piece:
        """Values for these elements, as those of a whole tensor of that name."""
        return Piece(name=name, shape=self.region.shape, start=self.start, local=local, within=self.region)

    def part_of(self, operand: Tensor, call: str) -> Tensor:
        """This rank's elements of an operand that is whole, a slice or one number; 1-D, in the operand's memory where
        the elements lie there in a row.

        Raises:
            OptimizerError, CheckpointError (of what a state dict holds): the operand is no tensor of these elements;
                the same error on every rank.
        """
        if isinstance(operand, SlicedTensor):
            held = operand.elements
            if held == self:
                return operand.piece.local
            if not isinstance(held, Elements) or held.place is not None or held.spread is not None:
                raise self._refusal(operand, call)
            operand = operand.piece.local.view(operand.shape)  # whole on every rank
        if isinstance(operand, DTensor):
            lies = None if self.spread is None else (self.spread.mesh, self.spread.placements)
            alike = operand.shape == self.shape and (operand.device_mesh, operand.placements) == lies
            if alike:
                return operand._local_tensor.detach().reshape(-1)[self.start : self.start + self.numel]
            if not all(type(each) is Replicate for each in operand.placements):
                raise self._refusal(operand, call)
            operand = operand._local_tensor.detach()
        if operand.numel() == 1 and operand.dim() <= max(1, len(self.shape)):
            return operand if operand.dim() <= 1 else operand.reshape(1)  # one number: also where this rank has nothing
        try:
            whole = operand.expand(self.shape)
        except RuntimeError:
            raise self._refusal(operand, call) from None
        if self.region.is_whole and whole.is_contiguous():
            return whole.view(-1)[self.start : self.start + self.numel]
        boxes = self.region.boxes(self.start, self.start + self.numel) if self.numel else ()
        parts = [
            whole[tuple(slice(o, o + size) for o, size in zip(box.offsets, box.sizes, strict=True))].reshape(-1)
            for box in boxes
        ]
        return torch.cat(parts) if parts else whole.new_empty(0)

    def _refusal(self, operand: Tensor, call: str) -> ZeromeshError:
        if isinstance(operand, SlicedTensor):
            how = f" under {operand.elements.layout}" if isinstance(operand.elements, Elements) else ""
            return CheckpointError(
                f"{call} of {self} was given a slice of {tuple(operand.shape)}{how}, of other elements: load it with "
                f"zm.Checkpoints or torch.distributed.checkpoint, which go from one layout to another, or with "
                f"zm.copy_values from a model of that layout"
            )
        how = ""
        if isinstance(operand, DTensor):
            how = f" that lies as {operand.placements}"
        return OptimizerError(
            f"{call} of {self} and a {type(operand).__name__} of {tuple(operand.shape)}{how}, which must be the whole "
            f"tensor, something that broadcasts to its shape, or a slice of the same elements. For this rank's values "
            f"use `.local` on both sides; {ACROSS}"
        )

    def chosen(self, index: Any, call: str) -> Tensor:
        """Which of this rank's elements an index into the whole tensor chooses, as a mask.

        Args:
            index: of `tensor[index]`: integers, slices, an ellipsis, and one tensor or list for one dimension; or a
                mask of the whole shape.

        Raises:
            OptimizerError: any other index.
        """
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == self.shape:
            return self.part_of(index, call)
        given = list(index) if isinstance(index, tuple) else [index]
        open_dims = len(self.shape) - sum(each is not Ellipsis for each in given)
        at = next((at for at, each in enumerate(given) if each is Ellipsis), len(given))
        given[at : at + 1] = [slice(None)] * open_dims
        lists = sum(not isinstance(each, int | slice) for each in given)
        if open_dims < 0 or lists > 1 or any(not _chooses(each) for each in given):
            raise OptimizerError(
                f"{call} of {self} takes integers, slices and one list or tensor of positions, or a mask of the whole "
                f"shape; got {index!r}"
            )
        mask = torch.ones(1, dtype=torch.bool)
        for dim, each in enumerate(given):
            if isinstance(each, slice) and each == slice(None):
                continue
            hit = torch.zeros(self.shape[dim], dtype=torch.bool)
            hit[each] = True
            mask = mask & self.part_of(hit.view(-1, *(1 for _ in self.shape[dim + 1 :])), call)
        return mask.expand(self.numel)


def _chooses(each: Any) -> bool:
    if isinstance(each, Tensor):
        return each.dim() <= 1 and not each.is_floating_point()
    return isinstance(each, int | slice) or (isinstance(each, list | range) and all(isinstance(i, int) for i in each))


def require_alike(call: str, one: Elements, other: Elements) -> None:
    """Raises OptimizerError, on every rank, unless both hold the same elements: [Note: Elements]."""
    if one is not other and one != other:
        raise OptimizerError(
            f"{call} of {one} and {other}: each rank holds other elements of the one than of the other, so they cannot "
            f"be combined rank by rank. {ACROSS}"
        )


def tensors_in(operands: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among arguments of a function, and in lists of them."""
    for each in operands:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_in(each)
