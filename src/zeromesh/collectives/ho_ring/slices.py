"""In which slices two levels work at once, and how many of them wait to be summed."""

from __future__ import annotations

SLICES = 16
"""A shard is cut into that many: one level starts on a slice when the other has delivered it, so the first and the last
are not overlapped."""

SLICE_BYTES = range(1 << 18, 1 << 20)
"""Shortest and longest slice: shorter ones cost more CPU time than they hide."""

WINDOW = 4
"""Slices under way on each of two levels that reduce at once."""


def slice_bytes(shard_bytes: int) -> int:
    """Length of the slices of a shard; a multiple of every element's size."""
    return min(max(shard_bytes // SLICES, SLICE_BYTES.start), SLICE_BYTES.stop) // 64 * 64


def sum_terms(major: int, minor: int) -> int:
    """Terms that a rank has room for while it reduces over axes of these sizes at once."""
    return WINDOW * (major * minor - 1)
