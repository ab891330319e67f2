"""What one rank holds of a tensor, and which replica writes which part of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeromesh.checkpoint.container import DTYPES
from zeromesh.errors import CheckpointError, InternalError

_DTYPES = frozenset(DTYPES.values())


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
        if self.local.dtype not in _DTYPES:
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


class Staging:
    """Host memory that pieces are copied to, so that training may go on while they are written. Kept between saves.

    Training waits for `copy`, so what can be kept is kept: the memory, whose pages the kernel has handed out, and the
    views into it, since a save holds the same pieces as the one before.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layout: list[tuple[int, torch.dtype]] = []
        self._views: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return self._buffer.numel()

    def copy(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Copies; returns the elements of each piece in host memory, valid until the next call."""
        sources = [piece.local for piece in pieces]
        layout = [(source.numel(), source.dtype) for source in sources]
        on_device = any(source.device.type != "cpu" for source in sources)
        if layout != self._layout:
            self._cut(layout, pinned=on_device)
        if sources:
            torch._foreach_copy_(self._views, sources, non_blocking=on_device)
        if on_device:
            torch.accelerator.synchronize()
        return self._views

    def _cut(self, layout: list[tuple[int, torch.dtype]], *, pinned: bool) -> None:
        sizes = [numel * dtype.itemsize for numel, dtype in layout]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // 64) * 64
        if end > self._buffer.numel():
            self._views = []
            self._buffer = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._buffer.zero_()  # the kernel hands out its pages here, not in the first copy
        self._layout = layout
        self._views = [
            self._buffer[start : start + size].view(dtype)
            for start, size, (_, dtype) in zip(starts, sizes, layout, strict=True)
        ]
