"""Which elements of a tensor this rank's slice holds, in terms that every rank knows; and the mesh and ranks of a
layout, which divide it.

[Note: Elements] A slice lies in a flat buffer that is divided over axes of a mesh. Two slices hold the same elements on
every rank if the tensors have one shape, lie alike as DTensors, and their buffers are divided over the same axes with
shard boundaries at the same places in the tensor. All of this is known on every rank, so whoever compares two slices
comes to the same answer on all ranks without communication. Lengths and values, which differ between ranks, are never
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from zeromesh.engine.control import Control, Span
from zeromesh.errors import OptimizerError
from zeromesh.pieces.region import Region
from zeromesh.strategy import Axis, Layout

if TYPE_CHECKING:
    from zeromesh.engine.spread import Spread
    from zeromesh.pieces.piece import Piece

Place = tuple[object, int, int]

Agree = Callable[[Tensor], "Agree | None"]
"""Replaces a tensor by its maximum over ranks; returns the same over more ranks, if those skip a step together."""

ACROSS = "zm.copy_values([target], [source]), called on all ranks, copies values from one layout to another"


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """The elements of one slice: [Note: Elements]. Only `shape`, `spread` and `place` are compared."""

    shape: torch.Size  # of the whole tensor
    spread: Spread | None = None  # how it lies as a DTensor; None for a plain one
    place: Place | None = None  # from `Home.place`; None where no axis divides the buffer, so every rank has all of it
    name: str = field(compare=False)
    layout: str = field(compare=False, default="")
    region: Region = field(compare=False)  # the part of the tensor that this rank's data-parallel ranks have together
    start: int = field(compare=False)  # of the slice, in the flattened region
    numel: int = field(compare=False)  # of the slice
    spans: tuple[Span, ...] = field(compare=False, default=())  # ranks that divide the tensor, for sums over it
    control: Control | None = field(compare=False, default=None)  # all ranks that have the tensor
    # Whether this rank, and no other that has the same of it beyond the mesh, saves it.
    writes: bool = field(compare=False, default=True)
    agree_max: Agree | None = field(compare=False, default=None)

    def __str__(self) -> str:
        return f"{self.name} {tuple(self.shape)}" + f" under {self.layout}" * bool(self.layout)

    @property
    def is_whole(self) -> bool:
        """Whether every rank that has some of it has all of it."""
        return self.place is None and self.spread is None

    def piece(self, name: str, local: Tensor) -> Piece:
        """Values for these elements, as those of a whole tensor of that name."""
        from zeromesh.pieces.piece import Piece  # of checkpoints

        return Piece(name=name, shape=self.region.shape, start=self.start, local=local, within=self.region)

    def part_of(self, operand: Tensor, call: str) -> Tensor:
        """This rank's elements of an operand that is whole, or one number; 1-D, in the operand's memory where
        the elements lie there in a row.

        Raises:
            OptimizerError: on every rank, where the operand is no tensor of these elements.
        """
        if isinstance(operand, DTensor):
            lies = None if self.spread is None else (self.spread.mesh, self.spread.placements)
            alike = operand.shape == self.shape and (operand.device_mesh, operand.placements) == lies
            if alike:
                return operand._local_tensor.detach().reshape(-1)[self.start : self.start + self.numel]
            if not all(type(each) is Replicate for each in operand.placements):
                raise self._refusal(operand, call)
            operand = operand._local_tensor.detach()
        if operand.numel() == 1 and operand.dim() <= len(self.shape):  # also where this rank has nothing
            # A 0-d operand takes the dtype of a tensor with more dimensions, and not of another 0-d one.
            return operand if operand.dim() == 0 < len(self.shape) else operand.reshape(1)
        try:
            whole = operand.expand(self.shape)
        except RuntimeError:
            raise self._refusal(operand, call) from None
        if self.region.is_whole and whole.is_contiguous():
            return whole.view(-1)[self.start : self.start + self.numel]
        boxes = self.region.boxes(self.start, self.start + self.numel) if self.numel else ()
        parts = [whole[box.index].reshape(-1) for box in boxes]
        return torch.cat(parts) if parts else whole.new_empty(0)

    def _refusal(self, operand: Tensor, call: str) -> OptimizerError:
        how = f" that lies as {operand.placements}" if isinstance(operand, DTensor) else ""
        return OptimizerError(
            f"{call} of {self} and a {type(operand).__name__} of {tuple(operand.shape)}{how}, which must be the whole "
            f"tensor, something that broadcasts to its shape, or a slice of the same elements. For this rank's values "
            f"use `.local` on both sides; {ACROSS}"
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where one layout is: that of the model, or of a part of it."""

    layout: Layout
    mesh: DeviceMesh | None  # None in a single process
    control: Control
    ranks: tuple[int, ...] = field(init=False, compare=False, repr=False)  # of the mesh

    def __post_init__(self) -> None:
        ranks = () if self.mesh is None else tuple(self.mesh.mesh.flatten().tolist())
        object.__setattr__(self, "ranks", ranks)

    def ambiguous(self, model: Control) -> bool:
        """Whether it has plain tensors that only some of the model's ranks share: on the others are others, under the
        same names. DTensors would be divided over more than `model` knows of."""
        return self.layout.share < 1 and set(self.control.beyond) <= set(model.beyond)

    def spans(self, model: Control, axes: Sequence[Axis]) -> tuple[Span, ...]:
        """The ranks that divide flat buffers sharded over `axes`, without those that divide DTensors. For tensors that
        are others on other ranks of the model, all of the model's."""
        copies = self.layout.world // self.layout.degree(axes)
        return (Span(group=model.group if self.ambiguous(model) else self.control.group, copies=copies),)

    def place(self, padded: int, axes: Sequence[Axis], start: int, numel: int) -> Place | None:
        """Key of how a tensor at `start` of a flat buffer of `padded` elements, sharded over `axes`, is divided: the
        division of the buffer, the first shard with some of its elements, and the number of elements before the next
        shard begins. Equal where every rank has the same of it; None where each has all."""
        mesh = tuple(size for _, size in self.layout.mesh)
        names = [name for name, _ in self.layout.mesh]
        found = tuple((names.index(axis.mesh_axis), axis.size, axis.stride) for axis in axes if axis.size > 1)
        if not found:
            return None
        shard = padded // self.layout.degree(axes)
        first, before = divmod(start, shard)
        alone = before + numel <= shard
        return (self.ranks, mesh, found, 0 if alone else shard), first, 0 if alone else shard - before
