"""Every layout that the notation can express on a cluster, as arrays.

A layout gives each level a *cut*: over how many of its members each stage shards. A stage appears at most once on a
level: parts of a level share its links, so their order does not change the cost, and the same stage twice gives the
same shards as once. So the cuts of a level of n members are the ways to write n as a product of sizes, one per stage::

    level of 8, at most one split    8 under one of 7 stages, or 2 x 4 or 4 x 2 under two of them: 7 + 42 = 49 cuts

`Space.blocks` crosses the cuts of all levels, in blocks that fit in memory, without layouts that the notation refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, reduce
from itertools import combinations, permutations
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from zeromesh.strategy import Stage, Strategy

Integers = npt.NDArray[np.int64]
Splits = Literal["none", "once", "all"]

STAGES = (Stage.THREE, Stage.THREE_KEPT, Stage.TWO, Stage.DEFERRED, Stage.DEFERRED_KEPT, Stage.ONE, Stage.ZERO)
"""Most significant first: the order, innermost first, in which parts of one level stand in the notation."""

HOSTS = (Stage.ZERO, Stage.ONE, Stage.TWO, Stage.DEFERRED, Stage.THREE)
"""Stages of the host's memory."""


def shares_of(strategy: Strategy) -> list[Strategy]:
    """The strategy with its host's stage for a falling share of the tensors."""
    return [replace(strategy, percent=percent) for percent in range(90, 0, -10)]


_BLOCK_ROWS = 1 << 18

_NONE = np.iinfo(np.int16).max
"""A position behind all others."""


def hosted_kinds(host: Stage) -> int:
    return host.shards_params + host.shards_grads + host.shards_states


@cache
def divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """All cuts of one level: `sizes[i, s]` is the size of the part of cut i under `STAGES[s]`, 1 if there is none."""

    level: str
    size: int
    sizes: Integers

    def __len__(self) -> int:
        return len(self.sizes)

    def terms(self, index: int, *, rest: bool) -> list[str]:
        """The cut in the notation, without wires; the outermost part as [*] if `rest`."""
        parts = [(stage.value, int(n)) for stage, n in zip(STAGES, self.sizes[index], strict=True) if n > 1]
        if len(parts) <= 1:
            return [f"{self.level}={parts[0][0] if parts else '0'}"]
        terms = [f"{self.level}[{n}]={stage}" for stage, n in parts]
        if rest:
            terms[-1] = f"{self.level}[*]={parts[-1][0]}"
        return terms


def cuts_of(level: str, size: int, *, splits: Splits) -> Cuts:
    """The cuts of one level: with splits `none` it has one stage, with `once` two parts at most, with `all` any."""
    most = {"none": 1, "once": 2, "all": len(STAGES)}[splits]
    rows = [
        _row(chosen, sizes)
        for count in range(1, most + 1)
        for sizes in _factorisations(size, count)
        for chosen in _assignments(tuple(map(sizes.index, sizes)))
    ]
    if size == 1:
        rows = [[1] * len(STAGES)]
    return Cuts(level=level, size=size, sizes=np.array(rows, dtype=np.int64))


