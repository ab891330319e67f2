"""The piece of a tensor that one rank holds, and the share of it that each replica writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zeromesh.errors import CheckpointError, InternalError
from zeromesh.pieces.boxes import Box, runs_of
from zeromesh.pieces.region import Region, shared

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}
"""The dtypes that a piece can have, by name."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A contiguous range of a flattened tensor, or of a flattened region of a tensor: [Note: Regions] of `region`."""

    name: str  # of the tensor in the checkpoint
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # start of the range in the flattened region
    local: Tensor  # its elements, contiguous, 1-D; shares memory with its source
    within: Region | None = None  # None for the whole tensor

    def __post_init__(self) -> None:
        if self.within is not None and self.within.is_whole:
            object.__setattr__(self, "within", None)  # so that a whole tensor has one spelling
        if self.local.dim() != 1 or not self.local.is_contiguous():
            raise InternalError(f"{self.name}: a piece must be contiguous and 1-D; got {tuple(self.local.shape)}")
        if self.local.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{self.name} must have a dtype that a checkpoint holds ({', '.join(DTYPES)}); got {self.local.dtype}"
            )

    @property
    def region(self) -> Region:
        return Region.whole(self.shape) if self.within is None else self.within

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The piece's elements, as boxes of the whole tensor."""
        return self.region.boxes(self.start, self.stop) if self.local.numel() else ()

    def view(self, box: Box) -> Tensor:
        """The elements of one of the piece's boxes, in the box's shape; shares memory."""
        first = box.start - self.start
        return self.local[first : first + box.numel].view(box.sizes)

    @property
    def stop(self) -> int:
        return self.start + self.local.numel()

    @property
    def is_whole(self) -> bool:
        """Whether it has all elements of the tensor."""
        return self.local.numel() == math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.local.numel() * self.local.itemsize

    def rows(self) -> Iterator[Piece]:
        """Yields the same elements as ranges of the whole tensor, in the same memory."""
        if self.within is None:
            yield self
            return
        for box in self.boxes:
            local = self.view(box).view(-1)
            for start, length, at in runs_of(self.shape, box.offsets, box.sizes):
                yield Piece(name=self.name, shape=self.shape, start=start, local=local[at : at + length])

    def part(self, start: int, stop: int) -> Piece:
        """Elements `start` to `stop` of the flattened region, which must lie inside the piece."""
        return replace(self, start=start, local=self.local[start - self.start : stop - self.start])


def whole(name: str, tensor: Tensor, within: Region | None = None) -> Piece:
    """Makes a piece of a whole tensor, or of a whole region of one."""
    shape, local = tuple(tensor.shape) if within is None else within.shape, tensor.detach().contiguous().view(-1)
    return Piece(name=name, shape=shape, start=0, local=local, within=within)


def copy_shared(source: Piece, target: Piece) -> int:
    """Copies the elements that two pieces of a tensor both hold, with conversion. Returns their number."""
    if source.region == target.region:
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if start < stop:
            target.part(start, stop).local.copy_(source.part(start, stop).local)
        return max(0, stop - start)
    copied = 0
    for ours in target.boxes:
        for theirs in source.boxes:
            common = shared(ours, theirs)
            if common is not None:
                target.view(ours)[_within(ours, *common)].copy_(source.view(theirs)[_within(theirs, *common)])
                copied += math.prod(common[1])
    return copied


def _within(box: Box, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The slices that cut a box at `offsets` with `sizes` out of `box`, which contains it."""
    return tuple(slice(o - b, o - b + size) for o, b, size in zip(offsets, box.offsets, sizes, strict=True))


def share(pieces: Sequence[Piece], index: int, count: int) -> list[Piece]:
    """Returns the pieces that replica `index` of `count` writes: an equal share of the bytes of `pieces`, which all
    replicas hold.

    >>> piece = Piece(name="w", shape=(6,), start=0, local=torch.arange(6.0))
    >>> [p.local.tolist() for p in share([piece], 1, 2)]
    [[3.0, 4.0, 5.0]]
    """
    if count == 1:
        return list(pieces)
    total = sum(piece.num_bytes for piece in pieces)
    first, last = total * index // count, total * (index + 1) // count
    return list(_between(pieces, first, last))


def _between(pieces: Iterable[Piece], first: int, last: int) -> Iterator[Piece]:
    """Yields the parts of joined `pieces` from byte `first` to byte `last`, both rounded down to whole elements."""
    at = 0
    for piece in pieces:
        size = piece.local.itemsize
        start = max(0, (first - at) // size if first > at else 0)
        stop = min(piece.local.numel(), max(0, (last - at) // size))
        if start < stop:
            yield piece.part(piece.start + start, piece.start + stop)
        at += piece.num_bytes
