"""What one rank holds of a tensor, and which replica writes which part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeromesh.checkpoint.container import DTYPES
from zeromesh.errors import CheckpointError, InternalError


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
        if self.local.dtype not in DTYPES.values():
            raise CheckpointError(
                f"{self.name} must have a dtype that a checkpoint holds ({', '.join(DTYPES)}); got {self.local.dtype}"
            )

    @property
    def stop(self) -> int:
        return self.start + self.local.numel()

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


class Staging:
    """Host memory that pieces are copied to, so that training may go on while they are written. Kept between saves."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._buffer.numel()

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copies; returns the pieces in host memory, valid until the next call."""
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end += -(-piece.num_bytes // 64) * 64
        on_device = any(piece.local.device.type != "cpu" for piece in pieces)
        if end > self._buffer.numel():
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=on_device)
            self._buffer.zero_()  # the kernel hands out its pages here, not in the first copy
        copies = []
        for piece, start in zip(pieces, starts, strict=True):
            local = self._buffer[start : start + piece.num_bytes].view(piece.local.dtype)
            local.copy_(piece.local, non_blocking=on_device)
            copies.append(Piece(name=piece.name, shape=piece.shape, start=piece.start, local=local))
        if on_device:
            torch.accelerator.synchronize()
        return copies
