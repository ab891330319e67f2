"""Finds the levels that join the ranks: their hosts, and groups of ranks that are close by measurement.

Pairs of ranks are measured inside the first host, which stands for all hosts, and between the first ranks of hosts. A
division of the ranks is a level if its parts are equal blocks of neighbouring ranks, as in a mesh, and if it divides
the blocks of every coarser level into equal parts.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf

import torch
import torch.distributed as dist

from zeromesh.errors import MeshError
from zeromesh.files import machine_id
from zeromesh.launch.ranks import Ranks
from zeromesh.units import format_bytes

RATIO = 2.0
"""Ranks of different parts must be this many times as far apart as any two of one part. Pairs of ranks on two loaded
cores differ by up to 2.1 over one link, but not in a way that divides them (gloo, 8 ranks, load of 10, November 2026).
Links of two levels differ by more."""

MOST = 16
"""Limit for the ranks whose pairs are measured: 120 pairs take some seconds."""

LONG_BYTES = 1 << 20
"""Eight times the bytes that a shaped link lets pass at once after a pause. A link of 200 Mbit/s takes only 42 ms."""

MOST_TRIES = 8
TRYING_S = 0.15
"""Approximate time for long messages between one pair; a slow link gets two messages."""

PINGS = 12

Distances = Mapping[tuple[int, int], float]
"""Seconds by pair (lower, higher)."""

Parts = tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Divides ranks into parts with equal values. `source` names its origin, for the cluster file."""

    source: str
    parts: tuple[Hashable, ...]

    @property
    def block(self) -> int:
        """Ranks of a part if all parts are equal blocks of neighbours, else 0."""
        world = len(self.parts)
        count = len(set(self.parts))
        size = world // count
        blocks = [set(self.parts[at : at + size]) for at in range(0, world, size)]
        return size if world % count == 0 and all(len(block) == 1 for block in blocks) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The levels of the launched ranks, as a mesh: sizes by name, outermost first. `sources` tells the origin of each.
    `missing` has a sentence for each level that could not be found, and for each division that is not a level."""

    mesh: Mapping[str, int]
    sources: Mapping[str, str]
    missing: tuple[str, ...] = ()


def find_levels(ranks: Ranks) -> Found:
    """Finds the levels of all ranks, the same on each. Collective. Raises MeshError, on all ranks, if hosts have
    different numbers of ranks, or ranks that are not neighbours."""
    named: list[str] = [""] * ranks.world
    dist.all_gather_object(named, machine_id())
    machines = Partition(source="hosts of the ranks", parts=tuple(named))
    hosts = len(set(named))
    if not (size := machines.block):
        raise MeshError(
            f"{ranks.world} ranks on {hosts} hosts are no equal blocks of neighbouring ranks, so they have no levels: "
            f"start as many on each and number them host by host (torchrun does; srun -m block), or give --mesh"
        )
    missing: list[str] = []
    inside = [
        Partition(source=by, parts=tuple((rank // size, _part_of(rank % size, parts)) for rank in range(ranks.world)))
        for by, parts in _measured(ranks, range(size), "ranks of the first host", missing)
    ]
    above = [
        Partition(source=by, parts=tuple(_part_of(rank // size * size, parts) for rank in range(ranks.world)))
        for by, parts in _measured(ranks, range(0, ranks.world, size), "first ranks of hosts", missing)
    ]
    # A machine whose ranks are far apart stands for several: an emulated cluster, or containers.
    apart = [each.block for each in inside if hosts == 1]
    levels = levels_of(ranks.world, [machines, *inside, *above], node=max(apart, default=size))
    return Found(mesh=levels.mesh, sources=levels.sources, missing=(*missing, *levels.missing))


def _measured(ranks: Ranks, members: Sequence[int], who: str, missing: list[str]) -> list[tuple[str, Parts]]:
    if len(members) < 3:
        return []  # two have a single distance
    if len(members) > MOST:
        missing.append(f"{len(members)} {who} are too many to measure in pairs (at most {MOST})")
        return []
    rates, latencies = measure_pairs(ranks, members)
    size = format_bytes(LONG_BYTES)
    found = [(f"measured: {size} between pairs of {who}", parts) for parts in close_parts(members, rates)]
    known = {parts for _, parts in found}
    slow = [parts for parts in close_parts(members, latencies) if parts not in known]
    found += [(f"measured: latency between pairs of {who}", parts) for parts in slow]
    if not found:
        spread = max(rates.values()) / min(rates.values())
        missing.append(
            f"pairs of {who} take times for {size} that differ by up to {spread:.2f}, and make no groups that are "
            f"{RATIO} apart: no level among them"
        )
    return found


def _part_of(member: int, parts: Parts) -> int:
    return next(index for index, part in enumerate(parts) if member in part)


def measure_pairs(ranks: Ranks, members: Sequence[int]) -> tuple[Distances, Distances]:
    """Measures the seconds of a long message, and of a few bytes, between each two of `members`, one pair at a time.
    Collective over all ranks.

    It takes the least of several, since other events only delay a message.
    """
    pairs = list(combinations(members, 2))
    long = torch.zeros(LONG_BYTES // 4, device=ranks.device)
    word = torch.zeros(1, device=ranks.device)
    seconds = torch.full((2, len(pairs)), torch.inf, dtype=torch.float64)
    for index, (one, other) in enumerate(pairs):
        dist.barrier()
        if ranks.rank in (one, other):
            peer, first = one + other - ranks.rank, ranks.rank == one
            _there_and_back(word, word, peer, first, ranks)  # connections are made at first use
            tries = [_there_and_back(long, word, peer, first, ranks)]
            count = torch.tensor([min(MOST_TRIES, TRYING_S / tries[0])])  # both use the first's
            count = count.to(ranks.device)
            dist.send(count, peer) if first else dist.recv(count, peer)
            tries += [_there_and_back(long, word, peer, first, ranks) for _ in range(max(1, int(count)))]
            pings = [_there_and_back(word, word, peer, first, ranks) for _ in range(PINGS)]
            seconds[:, index] = torch.tensor([min(tries), min(pings)])
    dist.all_reduce(seconds, dist.ReduceOp.MIN)
    rates, latencies = (dict(zip(pairs, row, strict=True)) for row in seconds.tolist())
    return rates, latencies


def _there_and_back(message: torch.Tensor, answer: torch.Tensor, peer: int, first: bool, ranks: Ranks) -> float:
    start = time.perf_counter()
    if first:
        dist.send(message, peer)
        dist.recv(answer, peer)
    else:
        dist.recv(message, peer)
        dist.send(answer, peer)
    ranks.settle()
    return time.perf_counter() - start


def close_parts(members: Sequence[int], distances: Distances) -> list[Parts]:
    """Returns divisions of `members`, coarsest first, in which ranks are clearly closer to all of their part than to
    any others: by the factor `RATIO`. Divisions with one part, or with one member per part, do not count."""
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


def _joined(members: Sequence[int], distances: Distances, threshold: float) -> Parts:
    part = {member: frozenset((member,)) for member in members}
    for (one, other), distance in distances.items():
        if distance <= threshold and part[one] is not part[other]:
            together = part[one] | part[other]
            part.update(dict.fromkeys(together, together))
    return tuple(dict.fromkeys(part[member] for member in members))


def levels_of(world: int, partitions: Sequence[Partition], *, node: int) -> Found:
    """Makes a mesh of all divisions that fit into each other. They come in order of trust, and the first one with a
    level is its source. The level called `node`, and those inside it, join the `node` ranks of a host.
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
    """Returns names of levels, innermost first. The outermost inside a machine is `node`; the one that joins all
    machines is `cluster`."""
    inner = ["node", "package", *(f"package{index}" for index in range(2, inside))][:inside][::-1]
    outer = ["switch", *(f"switch{index}" for index in range(2, outside))][: max(0, outside - 1)]
    return [*inner, *outer, *(["cluster"] if outside else [])]
