"""Converts a slice of a flattened tensor to boxes of the N-dimensional tensor, and back.

[Note: Boxes] Row-major elements ``start`` to ``stop`` of an N-d tensor are at most ``2N - 1`` boxes: the whole rows,
and before and after them part of a row, which is itself a slice of a tensor with one dimension less. Each box is a
contiguous range of the flattened tensor, so it is a view, and its bytes are written as they lie::

    shape (3, 4), 2..11      . . A A        A: rows 0..1 x columns 2..4
                             B B B B        B: rows 1..2 x columns 0..4
                             C C C .        C: rows 2..3 x columns 0..3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from zeromesh.errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of a tensor that is a contiguous range of its flattened elements."""

    offsets: tuple[int, ...]  # of the first element, one for each dimension
    sizes: tuple[int, ...]
    start: int  # position of the first element in the flattened tensor

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the box's elements in the tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.offsets, self.sizes, strict=True))


def boxes_of(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Returns elements `start` to `stop` of a row-major tensor of `shape`, as boxes in order: [Note: Boxes].

    >>> [(box.offsets, box.sizes) for box in boxes_of((3, 4), 2, 11)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]
    """
    if not 0 <= start <= stop <= prod(shape):
        raise InternalError(f"elements {start} to {stop} are not within a tensor of shape {tuple(shape)}")
    return tuple(_boxes(tuple(shape), (), start, stop, 0)) if start < stop else ()


def _boxes(shape: tuple[int, ...], row: tuple[int, ...], start: int, stop: int, base: int) -> Iterator[Box]:
    """Yields the boxes of a non-empty range in the part of the tensor at index `row`. That part's first element is
    number `base`."""
    depth = len(row)
    if depth == len(shape):
        yield Box(offsets=row, sizes=(1,) * depth, start=base)
        return
    inner = prod(shape[depth + 1 :])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        yield from _boxes(shape, (*row, last), start - last * inner, stop - last * inner, base + last * inner)
        return
    if start < first * inner:
        above = first - 1
        yield from _boxes(shape, (*row, above), start - above * inner, inner, base + above * inner)
    if first < last:
        rest = shape[depth + 1 :]
        offsets = (*row, first, *(0 for _ in rest))
        yield Box(offsets=offsets, sizes=(*(1 for _ in row), last - first, *rest), start=base + first * inner)
    if last * inner < stop:
        yield from _boxes(shape, (*row, last), 0, stop - last * inner, base + last * inner)


def runs_of(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields a box of a row-major tensor as contiguous ranges: (start in the flattened tensor, length, start in the
    flattened box). Inverse of `boxes_of`.

    >>> list(runs_of((3, 4), (1, 0), (2, 4)))
    [(4, 8, 0)]
    >>> list(runs_of((3, 4), (1, 1), (2, 2)))
    [(5, 2, 0), (9, 2, 2)]
    """
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        raise InternalError(f"a box at {tuple(offsets)} of {tuple(sizes)} is not of a tensor of shape {tuple(shape)}")
    if not prod(sizes):
        return
    # The innermost dimensions that the box covers whole, and the next one, are contiguous.
    split = len(shape)
    while split > 0 and sizes[split - 1] == shape[split - 1]:
        split -= 1
    split = max(0, split - 1)
    length = prod(sizes[split:])
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = sum(offset * stride for offset, stride in zip(offsets[split:], strides[split:], strict=True))
    for index in range(prod(sizes[:split])):
        start, left = inner, index
        for dim in reversed(range(split)):
            left, place = divmod(left, sizes[dim])
            start += (offsets[dim] + place) * strides[dim]
        yield start, length, index * length
