"""One level of the network as data, with measured seconds of its collectives by message size.

[Note: Curve] A level's latency and rate say how a measured time divides. Everyone who needs the message waits for the
latency. During the rest the links are busy, and others share them. So a curve is only used for seconds beyond the
latency::

    busy(x) = seconds(x) - latency      at the points, straight between them, in proportion before the first

No message's bytes may be faster than a longer message's: a shaped link lets the first bytes after a pause pass at once,
but not those of many messages in a row. So `busy` grows with x and `busy / x` falls, as bounds require.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, log
from typing import Self

from zeromesh.errors import ClusterError, one_of, short_repr

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Measured times of one operation over one level, with all groups of the level at once, as in training.

    `points` has seconds of the whole collective by bytes that leave ONE member: a mapping, stored as sorted pairs.
    """

    operation: str  # one of `OPERATIONS`
    ranks: int  # members of the group
    points: Mapping[float, float] | tuple[tuple[float, float], ...]
    beside_computation: bool = False  # whether the devices computed meanwhile

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
        """(bytes, seconds), the shortest message first."""
        return tuple(dict(self.points).items())

    @property
    def passes(self) -> int:
        """Rounds over the ring: an all-reduce goes around twice."""
        return 2 if self.operation == "all_reduce" else 1

    def busy_s(self, sent_bytes: float, latency_s: float, bytes_per_s: float) -> float:
        """Seconds for which the links are busy: [Note: Curve]. Every time on the curve includes the latency. Messages
        longer than all measured ones continue at `bytes_per_s`."""
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


#: Kinds of link for which the cost model has separate shares of the nominal bandwidth.
#: "auto" goes by the level's place: see `link_kind`.
LINK_KINDS = (
    "auto",
    "nvlink",
    "xgmi",
    "pcie",
    "infiniband",
    "roce",
    "ethernet",
    "efa",
    "slingshot",
    "loopback",
    "other",
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a cluster's hierarchy.

    ::

        level "cluster", size 2:   [ member 0 ]=====bandwidth=====>[ member 1 ]
        level "node", size 4:        d0 d1 d2 d3                     d4 d5 d6 d7

    A member of the first level is a device. A member of each next level is a whole group of the level before.

    Args:
        ports: links (NICs) that `bandwidth_bytes_per_s` is made of. One device drives one of them, so a single device
            reaches `bandwidth / ports`. None: no such limit.
        busy_latency_s: `latency_s` while the device computes, if it differs: on CPU a message waits until the system
            runs its process. None: the same.
        host_bytes_per_s: rate at which one processor core sends and receives if it does nothing else, for devices with
            `cores`. None: moving bytes takes no processor.
        shares: measured share of both rates that an operation ("all_gather", "reduce_scatter", "all_reduce") reaches,
            if it differs from 1. A mapping, stored as sorted pairs so that levels hash.
        curves: measured seconds of collectives by message size. A curve overrides the rate; rate, latency and shares
            then divide it, and extend it beyond its end.
    """

    name: str  # the mesh axis that runs over this level
    size: int  # members in one group; in a divided cluster (`Cluster.cut`), the data-parallel ones
    bandwidth_bytes_per_s: float  # out of ONE member, in one direction, over all its links together
    latency_s: float  # of one hop of a message between two members
    kind: str = "auto"  # one of `LINK_KINDS`
    ports: int | None = None
    busy_latency_s: float | None = None
    host_bytes_per_s: float | None = None
    host_call_s: float = 0.0  # further processor time of a collective, at any size: calls, threads that wake
    shares: Mapping[str, float] | tuple[tuple[str, float], ...] = field(default=())
    curves: tuple[Curve, ...] = ()
    inner: int = 1  # members that axes inside the data-parallel ones take, in addition to `size`
    outer: int = 1  # the same for axes outside

    __repr__ = short_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", tuple(sorted(dict(self.shares).items())))
        for operation, share in dict(self.shares).items():
            if operation not in OPERATIONS or share <= 0:
                raise ClusterError(
                    f"level {self.name!r}: shares of {', '.join(OPERATIONS)} must be positive; got {operation} = "
                    f"{share}"
                )
        if not _NAME.fullmatch(self.name):
            raise ClusterError(
                f"level {self.name!r}: a name must consist of letters, digits and _, like an axis of a strategy"
            )
        if self.size < 1:
            raise ClusterError(f"level {self.name!r}: size must be at least 1, got {self.size}")
        if self.bandwidth_bytes_per_s <= 0:
            raise ClusterError(f"level {self.name!r}: bandwidth must be positive, got {self.bandwidth_bytes_per_s}")
        if self.latency_s < 0:
            raise ClusterError(f"level {self.name!r}: latency must not be negative, got {self.latency_s}")
        if self.busy_latency_s is not None and self.busy_latency_s < self.latency_s:
            raise ClusterError(
                f"level {self.name!r}: busy_latency is the latency while devices compute, so it must be at least the "
                f"latency of {self.latency_s} s, got {self.busy_latency_s} s"
            )
        if self.kind not in LINK_KINDS:
            raise ClusterError(f"level {self.name!r}: kind must be {one_of(self.kind, LINK_KINDS)}")
        if self.ports is not None and self.ports < 1:
            raise ClusterError(f"level {self.name!r}: ports must be at least 1, got {self.ports}")
        if self.host_bytes_per_s is not None and self.host_bytes_per_s <= 0:
            raise ClusterError(f"level {self.name!r}: host_rate must be positive, got {self.host_bytes_per_s}")
        if self.host_call_s < 0 or (self.host_call_s and self.host_bytes_per_s is None):
            rate = "no" if self.host_bytes_per_s is None else "a"
            raise ClusterError(
                f"level {self.name!r}: host_call must not be negative, and goes with a host_rate; got "
                f"{self.host_call_s:g} s and {rate} host_rate"
            )

    @property
    def members(self) -> int:
        """All members of this level in one group, data-parallel or not."""
        return self.inner * self.size * self.outer

    def share(self, operation: str) -> float:
        """The share of the level's rates that `operation` reaches."""
        return dict(self.shares).get(operation, 1.0)

    def beside_computation(self) -> Self:
        """Returns the level as measured while devices compute, or itself if that was not measured."""
        beside = tuple(replace(curve, beside_computation=False) for curve in self.curves if curve.beside_computation)
        if not beside and self.busy_latency_s is None:
            return self
        latency_s = self.latency_s if self.busy_latency_s is None else self.busy_latency_s
        return replace(self, latency_s=latency_s, busy_latency_s=None, curves=beside or self.curves)

    def curve(self, operation: str, ranks: int) -> Curve | None:
        """Returns the curve of `operation` alone, for the group size nearest to `ranks`; None if there is none."""
        fitting = [c for c in self.curves if c.operation == operation and not c.beside_computation]
        return min(fitting, key=lambda c: (abs(log(c.ranks / ranks)), c.ranks), default=None)
