"""Host memory between training and a checkpoint's files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeromesh.pieces.piece import Piece


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
