"""Tensors that are made from a file's tensors, laid side by side or computed, and read like those of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from zeromesh.checkpoint.manifest import Manifest, TensorEntry
from zeromesh.checkpoint.read import Reader
from zeromesh.checkpoint.safetensors import Stored
from zeromesh.checkpoint.storage import LocalStorage
from zeromesh.pieces.boxes import runs_of
from zeromesh.pieces.piece import DTYPE_NAMES, Piece
from zeromesh.progress import note


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A whole tensor of a file as a box of another tensor, at `offsets` and of `sizes`, with its elements in order."""

    stored: Stored
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """A tensor of `shape` that tiles cover, each element once. A rank reads only the elements that it needs."""

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.tiles[0].stored.dtype

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
    """`torch.stack` of tiled tensors."""
    return joined([_unsqueezed(part, dim) for part in parts], dim)


def joined(parts: Sequence[Tiled], dim: int) -> Tiled:
    """`torch.cat` of tiled tensors."""
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
    """Caches the tensor computed last, with its source: slices of one tensor are requested one after another."""

    source: Computed | None = None
    values: Tensor | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Computed:
    """A tensor that must be computed whole, by `compute` and in host memory, even to get a slice. All of a model's
    tensors share `last`, so that only one is whole at a time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    compute: Callable[[], Tensor]
    last: Last = field(default_factory=Last)

    def fill(self, target: Tensor, start: int) -> None:
        if self.last.source is not self:
            self.last.values = self.last.source = None
            self.last.values = self.compute().reshape(prod(self.shape))
            self.last.source = self
        assert self.last.values is not None
        target.copy_(self.last.values[start : start + target.numel()])


FileSource = Stored | Tiled | Computed


class SourcesReader(Reader):
    """Reads tensors from their sources in the file or directory at `location`, under names that begin with `prefix`."""

    def __init__(self, location: Path, prefix: str, sources: Mapping[str, FileSource]) -> None:
        self._source_of = {prefix + name: source for name, source in sources.items()}
        entries = {
            name: TensorEntry(dtype=DTYPE_NAMES[source.dtype], shape=source.shape, chunks=())
            for name, source in self._source_of.items()
        }
        directory = location.parent if location.is_file() else location
        super().__init__(LocalStorage(directory), ".", Manifest(step=0, serial=0, tensors=entries, index=location.name))

    @override
    def fill(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            note(piece.name)
            for row in piece.rows() if piece.local.numel() else ():
                self._source_of[piece.name].fill(row.local, row.start)
