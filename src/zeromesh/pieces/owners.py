"""Who owns which tensor, where an optimizer needs whole ones: chosen once, from costs and from where the slices lie.

[Note: Balance] All owners step at once, so a step takes as long as the one with the most work. Longest first, each
tensor to whoever has least (Graham 1969), gives a limit; where that is more than 5 % above the mean and above the
bound, lower limits are tried by packing each tensor, longest first, where it fits best (MULTIFIT: Coffman, Garey and
Johnson 1978). Then each tensor goes, under the limit or 5 % above the mean, to the rank for which the least has to
move, the slow axes first. What costs little may take memory: a rank that holds more elements than 5 % above the mean,
or than the longest tensor has, gets no more for being near. A tensor is not divided, so with few tensors for many ranks
no choice is even: `Owners.bound` is what no choice can be below. Its proof is of bins: where tensors that cannot share
a rank, and the volume of those that fit beside them, need more ranks than there are, some rank has more than the limit
(Martello and Toth 1990, their bound L2).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod

from zeromesh.strategy import Layout

SLACK = 1.05
"""Of the mean load: what balance may be given up for less traffic. Half of what is asked for (10 %)."""

NEWTON_SCHULZ_STEPS = 5
"""Of torch.optim.Muon, and of its first publication (https://kellerjordan.github.io/posts/muon)."""

BUCKET_BYTES = 64 << 20
"""Of the gradients and values of one bucket on the rank that has most of them, if ranks need not wait for each other
then; three are there at once."""

PRECISION = 1e-6
"""Of limits and bounds that are found by halving, in times of themselves."""

WAITS = 1.1
"""As little may be lost to buckets in which one rank has more to do than others as to the balance of owners: 10 %."""


def newton_schulz_flops(shape: Sequence[int], steps: int = NEWTON_SCHULZ_STEPS) -> float:
    """Of the iteration that makes a matrix orthogonal, or each of a batch of matrices in the last two dimensions.

    A step of an m x n matrix, m <= n: its Gram matrix, that squared, and the product of both with it.

    >>> newton_schulz_flops((4, 8), steps=1) == 2 * (4 * 4 * 8) * 2 + 2 * 4**3
    True
    """
    if len(shape) < 2:
        return float(prod(shape))
    m, n = sorted(shape[-2:])
    return float(prod(shape[:-2]) * steps * (4 * m * m * n + 2 * m**3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one tensor lies among the ranks that hold one copy of the states.

    Args:
        name: the parameter's.
        shape: of the whole tensor.
        start: where it starts in its flat buffer.
        padded: the buffer's length.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    padded: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def parts(self, ranks: int) -> list[tuple[int, int, int]]:
        """(rank, start, stop) of each rank's part of the flattened tensor, none of them empty."""
        length, stop = self.padded // ranks, self.start + self.numel
        holders = range(self.start // length, -(-stop // length)) if self.numel else range(0)
        return [
            (h, max(h * length, self.start) - self.start, min((h + 1) * length, stop) - self.start) for h in holders
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Which rank owns each tensor, and how even that is: [Note: Balance].

    Args:
        rank_of: by tensor, among the ranks that hold one copy of the states, as `Layout.shard` numbers chunks.
        loads: by rank, the summed costs of what it owns.
        bound: no choice has a rank with less than this.
    """

    rank_of: tuple[int, ...]
    loads: tuple[float, ...]
    bound: float

    @property
    def balance(self) -> float:
        """The largest load in times of the mean; 1 is even."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0


def choose_owners(layout: Layout, tensors: Sequence[Placement], costs: Sequence[float]) -> Owners:
    """The owners of `tensors`: [Note: Balance]. The same on every rank, since it looks at nothing else.

    Args:
        layout: whose state shards the tensors are spread over.
        tensors: in an order that all ranks share.
        costs: of stepping each, in any unit.
    """
    ranks = layout.degree(layout.significant)
    order = sorted(range(len(tensors)), key=lambda index: -costs[index])
    even = _longest_first(order, costs, ranks)
    bound = _bound(costs, ranks, most := _loads(even, costs, ranks)[1])
    if most > max(bound * (1 + 2 * PRECISION), SLACK * sum(costs) / ranks):
        even = _packed_tightly(order, costs, ranks, bound, most) or even
    limit = max(_loads(even, costs, ranks)[1], SLACK * sum(costs) / ranks)
    near = _nearest(layout, tensors, order, costs, limit)
    loads, largest = _loads(near, costs, ranks)
    if largest > limit:
        near, loads = even, _loads(even, costs, ranks)[0]
    return Owners(rank_of=tuple(near), loads=tuple(loads), bound=bound)


def _longest_first(order: Sequence[int], costs: Sequence[float], ranks: int) -> list[int]:
    owners, heap = [0] * len(order), [(0.0, rank) for rank in range(ranks)]
    for index in order:
        load, owners[index] = heap[0]
        heapq.heapreplace(heap, (load + costs[index], owners[index]))
    return owners


def _packed_tightly(
    order: Sequence[int], costs: Sequence[float], ranks: int, low: float, high: float
) -> list[int] | None:
    """Owners with less than `high` each, as little as packing finds; None if it finds none."""
    found: list[int] | None = None

    def fails(limit: float) -> bool:
        nonlocal found
        packed = _packed(order, costs, ranks, limit)
        found = packed or found
        return packed is None

    _threshold(fails, low, high * (1 - PRECISION))
    return found


def _packed(order: Sequence[int], costs: Sequence[float], ranks: int, limit: float) -> list[int] | None:
    """Owners with at most `limit` each: longest first, each tensor where the least room is left beside it."""
    owners, rooms = [0] * len(order), [(limit, rank) for rank in range(ranks)]
    for index in order:
        place = bisect_left(rooms, (costs[index], -1))
        if place == len(rooms):
            return None
        room, owners[index] = rooms.pop(place)
        insort(rooms, (room - costs[index], owners[index]))
    return owners


def _threshold(fails: Callable[[float], bool], low: float, high: float) -> float:
    """Between `low` and `high`, where `fails` has not been seen to be false, to within PRECISION."""
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if fails(middle) else (low, middle)
    return low


def _nearest(
    layout: Layout, tensors: Sequence[Placement], order: Sequence[int], costs: Sequence[float], limit: float
) -> list[int]:
    ranks = range(layout.degree(layout.significant))
    owners, loads, held = [0] * len(order), [0.0] * len(ranks), [0] * len(ranks)
    numels = [tensor.numel for tensor in tensors]
    room = max([SLACK * sum(numels) / len(ranks), *numels])
    for index in order:
        moved = _moved(layout, tensors[index])
        near = [rank for rank in moved if loads[rank] + costs[index] <= limit and held[rank] + numels[index] <= room]
        fitting = near or [rank for rank in ranks if loads[rank] + costs[index] <= limit]
        if fitting:
            owner = min(fitting, key=lambda rank: (moved.get(rank, ()), held[rank]))
        else:
            owner = min(ranks, key=loads.__getitem__)
        owners[index] = owner
        loads[owner] += costs[index]
        held[owner] += numels[index]
    return owners


def _moved(layout: Layout, tensor: Placement) -> dict[int, tuple[int, ...]]:
    """By rank that has a part of it: elements that cross each axis if it owns the tensor, outermost axis first."""
    strides = significant_strides(layout)
    parts = tensor.parts(layout.degree(layout.significant))
    there = {name: dict[int, int]() for name in strides}
    for holder, start, stop in parts:
        for name, (stride, size) in strides.items():
            here = holder // stride % size
            there[name][here] = there[name].get(here, 0) + stop - start
    return {
        holder: tuple(tensor.numel - there[name][holder // stride % size] for name, (stride, size) in strides.items())
        for holder, _, _ in parts
    }


def significant_strides(layout: Layout) -> dict[str, tuple[int, int]]:
    """By axis that states are sharded over, outermost first: (distance between neighbours' chunks, size)."""
    strides, stride = {}, 1
    for axis in reversed(layout.significant):
        strides[axis.name] = (stride, axis.size)
        stride *= axis.size
    return {axis.name: strides[axis.name] for axis in reversed(layout.axes) if strides.get(axis.name, (0, 1))[1] > 1}


def _loads(owners: Sequence[int], costs: Sequence[float], ranks: int) -> tuple[list[float], float]:
    loads = [0.0] * ranks
    for owner, cost in zip(owners, costs, strict=True):
        loads[owner] += cost
    return loads, max(loads)


def _bound(costs: Sequence[float], ranks: int, most: float) -> float:
    """What some rank has at least under any choice; `most` can be kept to.

    The mean; of the k*ranks + 1 longest the k + 1 shortest, which share a rank; and every limit that needs more ranks.
    """
    longest = sorted(costs, reverse=True)
    crowded = [sum(longest[k * ranks - k : k * ranks + 1]) for k in range(1, (len(longest) - 1) // ranks + 1)]
    least = max([sum(costs) / ranks, *longest[:1], *crowded])
    rising, sums = longest[::-1], [0.0, *accumulate(reversed(longest))]
    return _threshold(lambda limit: _ranks_needed(rising, sums, limit) > ranks, least, most)


def _ranks_needed(rising: Sequence[float], sums: Sequence[float], limit: float) -> int:
    """At least, for loads of `limit` at the most: Martello and Toth's L2.

    Args:
        rising: costs, none above `limit`.
        sums: of the first so many of them.
    """
    half, needed = bisect_right(rising, limit / 2), 0
    for least in [0.0, *sorted(set(rising[:half]))]:
        # Nothing that counts fits beside the longest; beside the long, what counts of the short.
        longest, short = bisect_right(rising, limit - least), bisect_left(rising, least)
        longest = max(longest, half)
        beside = (longest - half) * limit - (sums[longest] - sums[half])
        over = sums[half] - sums[short] - beside
        needed = max(needed, len(rising) - half + max(0, ceil(over / limit * (1 - 1e-12)) if limit else 0))
    return needed


def cut(
    tensors: Sequence[Placement], owners: Owners, costs: Sequence[float], most_numel: int, *, waits: float = WAITS
) -> list[list[int]]:
    """The tensors in buckets that are stepped one after the other: in each, every rank has about as much to do.

    Args:
        tensors, owners, costs: as for `choose_owners`.
        most_numel: elements that a rank should have in one bucket at most.
        waits: what all buckets may take together, where each takes as long as its slowest owner, in times of the
            largest load. Fewer and longer buckets are made until it is kept.
    """
    own: dict[int, list[int]] = {}
    # Those of one shape beside each other, for who steps on them at once.
    for index in sorted(range(len(tensors)), key=lambda index: (-costs[index], tensors[index].shape, index)):
        own.setdefault(owners.rank_of[index], []).append(index)
    held = max((sum(tensors[index].numel for index in indices) for indices in own.values()), default=0)
    count = min(-(-held // max(1, most_numel)), max(map(len, own.values()), default=1))
    while True:
        buckets, longest = _cut(own, owners, costs, max(1, count))
        if count <= 1 or longest <= waits * max(owners.loads):
            return [sorted(bucket) for bucket in buckets if bucket] or [[]]
        count -= 1


def _cut(
    own: Mapping[int, Sequence[int]], owners: Owners, costs: Sequence[float], count: int
) -> tuple[list[list[int]], float]:
    """So many buckets, and the sum of what the slowest owner of each has to do."""
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
