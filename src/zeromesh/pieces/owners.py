"""Who owns which tensor, where an optimizer needs whole ones: chosen once, from costs and from where the slices lie.

[Note: Balance] All owners step at once, so a step takes as long as the one with the most work. Longest first, each
tensor to whoever has least (Graham 1969), gives a limit. Then each tensor goes, under the limit or 5 % above the mean,
to the rank for which the least has to move, the slow axes first. A cheap choice may take memory: a rank that holds more
elements than 5 % above the mean, or than the longest tensor has, gets no more for being near. A tensor is not divided,
so with few tensors for many ranks no choice is even: `Owners.bound` is a lower bound of all choices.

[Note: Planes] A tensor may be divided before it is sharded, over axes that have no stage (tensor parallelism): the
ranks with one index on each of these axes are a plane, and have a region of the tensor in slices. Whole is whole over
the planes too: `across` makes a layout in which their axes divide everything, and tensors are owned among all of its
ranks. A tensor that is not divided over one of these axes is there once for each of its indices: such copies are
stepped alike, each by an owner among its own planes at the same place, so that nothing of them crosses the axis.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from typing import NamedTuple

from zeromesh.pieces.region import Region
from zeromesh.strategy import Axis, Layout, Stage, Wire

SLACK = 1.05
"""Factor on the mean load up to which balance is given up for less traffic: half of the required 10 %."""

NEWTON_SCHULZ_STEPS = 5
"""As in torch.optim.Muon and its first publication (https://kellerjordan.github.io/posts/muon)."""

BUCKET_BYTES = 64 << 20
"""Gradients and values of one bucket on the rank that has most of them, unless ranks would then wait for each other.
Three buckets are in memory at once."""

WAITS = 1.1
"""As little may be lost to buckets in which one rank has more to do than others as to the balance of owners: 10 %."""


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """FLOPs of the iteration that orthogonalises a matrix, or each matrix of a batch (last two dimensions).

    A step of an m x n matrix, m <= n: its Gram matrix, that squared, and the product of both with it.

    >>> newton_schulz_flops((4, 8)) == NEWTON_SCHULZ_STEPS * (2 * (4 * 4 * 8) * 2 + 2 * 4**3)
    True
    """
    if len(shape) < 2:
        return float(prod(shape))
    m, n = sorted(shape[-2:])
    return float(prod(shape[:-2]) * NEWTON_SCHULZ_STEPS * (4 * m * m * n + 2 * m**3))


class Share(NamedTuple):
    """The part of one tensor, or of one copy of it, that one rank holds; not empty."""

    copy: int  # which, if there are several: [Note: Planes]
    rank: int  # among those that hold the states together
    region: Region | None  # in which `start` and `stop` count, flattened; None for all of the tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one tensor lies among the ranks that hold one copy of the states.

    `planes`: by plane, which copy of the tensor it has, and which part: [Note: Planes]. None: there is one, which has
    all.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # in its flat buffer
    padded: int  # the buffer's length
    planes: tuple[tuple[int, Region], ...] | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def copies(self) -> int:
        return 1 if self.planes is None else len({copy for copy, _ in self.planes})

    def mirrors(self, owner: int, ranks: int) -> tuple[int, ...]:
        """The owners of all copies, where `owner` has the first."""
        if self.copies == 1:
            return (owner,)
        by_copy = self._planes_by_copy()
        plane, place = divmod(owner, ranks // len(self.planes or ()))
        index = by_copy[0].index(plane)
        return tuple(planes[index] * (ranks // len(self.planes or ())) + place for planes in by_copy)

    def candidates(self, ranks: int) -> Sequence[int]:
        """Those that may own the first copy."""
        if self.copies == 1:
            return range(ranks)
        each = ranks // len(self.planes or ())
        return [plane * each + place for plane in self._planes_by_copy()[0] for place in range(each)]

    def _planes_by_copy(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.copies)]
        for plane, (copy, _) in enumerate(self.planes or ()):
            found[copy].append(plane)
        return found

    def shares(self, ranks: int) -> Iterator[Share]:
        """The shares of all ranks that hold some of it, plane by plane."""
        planes = self.planes or ((0, Region.whole(self.shape)),)
        each = ranks // len(planes)
        length = self.padded // each
        for plane, (copy, region) in enumerate(planes):
            first, stop, at = self.start, self.start + region.numel, region.begins
            for holder in range(first // length, -(-stop // length)) if region.numel else ():
                start, end = max(holder * length, first) - first, min((holder + 1) * length, stop) - first
                if at is not None:
                    yield Share(copy, plane * each + holder, None, at + start, at + end)
                else:
                    yield Share(copy, plane * each + holder, region, start, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Which rank owns each tensor, and how even that is: [Note: Balance].

    `rank_of`: by tensor, among the ranks that hold one copy of the states, as `Layout.shard` numbers chunks; of several
    copies of a tensor that of the first: `Placement.mirrors`.
    """

    rank_of: tuple[int, ...]
    loads: tuple[float, ...]  # by rank, the summed costs of its tensors
    bound: float  # no choice has a rank with less than this

    @property
    def balance(self) -> float:
        """The largest load in times of the mean; 1 is even."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0


def across(layout: Layout, further: Sequence[tuple[str, int]]) -> Layout:
    """The layout of all ranks that tensors are divided over, those of all planes: [Note: Planes].

    `further`: name and size of the axes that planes are numbered along, the first most significant. Bytes along them
    move last on the way to an owner, and first on the way back.
    """
    axes = [
        Axis(name=name, mesh_axis=name, size=size, stride=1, stage=Stage.THREE, wire=Wire()) for name, size in further
    ]
    return replace(layout, mesh=(*further, *layout.mesh), axes=(*axes, *layout.axes))


def choose_owners(
    layout: Layout, tensors: Sequence[Placement], costs: Sequence[float], *, anywhere: bool = False
) -> Owners:
    """The owners of `tensors`: [Note: Balance]. The same on every rank, since it looks at nothing else.

    Args:
        tensors: in an order that all ranks share.
        costs: of stepping each, in any unit.
        anywhere: no rank is nearer to a tensor than another.
    """
    ranks = layout.degree(layout.significant)
    order = sorted(range(len(tensors)), key=lambda index: -costs[index])
    all_costs = [cost for tensor, cost in zip(tensors, costs, strict=True) for _ in range(tensor.copies)]
    mean = sum(all_costs) / ranks
    even = _longest_first(tensors, order, costs, ranks)
    limit = max(*_loads(tensors, even, costs, ranks), SLACK * mean)
    near = even if anywhere else _nearest(layout, tensors, order, costs, limit)
    loads = _loads(tensors, near, costs, ranks)
    if max(loads) > limit:
        near, loads = even, _loads(tensors, even, costs, ranks)
    return Owners(rank_of=tuple(near), loads=tuple(loads), bound=_bound(all_costs, ranks))


def _longest_first(tensors: Sequence[Placement], order: Sequence[int], costs: Sequence[float], ranks: int) -> list[int]:
    """Tensors with several copies come first, since the others can balance them."""
    owners, loads = [0] * len(order), [0.0] * ranks
    for index in (index for index in order if tensors[index].copies > 1):
        mirrors = partial(tensors[index].mirrors, ranks=ranks)
        owner = min(tensors[index].candidates(ranks), key=lambda rank: max(loads[each] for each in mirrors(rank)))
        owners[index] = owner
        for rank in mirrors(owner):
            loads[rank] += costs[index]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in (index for index in order if tensors[index].copies == 1):
        load, owners[index] = heap[0]
        heapq.heapreplace(heap, (load + costs[index], owners[index]))
    return owners


def _nearest(
    layout: Layout, tensors: Sequence[Placement], order: Sequence[int], costs: Sequence[float], limit: float
) -> list[int]:
    ranks = layout.degree(layout.significant)
    owners, loads, held = [0] * len(order), [0.0] * ranks, [0] * ranks
    numels = [tensor.numel for tensor in tensors]
    room = max([SLACK * sum(tensor.numel * tensor.copies for tensor in tensors) / ranks, *numels])
    for index in order:
        cost, numel, mirrors = costs[index], numels[index], partial(tensors[index].mirrors, ranks=ranks)
        candidates, moved = tensors[index].candidates(ranks), _moved(layout, tensors[index])

        def fits(rank: int, room: float = inf) -> bool:
            return all(loads[each] + cost <= limit and held[each] + numel <= room for each in mirrors(rank))  # noqa: B023  # called here

        near = [rank for rank in moved if fits(rank, room)]
        fitting = near or [rank for rank in candidates if fits(rank)]
        if fitting:
            owner = min(fitting, key=lambda rank: (moved.get(rank, ()), held[rank]))
        else:
            owner = min(candidates, key=lambda rank: max(loads[each] for each in mirrors(rank)))
        owners[index] = owner
        for rank in mirrors(owner):
            loads[rank] += cost
            held[rank] += numel
    return owners


def _moved(layout: Layout, tensor: Placement) -> dict[int, tuple[int, ...]]:
    """By rank that has a part of its first copy: elements that cross each axis if it owns that, outermost axis
    first."""
    strides = significant_strides(layout)
    shares = [share for share in tensor.shares(layout.degree(layout.significant)) if share.copy == 0]
    there = {name: dict[int, int]() for name in strides}
    for share in shares:
        for name, (stride, size) in strides.items():
            here = share.rank // stride % size
            there[name][here] = there[name].get(here, 0) + share.stop - share.start
    return {
        rank: tuple(tensor.numel - there[name][rank // stride % size] for name, (stride, size) in strides.items())
        for _, rank, *_ in shares
    }


def significant_strides(layout: Layout) -> dict[str, tuple[int, int]]:
    """By axis that states are sharded over, outermost first: (distance between neighbours' chunks, size)."""
    strides, stride = {}, 1
    for axis in reversed(layout.significant):
        strides[axis.name] = (stride, axis.size)
        stride *= axis.size
    return {axis.name: strides[axis.name] for axis in reversed(layout.axes) if strides.get(axis.name, (0, 1))[1] > 1}


def _loads(tensors: Sequence[Placement], owners: Sequence[int], costs: Sequence[float], ranks: int) -> list[float]:
    loads = [0.0] * ranks
    for tensor, owner, cost in zip(tensors, owners, costs, strict=True):
        for rank in tensor.mirrors(owner, ranks):
            loads[rank] += cost
    return loads


def _bound(costs: Sequence[float], ranks: int) -> float:
    """A lower bound on the largest load under any choice: the mean, and of the k*ranks + 1 longest the k + 1 shortest,
    which share a rank."""
    longest = sorted(costs, reverse=True)
    crowded = [sum(longest[k * ranks - k : k * ranks + 1]) for k in range(1, (len(longest) - 1) // ranks + 1)]
    return max([sum(costs) / ranks, *longest[:1], *crowded])


def cut(
    tensors: Sequence[Placement], owners: Owners, costs: Sequence[float], most_numel: int, *, waits: float = WAITS
) -> list[list[int]]:
    """The tensors in buckets that are stepped one after the other: in each, every rank has about as much to do.

    Args:
        most_numel: elements that a rank should have in one bucket at most.
        waits: the most that all buckets may take together, where each takes as long as its slowest owner, in times of
            the largest load. Fewer and longer buckets are made until it is kept.
    """
    own: dict[int, list[int]] = {}
    elements: Counter[int] = Counter()
    # Those of one shape beside each other, for who steps on them at once. All copies of a tensor are in one bucket, for
    # which the first one counts.
    for index in sorted(range(len(tensors)), key=lambda index: (-costs[index], tensors[index].shape, index)):
        own.setdefault(owners.rank_of[index], []).append(index)
        for rank in tensors[index].mirrors(owners.rank_of[index], len(owners.loads)):
            elements[rank] += tensors[index].numel
    held = max(elements.values(), default=0)
    count = min(-(-held // max(1, most_numel)), max(map(len, own.values()), default=1))
    while True:
        buckets, longest = _cut(own, owners, costs, max(1, count))
        if count <= 1 or longest <= waits * max(owners.loads):
            return [sorted(bucket) for bucket in buckets if bucket] or [[]]
        count -= 1


def _cut(
    own: Mapping[int, Sequence[int]], owners: Owners, costs: Sequence[float], count: int
) -> tuple[list[list[int]], float]:
    """So many buckets, and the sum of the work of each one's slowest owner."""
    buckets: list[list[int]] = [[] for _ in range(count)]
    slowest = [0.0] * count
    for rank, indices in own.items():
        before, loads = 0.0, [0.0] * count
        for index in indices:
            middle = (before + costs[index] / 2) / (owners.loads[rank] or 1.0)
            bucket = min(count - 1, int(middle * count))
            buckets[bucket].append(index)
            loads[bucket] += costs[index]
            before += costs[index]
        slowest = [max(pair) for pair in zip(slowest, loads, strict=True)]
    return buckets, sum(slowest)
