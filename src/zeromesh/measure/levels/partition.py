"""Divisions of the ranks, and the mesh that they make. Torch-free.

A source says which ranks belong together: those of a host, of a switch, of a pair of devices that a fast link joins.
Such a division is a level if its parts are equal blocks of neighbouring ranks, as a mesh has them, and if it cuts the
blocks of every coarser level into equal parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

RATIO = 2.0
"""How much further all ranks of different parts must be from each other than any two of one part. Pairs of ranks on two
loaded cores differ by up to 2.1 over one link, but not so that it divides them (gloo, 8 ranks, load of 10, November
2026); links of two levels differ by more."""

Distances = Mapping[tuple[int, int], float]
"""Of pairs (lower, higher), of whatever is the same for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Ranks in parts.

    Args:
        source: who says so, for the cluster file.
        parts: of each rank, the part that it is in; equal means the same part.
    """

    source: str
    parts: tuple[Hashable, ...]

    @property
    def block(self) -> int:
        """Ranks of a part, where all are equal blocks of neighbours; else 0."""
        world = len(self.parts)
        count = len(set(self.parts))
        size = world // count
        blocks = [set(self.parts[at : at + size]) for at in range(0, world, size)]
        return size if world % count == 0 and all(len(block) == 1 for block in blocks) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The levels of what runs.

    Args:
        mesh: sizes by name, outermost first.
        sources: who each comes from, by name.
        missing: what could not be found, or was found and is no level, a sentence each.
    """

    mesh: Mapping[str, int]
    sources: Mapping[str, str]
    missing: tuple[str, ...] = ()


def close_parts(members: Sequence[int], distances: Distances) -> list[tuple[frozenset[int], ...]]:
    """Divisions of `members`, coarsest first, in which all of one part are clearly closer to each other than to others:
    by `RATIO`, every pair. Neither all in one part nor each in its own is one."""
    found = []
    for threshold in sorted(set(distances.values()), reverse=True)[1:]:
        parts = _joined(members, distances, threshold)
        if not 1 < len(parts) < len(members):
            continue
        part_of = {member: index for index, part in enumerate(parts) for member in part}
        within, across = 0.0, inf
        for (one, other), distance in distances.items():
            if part_of[one] == part_of[other]:
                within = max(within, distance)
            else:
                across = min(across, distance)
        if across >= RATIO * within and parts not in found:
            found.append(parts)
    return found


def _joined(members: Sequence[int], distances: Distances, threshold: float) -> tuple[frozenset[int], ...]:
    part = {member: frozenset((member,)) for member in members}
    for (one, other), distance in distances.items():
        if distance <= threshold and part[one] is not part[other]:
            together = part[one] | part[other]
            part.update(dict.fromkeys(together, together))
    return tuple(dict.fromkeys(part[member] for member in members))


def levels_of(world: int, partitions: Sequence[Partition], *, node: int) -> Found:
    """The mesh of all divisions that fit into each other.

    Args:
        world: ranks.
        partitions: in the order in which they are believed; the first that says that some level is there is its source.
        node: ranks that the level called `node` and those inside it join: a host's.
    """
    sources: dict[int, Partition] = {}
    missing = []
    for partition in partitions:
        size = partition.block
        count = len(set(partition.parts))
        if size in (1, world):
            continue
        if not size:
            missing.append(
                f"{partition.source}: {count} parts that are no equal blocks of neighbouring ranks: no level"
            )
        elif bad := [other for other in sources if max(size, other) % min(size, other)]:
            missing.append(f"{partition.source}: blocks of {size} ranks do not fit into those of {bad[0]}: no level")
        else:
            sources.setdefault(size, partition)
    edges = [1, *sorted(sources), world]
    sizes = [outer // inner for inner, outer in pairwise(edges)]
    inside = sum(1 for edge in edges[1:] if edge <= node)
    names = _names(inside, len(sizes) - inside)
    told = {name: sources[edge].source for name, edge in zip(names, edges[1:-1], strict=False)}
    told[names[-1]] = "all ranks"
    mesh = dict(zip(reversed(names), reversed(sizes), strict=True))
    return Found(mesh=mesh, sources=told, missing=tuple(missing))


def _names(inside: int, outside: int) -> list[str]:
    """Innermost first: the outermost inside a machine is `node`, what joins all machines `cluster`."""
    inner = ["node", "package", *(f"package{index}" for index in range(2, inside))][:inside][::-1]
    outer = ["switch", *(f"switch{index}" for index in range(2, outside))][: max(0, outside - 1)]
    return [*inner, *outer, *(["cluster"] if outside else [])]
