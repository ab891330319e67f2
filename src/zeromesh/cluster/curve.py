"""Seconds of a collective by the size of its message, as measured.

[Note: Curve] A level's latency and rate say how a measured time divides: the latency is waited for by whoever needs the
message, and over the rest links are busy, which others share. So only seconds beyond the latency are read::

    busy(x) = seconds(x) - latency      at the points, straight between them, in proportion before the first

and no message is faster by its bytes than a longer one: a shaped link lets the first bytes after a pause pass at once,
which a train of such messages does not see. That makes `busy` grow with x and `busy / x` fall, as bounds rely on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from zeromesh.errors import ClusterError, one_of

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One operation over one level, all groups of the level at once, as training uses it.

    `points` are seconds of the whole collective by bytes that leave ONE member. A mapping; stored as sorted pairs.
    """

    operation: str  # one of `OPERATIONS`
    ranks: int  # members of the group
    points: Mapping[float, float] | tuple[tuple[float, float], ...]
    beside_computation: bool = False  # the devices computed meanwhile

    def __post_init__(self) -> None:
        pairs = tuple(sorted((float(sent), float(seconds)) for sent, seconds in dict(self.points).items()))
        object.__setattr__(self, "points", pairs)
        if self.operation not in OPERATIONS:
            raise ClusterError(f"a curve's operation must be {one_of(self.operation, OPERATIONS)}")
        if self.ranks < 2:
            raise ClusterError(f"a curve of {self.operation} needs at least 2 ranks, got {self.ranks}")
        if not pairs or not all(0 < value < inf for pair in pairs for value in pair):
            raise ClusterError(f"a curve of {self.operation} needs seconds above 0 by bytes above 0, got {pairs}")

    @property
    def pairs(self) -> tuple[tuple[float, float], ...]:
        """Bytes and seconds, the shortest message first."""
        return tuple(dict(self.points).items())

    @property
    def passes(self) -> int:
        """Over the ring: an all-reduce goes around twice."""
        return 2 if self.operation == "all_reduce" else 1

    def busy_s(self, sent_bytes: float, latency_s: float, bytes_per_s: float) -> float:
        """For which the links are busy: [Note: Curve]. The latency is part of every time on the curve, and messages
        longer than were measured go on at `bytes_per_s`."""
        points: list[tuple[float, float]] = []
        for sent, seconds in reversed(self.pairs):
            busy = max(0.0, seconds - latency_s)
            if points:
                longer, longest = points[-1]
                busy = min(longest, max(busy, longest * sent / longer))
            points.append((sent, busy))
        points.append((0.0, 0.0))
        points.reverse()
        (end, busy) = points[-1]
        if sent_bytes > end:
            return busy + (sent_bytes - end) * min(1 / bytes_per_s, busy / end)
        index = max(1, bisect_left(points, (sent_bytes, 0.0)))
        (x, y), (right, above) = points[index - 1], points[min(index, len(points) - 1)]
        return y + (above - y) * (sent_bytes - x) / (right - x)