def _factorisations(size: int, count: int) -> Iterator[tuple[int, ...]]:
    """Unordered ways to write `size` as `count` factors of at least 2, in ascending order."""

    def extend(left: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            if left >= least:
                yield (left,)
            return
        for factor in divisors(left):
            if factor >= least:
                for rest in extend(left // factor, count - 1, factor):
                    yield (factor, *rest)

    return extend(size, count, 2)


@cache  # a level has thousands of factorisations, and few patterns of equal factors
def _assignments(alike: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Choices of distinct stages for factors. Of factors with one number in `alike`, which are equal, one order."""
    pairs = [(i, j) for i, j in combinations(range(len(alike)), 2) if alike[i] == alike[j]]
    return tuple(c for c in permutations(range(len(STAGES)), len(alike)) if all(c[i] <= c[j] for i, j in pairs))


def _row(chosen: Sequence[int], sizes: Sequence[int]) -> list[int]:
    row = [1] * len(STAGES)
    for stage, size in zip(chosen, sizes, strict=True):
        row[stage] = size
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Layouts, one a row: `sizes[l][s]` holds, for level l and stage s, the product of the parts of each layout."""

    indices: tuple[Integers, ...]
    sizes: tuple[tuple[Integers, ...], ...]

    def __len__(self) -> int:
        return len(self.indices[0])

    def choose(self, rows: Integers) -> Block:
        """The given rows, in the given order."""
        return Block(
            indices=tuple(column[rows] for column in self.indices),
            sizes=tuple(tuple(column[rows] for column in level) for level in self.sizes),
        )

    def without(self, ranks: int) -> Block:
        """Each part divided by the innermost `ranks`; parts of a level stand in the order of `STAGES`."""
        left = np.full(len(self), ranks, dtype=np.int64)
        sizes = []
        for level in self.sizes:
            rest = []
            for part in level:
                taken = np.gcd(left, part)
                left = left // taken
                rest.append(part // taken)
            sizes.append(tuple(rest))
        return replace(self, sizes=tuple(sizes))

    def degree(self, *stages: Stage) -> Integers:
        """The product of the axis sizes at the given stages, for each layout."""
        degree = np.ones(len(self), dtype=np.int64)
        for level in self.sizes:
            for stage in stages:
                degree *= level[STAGES.index(stage)]
        return degree

    def levels_sharded(self) -> Integers:
        """The number of levels over which something is sharded, for each layout."""
        sharded = [STAGES.index(stage) for stage in STAGES if stage.shards_states]
        return _count([reduce(np.logical_or, [level[i] > 1 for i in sharded]) for level in self.sizes])

    def levels_replicated(self) -> Integers:
        """The number of levels over which everything is replicated, at least in part, for each layout."""
        return _count([level[STAGES.index(Stage.ZERO)] > 1 for level in self.sizes])

    def num_stages(self) -> Integers:
        """The number of different stages over more than one rank, for each layout."""
        by_stage = zip(*self.sizes, strict=True)
        return _count([reduce(np.logical_or, [part > 1 for part in parts]) for parts in by_stage])

    def num_runs(self) -> Integers:
        """How often the stage changes from the innermost part to the outermost, plus one, for each layout."""
        runs, last = np.zeros(len(self), dtype=np.int64), np.full(len(self), -1)
        for level in self.sizes:
            for stage, part in enumerate(level):
                runs += (part > 1) & (last != stage)
                last = np.where(part > 1, stage, last)
        return runs

    def num_parts(self) -> Integers:
        """The number of terms in the notation of each layout."""
        by_level = [_count([size > 1 for size in level]) for level in self.sizes]
        return reduce(np.add, [np.maximum(1, count) for count in by_level])


def _count(flags: Sequence[npt.NDArray[np.bool_]]) -> Integers:
    """How many of the flags are set, for each layout."""
    counts: Integers = np.count_nonzero(flags, axis=0)
    return counts


@dataclass(frozen=True)
class Space:
    """The layouts of a mesh of (level, size), innermost first; see `cuts_of`."""

    mesh: tuple[tuple[str, int], ...]
    splits: Splits = "once"

    @cached_property
    def cuts(self) -> tuple[Cuts, ...]:
        return tuple(cuts_of(name, size, splits=self.splits) for name, size in self.mesh)

    def blocks(self) -> Iterator[Block]:
        """All legal layouts, each once."""
        counts = [len(cuts) for cuts in self.cuts]
        for start in range(0, prod(counts), _BLOCK_ROWS):
            indices = np.unravel_index(np.arange(start, min(start + _BLOCK_ROWS, prod(counts))), counts)
            keep = self._legal(indices)
            if keep.any():
                chosen = tuple(index[keep] for index in indices)
                cut = zip(self.cuts, chosen, strict=True)
                columns = range(len(STAGES))
                sizes = tuple(tuple(cuts.sizes[index, column] for column in columns) for cuts, index in cut)
                yield Block(indices=chosen, sizes=sizes)

    def _legal(self, indices: Sequence[Integers]) -> npt.NDArray[np.bool_]:
        """Whether a layout has no 2 beside 3d, and no kept axis that is more significant than one that is not kept."""
        two, deferred, kept, dropped = (
            [flags[index] for flags, index in zip(by_level, indices, strict=True)] for by_level in self._flags
        )
        mixed = reduce(np.logical_or, two) & reduce(np.logical_or, deferred)
        return np.asarray(~mixed & (reduce(np.minimum, kept) > reduce(np.maximum, dropped)))

    @cached_property
    def _flags(self) -> Sequence[Sequence[npt.NDArray[Any]]]:
        """Has 2, has 3d, first kept and last dropped position in the order of significance: each by level and cut."""
        by_level = [self._level_flags(level, cuts.sizes > 1) for level, cuts in enumerate(self.cuts)]
        return list(zip(*by_level, strict=True))

    def _level_flags(self, level: int, has: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[Any], ...]:
        three, kept, two, deferred, deferred_kept = (has[:, column] for column in range(5))
        later = 2 * (len(self.mesh) + level)
        first_kept = np.where(kept, 2 * level + 1, np.where(deferred_kept, later + 1, _NONE))
        last_dropped = np.where(deferred, later, np.where(three, 2 * level, -1))
        return two, deferred | deferred_kept, first_kept.astype(np.int16), last_dropped.astype(np.int16)

    def strategy(self, cut_indices: Sequence[int], wires: Sequence[str] | None = None) -> Strategy:
        """The layout with the given cut on each level, innermost first; wires as after `@`, "" for the default."""
        terms: list[str] = []
        for level, (cuts, index) in enumerate(zip(self.cuts, cut_indices, strict=True)):
            wire = wires[level] if wires else ""
            outermost = level == len(self.cuts) - 1
            terms += [_with_wire(term, wire) for term in cuts.terms(int(index), rest=outermost)]
        return Strategy.parse(",".join(terms))


def _with_wire(term: str, wire: str) -> str:
    """A term with a wire. Stage 0 sends no parameters, so it takes only the gradients' half."""
    param, _, grad = wire.partition("/")
    if term.endswith("=0"):
        return f"{term}@/{grad}" if grad else term
    return f"{term}@{param}/{grad}" if param or grad else term
