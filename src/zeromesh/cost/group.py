"""A group of ranks on a cluster's hierarchy, and its share of each level.

[Note: Shared ports] All groups of one shape communicate at once, since every rank runs the same step. So the links out
of one member of a level are divided among the groups that have ranks in it. Eight groups that each join one GPU of
every node share the node's NICs. One group of all GPUs has them to itself, and sends less through them per rank::

    axis cluster alone: node [0 1 .. 7] -> 8 groups, each with 1/8 of the NICs
    node and cluster:   node [0 1 .. 7] -> 1 group with all NICs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.level import Level
from zeromesh.cost.constants import Constants
from zeromesh.errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One level from one group's view."""

    level: int  # index of the level in the cluster, 0 innermost
    size: int  # members of this level with ranks of the group, within one member of the next level
    rate_bytes_per_s: float  # of this group out of one member, given its share of the links
    sharing: int  # groups whose traffic leaves one member at once
    step_s: float  # latency of one step over this level
    outer: bool  # whether it joins nodes; inside one, message size matters more (see `collective`)
    links: Level = field(compare=False)  # may have measured curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate, as hops, innermost first. Levels with a single member are left out."""

    hops: tuple[Hop, ...]

    @classmethod
    def of(cls, cluster: Cluster, spans: Sequence[tuple[str, int]], constants: Constants) -> Group:
        """Returns the group with `size` members on each named level of `cluster`, which has only the ranks in use
        (`take`). Repeated names multiply. Raises ClusterError for an unknown level."""
        sizes = dict.fromkeys((level.name for level in cluster.levels), 1)
        for name, size in spans:
            sizes[cluster.level(name).name] *= size
        hops = []
        inside = 1
        for index, level in enumerate(cluster.levels):
            if sizes[level.name] > level.members:
                raise InternalError(f"a group of {sizes[level.name]} on level {level.name!r} of size {level.members}")
            if sizes[level.name] > 1:
                hops.append(_hop(cluster, index, sizes[level.name], inside, constants))
            inside *= sizes[level.name]
        return cls(hops=tuple(hops))

    @property
    def size(self) -> int:
        return math.prod(hop.size for hop in self.hops)

    def inner(self) -> Group:
        """The part of this group inside one member of its outermost hop."""
        return Group(hops=self.hops[:-1])

    def outermost(self) -> Group:
        """The group of one rank of each member of the outermost hop. Each rank inside a member has one."""
        if not self.hops:
            return self
        hop = self.hops[-1]
        ranks = self.size // hop.size
        alone = replace(hop, rate_bytes_per_s=hop.rate_bytes_per_s / ranks, sharing=hop.sharing * ranks)
        return Group(hops=(alone,))


def ring_steps(sizes: Sequence[int]) -> tuple[int, ...]:
    """The number of steps, of the size - 1 in a ring in rank order, that cross each axis or hop, innermost first.

    >>> ring_steps([2, 4, 48])  # 47 between the outermost members, 192 - 48 between the middle ones, 384 - 192 inside
    (192, 144, 47)
    """
    members = [math.prod(sizes[i:]) for i in range(len(sizes) + 1)]
    return tuple(here - above for here, above in pairwise(members))


def _hop(cluster: Cluster, index: int, size: int, inside: int, constants: Constants) -> Hop:
    level = cluster.levels[index]
    below = cluster.members_below(index)
    # If a level is split, this group's ranks may hold several places per member: so `below` is divided.
    sharing = max(1, below // inside)
    nominal = level.bandwidth_bytes_per_s
    kind = cluster.link_kind(index)
    # A device drives one port, so fewer devices than ports cannot use all of them.
    usable = nominal * min(1.0, below / (level.ports or 1))
    return Hop(
        level=index,
        size=size,
        rate_bytes_per_s=usable * constants.share_of(kind) / sharing,
        sharing=sharing,
        step_s=level.latency_s,
        outer=kind not in INSIDE_A_NODE,
        links=level,
    )


#: Kinds of link inside a node. There bandwidth depends on message size, beyond latency.
INSIDE_A_NODE = ("nvlink", "xgmi", "pcie")
