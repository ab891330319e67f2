"""Tensors that are made of a file's tensors: laid side by side, or computed. Both are read like one of the file's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from zeromesh.checkpoint.safetensors import Stored
from zeromesh.pieces.boxes import runs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A whole tensor of a file as a box of another tensor: at `offsets`, of `sizes`, with its elements in order."""

    stored: Stored
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """A source of a tensor of `shape` that tiles cover, each element once; a rank reads its own elements."""

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]

    @classmethod
    def of(cls, stored: Stored) -> Tiled:
        offsets = (0,) * len(stored.shape)
        return cls(shape=stored.shape, tiles=(Tile(stored=stored, offsets=offsets, sizes=stored.shape),))

    def fill(self, target: Tensor, start: int) -> None:
        stop = start + target.numel()
        for tile in self.tiles:
            for first, length, at in runs_of(self.shape, tile.offsets, tile.sizes):
                begin, end = max(first, start), min(first + length, stop)
                if begin < end:
                    tile.stored.fill(target[begin - start : end - start], at + begin - first)


def stacked(parts: Sequence[Tiled], dim: int) -> Tiled:
    """As `torch.stack`."""
    return joined([_unsqueezed(part, dim) for part in parts], dim)


def joined(parts: Sequence[Tiled], dim: int) -> Tiled:
    """As `torch.cat`."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    dim %= len(shape)
    tiles, at = [], 0
    for part in parts:
        for tile in part.tiles:
            offsets = (*tile.offsets[:dim], tile.offsets[dim] + at, *tile.offsets[dim + 1 :])
            tiles.append(Tile(stored=tile.stored, offsets=offsets, sizes=tile.sizes))
        at += part.shape[dim]
    return Tiled(shape=tuple(shape), tiles=tuple(tiles))


def _unsqueezed(part: Tiled, dim: int) -> Tiled:
    dim %= len(part.shape) + 1

    def grown(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
        return (*sizes[:dim], size, *sizes[dim:])

    tiles = (Tile(stored=t.stored, offsets=grown(t.offsets, 0), sizes=grown(t.sizes, 1)) for t in part.tiles)
    return Tiled(shape=grown(part.shape, 1), tiles=tuple(tiles))


@dataclass(slots=True, kw_only=True, eq=False)
class Last:
    """The tensor that was computed last, by its source: slices of one are asked for one after another."""

    source: Computed | None = None
    values: Tensor | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Computed:
    """A source of a tensor that must be whole for a moment for a slice of it to be had: `compute` makes it, in host
    memory. All of a model share `last`, so that one at a time is whole."""

    shape: tuple[int, ...]
    compute: Callable[[], Tensor]
    last: Last = field(default_factory=Last)

    def fill(self, target: Tensor, start: int) -> None:
        if self.last.source is not self:
            self.last.values = self.last.source = None
            self.last.values = self.compute().reshape(prod(self.shape))
            self.last.source = self
        assert self.last.values is not None
        target.copy_(self.last.values[start : start + target.numel()])
