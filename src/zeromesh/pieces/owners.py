"""Chooses which rank owns which tensor, for optimizers that need whole tensors: once, from costs and from the slices'
locations.

[Note: Balance] All owners step at once, so a step takes as long as the owner with the most work. Giving each tensor,
longest first, to the rank with the least work (Graham 1969) yields a limit. The limit is at least 5 % above the mean.
Then each tensor goes to the rank, within the limit, for which the least has to move, over slow axes first. A cheap
choice may take memory: proximity does not count for a rank with more elements than 5 % above the mean, or than the
longest tensor has. A tensor is not divided, so with few tensors for many ranks no choice is even: `Owners.bound` is a
lower bound of all choices.

[Note: Planes] A tensor may be divided before it is sharded, over axes that have no stage (tensor parallelism). The
ranks with one index on each of these axes are a plane; they hold a region of the tensor in slices. An owner needs the
tensor of all planes: `across` makes a layout in which their axes divide everything, and tensors are owned among all of
its ranks. If one of these axes does not divide a tensor, each index on it has a copy. Copies are stepped on alike, each
by an owner at the same place in its own planes, so that none of their bytes cross the axis.
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
"""Factor on the mean load up to which less traffic matters more than balance: half of the required 10 %."""

NEWTON_SCHULZ_STEPS = 5
"""As in torch.optim.Muon and in the first publication (https://kellerjordan.github.io/posts/muon)."""

BUCKET_BYTES = 64 << 20
"""Gradients and values of one bucket on the rank that has most of them. It may be more, to avoid that ranks wait for
each other. Three buckets are in memory at once."""

WAITS = 1.1
"""Limit for the time that is lost because one rank has more to do than others in a bucket: 10 %, as for the balance of
owners."""


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """Returns the FLOPs of the iteration that orthogonalises a matrix, or each matrix of a batch (last two dimensions).

    A step on an m x n matrix, m <= n, computes its Gram matrix, that matrix squared, and the product of both with it.

    >>> newton_schulz_flops((4, 8)) == NEWTON_SCHULZ_STEPS * (2 * (4 * 4 * 8) * 2 + 2 * 4**3)
    True
    """
    if len(shape) < 2:
        return float(prod(shape))
    m, n = sorted(shape[-2:])
    return float(prod(shape[:-2]) * NEWTON_SCHULZ_STEPS * (4 * m * m * n + 2 * m**3))


class Share(NamedTuple):
    """The part of one tensor, or of one copy of it, that one rank holds. Never empty."""

    copy: int  # number of the copy, if there are several: [Note: Planes]
    rank: int  # among the ranks that hold the states together
    region: Region | None  # `start` and `stop` count in it, flattened; None for the whole tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one tensor lies among the ranks that hold one copy of the states.

    `planes`: by plane, the number of its copy, and its part: [Note: Planes]. None: one plane has the whole tensor.
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
        """Returns the owners of all copies if `owner` owns the first."""
        if self.copies == 1:
            return (owner,)
        by_copy = self._planes_by_copy()
        plane, place = divmod(owner, ranks // len(self.planes or ()))
        index = by_copy[0].index(plane)
        return tuple(planes[index] * (ranks // len(self.planes or ())) + place for planes in by_copy)

    def candidates(self, ranks: int) -> Sequence[int]:
        """Returns the ranks that may own the first copy."""
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
        """Yields the shares of all ranks that hold part of the tensor, plane by plane."""
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
    """Which rank owns each tensor, and how even the load is: [Note: Balance].

    `rank_of`: the owner by tensor, among the ranks that hold one copy of the states, numbered as `Layout.shard` numbers
    chunks. If a tensor has several copies, the owner of the first; for others see `Placement.mirrors`.
    """

    rank_of: tuple[int, ...]
    loads: tuple[float, ...]  # by rank, the summed costs of its tensors
    bound: float  # in every choice some rank has at least this load

    @property
    def balance(self) -> float:
        """The largest load divided by the mean load; 1 is even."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0


def across(layout: Layout, further: Sequence[tuple[str, int]]) -> Layout:
    """Returns the layout of all ranks that tensors are divided over, in all planes: [Note: Planes].

    `further` has names and sizes of the axes that number the planes, the first most significant. Bytes move along them
    last on the way to an owner, and first on the way back.
    """
    axes = [
        Axis(name=name, mesh_axis=name, size=size, stride=1, stage=Stage.THREE, wire=Wire()) for name, size in further
    ]
    return replace(layout, mesh=(*further, *layout.mesh), axes=(*axes, *layout.axes))


def choose_owners(
    layout: Layout, tensors: Sequence[Placement], costs: Sequence[float], *, anywhere: bool = False
) -> Owners:
    """Chooses the owners of `tensors`: [Note: Balance]. All ranks choose the same, since only the arguments matter.

    Args:
        tensors: all tensors, in the same order on all ranks.
        costs: cost of a step on each, in any unit.
        anywhere: True if no rank is nearer to a tensor than another.
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
    """Returns, for each rank that has part of the first copy, the elements that cross each axis if it is the owner,
    outermost axis first."""
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
    """Returns, by axis that states are sharded over, outermost first: (distance between neighbours' chunks, size)."""
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
    """A lower bound on the largest load under any choice: the maximum of the mean, the largest cost and, for each k,
    the sum of the k + 1 smallest among the k*ranks + 1 largest, since some rank has k + 1 of these."""
    longest = sorted(costs, reverse=True)
    crowded = [sum(longest[k * ranks - k : k * ranks + 1]) for k in range(1, (len(longest) - 1) // ranks + 1)]
    return max([sum(costs) / ranks, *longest[:1], *crowded])


def cut(
    tensors: Sequence[Placement], owners: Owners, costs: Sequence[float], most_numel: int, *, waits: float = WAITS
) -> list[list[int]]:
    """Divides the tensors into buckets that are stepped on one after the other. In each bucket, every rank has about
    equal work.

    Args:
        most_numel: elements that a rank should have in one bucket at most.
        waits: limit for the time of all buckets, as a multiple of the largest load; each bucket takes as long as its
            slowest owner. Buckets are made fewer and longer until the limit is kept.
    """
    own: dict[int, list[int]] = {}
    elements: Counter[int] = Counter()
    # Tensors of one shape are neighbours, so that they may be stepped on at once. All copies of a tensor are in one
    # bucket, which the first copy decides.
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
    """Makes `count` buckets. Returns them, and the sum over buckets of the work of their slowest owners."""
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
