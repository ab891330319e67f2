"""A part of a tensor that a rank holds as a tensor of its own, as in tensor parallelism.

[Note: Regions] A parameter may be divided twice: into boxes, by the code that made it a DTensor, and each box,
flattened row by row, into slices. A slice of a box is again several boxes of the whole tensor. Each is a contiguous
range of the first box, but not of the tensor::

    shape (4, 4), the region of columns 2..4, its elements 1..7

        . . | . A       A: row 0, column 3
        . . | B B       B: rows 1..3, columns 2..4
        . . | B B
        . . | C .       C: row 3, column 2

[Note: Folds] If a dimension holds several matrices one after the other (packed projections), each matrix may be
divided. Fold this dimension in two: the region is one box of the folded tensor, and as many boxes of the tensor itself
as there are matrices. Its slices consist of boxes that are contiguous in the region::

    shape (4, 2), fold (0, 2), offsets (1, 0), sizes (2, 2): rows 1 and 3, the second half of either half
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod

from zeromesh.errors import InternalError
from zeromesh.pieces.boxes import Box, boxes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box of a tensor, [Note: Regions], or of a tensor with a folded dimension, [Note: Folds].

    `fold`: a dimension, and its number of equal parts; the region has the same range of each part.
    """

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the first element, one for each dimension
    sizes: tuple[int, ...]  # its shape as a tensor of its own
    fold: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise InternalError(f"{self} must have as many offsets and sizes as the tensor has dimensions")
        if any(o < 0 or s < 0 or o + s > n for n, o, s in zip(self.shape, self.offsets, self.sizes, strict=True)):
            raise InternalError(f"{self} does not lie within the tensor")
        dim, parts = self.fold
        if parts == 1 or self.is_whole:
            object.__setattr__(self, "fold", (0, 1))  # so that a box has one spelling
        elif not 0 <= dim < len(self.shape) or parts < 1 or self.shape[dim] % parts or self.sizes[dim] % parts:
            raise InternalError(f"{self} must have a dimension of {parts} equal parts")
        elif self.offsets[dim] + self.sizes[dim] // parts > self.shape[dim] // parts:
            raise InternalError(f"{self} must have the same of each part")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        return cls(shape=tuple(shape), offsets=(0,) * len(shape), sizes=tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.sizes == self.shape

    @property
    def begins(self) -> int | None:
        """Its start in the flattened tensor if it is a contiguous range of it, else None."""
        if self.fold[1] > 1 or any(size > 1 for size in self.sizes[: max(0, self.batch - 1)]):
            return None
        return sum(offset * prod(self.shape[dim + 1 :]) for dim, offset in enumerate(self.offsets))

    @property
    def index(self) -> tuple[slice | list[int], ...]:
        """The index that cuts the region out of the whole tensor."""
        ranges = [self.ranges(dim) for dim in range(len(self.shape))]
        return tuple(
            slice(own[0].start, own[0].stop) if len(own) == 1 else [*chain.from_iterable(own)] for own in ranges
        )

    @property
    def batch(self) -> int:
        """How many of the first dimensions tell which part it is: 0 if it is whole."""
        return max(
            (dim + 1 for dim, (n, all_of_it) in enumerate(zip(self.sizes, self.shape, strict=True)) if n < all_of_it),
            default=0,
        )

    def whole_shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The whole shape of a tensor with the same first dimensions (a state of a batch of matrices). `sizes` are
        those of the part that belongs to the region."""
        return (*self.shape[: self.batch], *sizes[self.batch :])

    def is_part_of(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of `shape` has the same first dimensions."""
        return tuple(shape[: self.batch]) == self.shape[: self.batch]

    def of(self, shape: Sequence[int]) -> Region:
        """Returns the region of such a tensor that belongs to this region.

        >>> Region(shape=(4, 3, 2), offsets=(2, 0, 0), sizes=(2, 3, 2)).of((4, 7)).sizes
        (2, 7)
        """
        lead = self.batch
        if not self.is_part_of(shape):
            raise InternalError(f"a tensor of {tuple(shape)} has no part that belongs to {self}")
        rest = tuple(shape[lead:])
        offsets = (*self.offsets[:lead], *(0 for _ in rest))
        return Region(shape=tuple(shape), offsets=offsets, sizes=(*self.sizes[:lead], *rest), fold=self.fold)

    def ranges(self, dim: int) -> list[range]:
        """The region's ranges in dimension `dim`."""
        parts = self.fold[1] if dim == self.fold[0] else 1
        first, size, apart = self.offsets[dim], self.sizes[dim] // parts, self.shape[dim] // parts
        return [range(first + part * apart, first + part * apart + size) for part in range(parts)]

    def boxes(self, start: int, stop: int) -> tuple[Box, ...]:
        """Returns elements `start` to `stop` of the flattened region, as boxes of the whole tensor. `Box.start` counts
        in the flattened region.

        >>> region = Region(shape=(4, 4), offsets=(0, 2), sizes=(4, 2))
        >>> [(box.offsets, box.sizes, box.start) for box in region.boxes(1, 7)]
        [((0, 3), (1, 1), 1), ((1, 2), (2, 2), 2), ((3, 2), (1, 1), 6)]
        """
        dim, parts = self.fold
        return tuple(
            Box(
                offsets=tuple(a + b for a, b in zip(self.offsets, box.offsets, strict=True)),
                sizes=box.sizes,
                start=box.start,
            )
            for box in (boxes_of(self.sizes, start, stop) if parts == 1 else self._unfolded(dim, parts, start, stop))
        )

    def _unfolded(self, dim: int, parts: int, start: int, stop: int) -> Iterator[Box]:
        """Yields a folded region's boxes, each in one part of the dimension, with offsets from the first element."""
        apart, depth = self.shape[dim] // parts, self.sizes[dim] // parts
        for box in boxes_of((*self.sizes[:dim], parts, depth, *self.sizes[dim + 1 :]), start, stop):
            inner = box.sizes[dim + 1 :]
            for at, row in enumerate(product(*map(range, box.sizes[: dim + 1]))):
                *before, part = (a + b for a, b in zip(box.offsets, row, strict=False))
                first = part * apart + box.offsets[dim + 1]
                yield Box(
                    offsets=(*before, first, *box.offsets[dim + 2 :]),
                    sizes=(1,) * dim + inner,
                    start=box.start + at * prod(inner),
                )

    def meets(self, other: Region) -> bool:
        """Whether the regions have elements in common."""
        pairs = (product(self.ranges(dim), other.ranges(dim)) for dim in range(len(self.shape)))
        return all(any(max(a.start, b.start) < min(a.stop, b.stop) for a, b in each) for each in pairs)

    def __str__(self) -> str:
        dim, parts = self.fold
        each = f", of each of {parts} parts of dimension {dim}" if parts > 1 else ""
        return f"{self.sizes} at {self.offsets}{each}"


def shared(one: Box, other: Box) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns (offsets, sizes) of the intersection of two boxes of a tensor; None if they do not intersect.

    >>> shared(*boxes_of((4, 4), 0, 16), *boxes_of((4, 4), 9, 12))
    ((2, 1), (1, 3))
    """
    lows = tuple(map(max, one.offsets, other.offsets))
    ends = [(o + size for o, size in zip(box.offsets, box.sizes, strict=True)) for box in (one, other)]
    sizes = tuple(min(first, second) - low for first, second, low in zip(*ends, lows, strict=True))
    return (lows, sizes) if all(size > 0 for size in sizes) else None
