"""What one rank holds of a tensor, and which replica writes which part of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeromesh.errors import CheckpointError, InternalError

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
    )
}
"""Those that a piece can have, by name."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A contiguous range of a flattened tensor.

    Args:
        name: of the tensor in the checkpoint.
        shape: of the whole tensor.
        start: where the range starts in the flattened tensor.
        local: its elements, contiguous, 1-D; shares memory with what it was taken from.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    local: Tensor

    def __post_init__(self) -> None:
        if self.local.dim() != 1 or not self.local.is_contiguous():
            raise InternalError(f"{self.name}: a piece must be contiguous and 1-D; got {tuple(self.local.shape)}")
        if self.local.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{self.name} must have a dtype that a checkpoint holds ({', '.join(DTYPES)}); got {self.local.dtype}"
            )

    @property
    def stop(self) -> int:
        return self.start + self.local.numel()

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the tensor lies elsewhere."""
        return self.local.numel() == math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.local.numel() * self.local.itemsize

    def part(self, start: int, stop: int) -> Piece:
        """Elements `start` to `stop` of the whole tensor, which lie inside."""
        local = self.local[start - self.start : stop - self.start]
        return Piece(name=self.name, shape=self.shape, start=start, local=local)


def whole(name: str, tensor: Tensor) -> Piece:
    """All of a tensor."""
    return Piece(name=name, shape=tuple(tensor.shape), start=0, local=tensor.detach().contiguous().view(-1))


def share(pieces: Sequence[Piece], index: int, count: int) -> list[Piece]:
    """What replica `index` of `count`, which all hold the same `pieces`, writes: an equal share of the bytes.

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
    """The parts of `pieces`, laid end to end, from byte `first` to byte `last`, both rounded down to whole elements."""
    at = 0
    for piece in pieces:
        size = piece.local.itemsize
        start = max(0, (first - at) // size if first > at else 0)
        stop = min(piece.local.numel(), max(0, (last - at) // size))
        if start < stop:
            yield piece.part(piece.start + start, piece.start + stop)
        at += piece.num_bytes
