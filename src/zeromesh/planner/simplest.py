"""The layout to recommend: the simplest of those that are predicted to be nearly as fast as the fastest.

Predictions are some per cent off, so a layout that is predicted to be 1 % slower may be the faster one. Among layouts
within a share of the fastest that leave some memory free, the recommended one has, in this order:

1. the fewest degrees of other parallelism, the fewest split levels, the fewest wires and collectives other than the
   defaults;
2. the least memory, in steps of a tenth of the device's;
3. the fewest different stages;
4. a name that people know;
5. the shortest step.

`simplest` goes through all candidates in this order, each with a lower bound of its memory and of its step, and
simulates those that may come before the best so far.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from zeromesh.planner.evaluate import Candidate, Estimate, Evaluator
from zeromesh.planner.search import Found, Rows
from zeromesh.planner.space import Integers
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.collective import AUTO

WITHIN = 0.02
"""Share of the fastest step that a simpler layout may take longer: below the median error of any table of
measurements that predictions are compared with."""

FREE = 0.05
"""Share of a device's memory that a recommended layout leaves free, for fragmentation and libraries' own buffers."""

_STEPS = 10
"""Steps of memory in a device."""

Rank = tuple[float, ...]
"""The criteria in their order: a layout of a smaller rank is simpler."""


def rank(evaluator: Evaluator, estimate: Estimate, known: Collection[Strategy]) -> Rank:
    """How simple an estimated layout is; `known` are the strategies that people know by name."""
    strategy, parallel = estimate.candidate.strategy, estimate.candidate.parallel
    sizes = dict(evaluator.division(parallel).cluster.axes)
    return (
        _degrees(estimate.candidate),
        len(strategy.axes) - len(strategy.names),
        len({term.name for term in strategy.axes if str(term.wire)}) + (strategy.collective != AUTO),
        estimate.memory_bytes // (evaluator.cluster.device.memory_bytes / _STEPS),
        len({term.stage for term in strategy.axes if sizes[term.name] > 1}),
        strategy not in known,
        estimate.step_s,
    )


def simplest(
    evaluator: Evaluator, found: Found, known: Collection[Strategy], within: float, max_simulations: int | None
) -> Candidate:
    """The layout to recommend; the fastest itself where no candidate leaves enough memory free.

    Args:
        evaluator: of the search.
        found: its result.
        known: strategies that people know by name.
        within: share of the fastest step that a simpler layout may take longer.
        max_simulations: simulated at most besides those of the search; None: as many as it takes to prove that no
            simpler layout is near.
    """
    longest_s = found.best.step_s * (1 + within)
    most_bytes = (1 - FREE) * evaluator.cluster.device.memory_bytes

    def near(estimate: Estimate) -> bool:
        return estimate.step_s <= longest_s and estimate.memory_bytes <= min(most_bytes, evaluator.limit_bytes)

    ranked = [(rank(evaluator, estimate, known), estimate) for estimate in found.ranked if near(estimate)]
    best = min(ranked, key=lambda pair: pair[0], default=None)
    left = max_simulations
    for least, candidate in _by_rank(evaluator, found.rows, known, longest_s, most_bytes):
        if left == 0 or (best and least >= best[0]):
            break
        before = len(evaluator.evaluated)
        estimate = evaluator.estimate(candidate)
        if left is not None:
            left -= len(evaluator.evaluated) - before
        if near(estimate):
            pair = rank(evaluator, estimate, known), estimate
            best = min(best or pair, pair, key=lambda pair: pair[0])
    return best[1].candidate if best else found.best.candidate


def _degrees(candidate: Candidate) -> int:
    parallel = candidate.parallel
    return sum(degree > 1 for degree in (parallel.tp, parallel.cp, parallel.pp, parallel.ep))


def _by_rank(
    evaluator: Evaluator, rows: Sequence[Rows], known: Collection[Strategy], longest_s: float, most_bytes: float
) -> Iterator[tuple[Rank, Candidate]]:
    """Candidates that may be near, by rising lower bound of their rank."""
    step_bytes = evaluator.cluster.device.memory_bytes / _STEPS
    columns: list[Integers] = []
    for index, some in enumerate(rows):
        places = np.flatnonzero((some.step_s <= longest_s) & (some.memory <= most_bytes))
        odd = sum(map(bool, some.setting.bounds.wires)) + (some.setting.bounds.collective != AUTO)
        same = np.ones(len(places), dtype=np.int64)
        memory = (some.memory[places] // step_bytes).astype(np.int64)
        splits = some.parts[places] - len(some.indices)
        columns.append(np.stack([splits, odd * same, memory, some.stages[places], index * same, places]))
    every = np.concatenate(columns, axis=1) if columns else np.zeros((6, 0), dtype=np.int64)
    every = every[:, np.lexsort(every[3::-1])]
    for criteria, group in groupby(every.T.tolist(), key=lambda column: column[:4]):
        candidates = [rows[index].candidate(place) for *_, index, place in group]
        ranks = [(_degrees(each), *criteria, each.strategy not in known, each.bound_s) for each in candidates]
        yield from sorted(zip(ranks, candidates, strict=True), key=lambda pair: pair[0])


def one_of_each_kind(evaluator: Evaluator, estimates: Iterable[Estimate]) -> list[Estimate]:
    """The first of each kind of layout: degrees, collective, and the stages and wires from the innermost part to
    the outermost. Layouts that differ only in where stages change, in which parameters are kept, in their micro-batch
    or in what they recompute are of one kind."""
    kinds: dict[object, Estimate] = {}
    for estimate in estimates:
        strategy, parallel = estimate.candidate.strategy, estimate.candidate.parallel
        axes = Layout.of(strategy, evaluator.division(parallel).cluster.axes).axes
        parts = [(axis.stage.value.removesuffix("k"), axis.wire) for axis in axes if axis.size > 1]
        stages = tuple(stage for stage, _ in groupby(parts))
        kinds.setdefault((parallel, strategy.collective, stages), estimate)
    return list(kinds.values())
