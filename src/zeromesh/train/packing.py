"""Whole documents side by side in rows of one length. Torch-free."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which documents share a row: the longest first, each into the row with the least room that it fits in.

    Best-fit decreasing needs at most 11/9 of the fewest possible rows, and one (Johnson, "Near-optimal bin packing
    algorithms", 1973).

    Args:
        lengths: of the documents, each at most `capacity`.
        capacity: of a row.

    Returns:
        The documents of each row, by their place in `lengths`.

    >>> pack([3, 5, 2, 2], 6)
    [[1], [0, 2], [3]]
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # in order, each once
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(rooms, lengths[document])
        if place < len(rooms):
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(document)
        left = room - lengths[document]
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(row)
    return rows
