"""A box of a tensor that is held as a tensor of its own: what tensor parallelism leaves on a rank.

[Note: Regions] A parameter may be divided twice: into boxes, by whatever made it a DTensor, and each box, flattened row
by row, into slices. A slice of a box is boxes of the whole tensor again, each of them a contiguous range of the box and
not of the tensor::

    shape (4, 4), the region of columns 2..4, its elements 1..7

        . . | . A       A: row 0, column 3
        . . | B B       B: rows 1..3, columns 2..4
        . . | B B
        . . | C .       C: row 3, column 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from zeromesh.errors import InternalError
from zeromesh.pieces.boxes import Box, boxes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box of a tensor: [Note: Regions].

    Args:
        shape: of the whole tensor.
        offsets: of the box's first element, one for each dimension.
        sizes: the box's shape.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise InternalError(f"{self} must have as many offsets and sizes as the tensor has dimensions")
        if any(o < 0 or s < 0 or o + s > n for n, o, s in zip(self.shape, self.offsets, self.sizes, strict=True)):
            raise InternalError(f"{self} does not lie within the tensor")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls(shape=tuple(shape), offsets=(0,) * len(shape), sizes=tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the tensor lies elsewhere."""
        return self.sizes == self.shape

    @property
    def index(self) -> tuple[slice, ...]:
        """What cuts it out of the whole tensor."""
        return tuple(slice(o, o + size) for o, size in zip(self.offsets, self.sizes, strict=True))

    def boxes(self, start: int, stop: int) -> tuple[Box, ...]:
        """Elements `start` to `stop` of the flattened region, as boxes of the whole tensor; where each begins is told
        in the flattened region.

        >>> region = Region(shape=(4, 4), offsets=(0, 2), sizes=(4, 2))
        >>> [(box.offsets, box.sizes, box.start) for box in region.boxes(1, 7)]
        [((0, 3), (1, 1), 1), ((1, 2), (2, 2), 2), ((3, 2), (1, 1), 6)]
        """
        return tuple(
            replace(box, offsets=tuple(a + b for a, b in zip(self.offsets, box.offsets, strict=True)))
            for box in boxes_of(self.sizes, start, stop)
        )


def shared(one: Box | Region, other: Box | Region) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(offsets, sizes) of what two boxes of a tensor have in common; None of boxes that lie apart.

    >>> shared(Region.whole((4, 4)), Region(shape=(4, 4), offsets=(1, 2), sizes=(3, 2)))
    ((1, 2), (3, 2))
    """
    lows = tuple(map(max, one.offsets, other.offsets))
    ends = [(o + size for o, size in zip(box.offsets, box.sizes, strict=True)) for box in (one, other)]
    sizes = tuple(min(first, second) - low for first, second, low in zip(*ends, lows, strict=True))
    return (lows, sizes) if all(size > 0 for size in sizes) else None
