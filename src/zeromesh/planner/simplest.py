"""The layout to recommend: the simplest of those that are predicted to be nearly as fast as the fastest.

Predictions are some per cent off, so a layout that is predicted to be 1 % slower may be the faster one. Among layouts
that are nearly as fast and leave some memory free, the recommended one has, in this order:

1. the fewest degrees of other parallelism, the fewest split levels and kinds of shards in the host's memory, the fewest
   wires and collectives other than the defaults;
2. the least memory, in steps of a tenth of the device's;
3. the fewest different stages;
4. a name that people know;
5. the shortest step.

`simplest` goes through all candidates in this order, by lower bounds on memory and step time, and simulates those that
may come before the best so far.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from zeromesh.planner.evaluate import Candidate, Estimate, Evaluator
from zeromesh.planner.search import Found, Rows
from zeromesh.planner.space import Integers, hosted_kinds
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.collective import AUTO

WITHIN = 0.02
"""Share of the fastest step by which a simpler layout may be slower. It is below the median error of predictions in any
table of measurements."""

FREE = 0.05
"""Share of a device's memory that a recommended layout leaves free, for fragmentation and libraries' own buffers."""

_STEPS = 10
"""Memory is compared in so many steps of a device's."""

Simplicity = tuple[float, ...]
"""The criteria in their order: the smaller, the simpler."""


def simplicity(evaluator: Evaluator, estimate: Estimate, known: Collection[Strategy]) -> Simplicity:
    """How simple an estimated layout is; `known` are the strategies that people know by name."""
    strategy, parallel = estimate.candidate.strategy, estimate.candidate.parallel
    sizes = dict(evaluator.division(parallel).cluster.axes)
    return (
        _degrees(estimate.candidate),
        len(strategy.axes) - len(strategy.names) + hosted_kinds(strategy.host),
        len({term.name for term in strategy.axes if str(term.wire)})
        + (strategy.collective != AUTO)
        + (strategy.step == "device"),
        estimate.memory_bytes // (evaluator.cluster.device.memory_bytes / _STEPS),
        len({term.stage for term in strategy.axes if sizes[term.name] > 1}),
        strategy not in known,
        estimate.step_s,
    )


def simplest(
    evaluator: Evaluator, found: Found, known: Collection[Strategy], within: float, max_simulations: int | None
) -> Estimate:
    """The layout to recommend; the fastest itself if no candidate leaves enough memory free.

    People know the strategies `known` by name. A simpler layout may be slower by the share `within` of the fastest
    step. It makes at most `max_simulations`; None: as many as it takes to prove that no simpler layout is near.
    """
    most_bytes = _most_bytes(evaluator)
    roomy = [(simplicity(evaluator, e, known), e) for e in found.ranked if e.memory_bytes <= most_bytes]
    fastest = found.best
    simulated = 0
    for least, candidate in _simplest_first(evaluator, found.rows, known, fastest.step_s * (1 + within), most_bytes):
        best = _simplest_near(roomy, fastest.step_s * (1 + within))
        if simulated == max_simulations or (best and least >= best[0]):
            break
        before = len(evaluator.evaluated)
        estimate = evaluator.estimate(candidate)
        simulated += len(evaluator.evaluated) - before
        if evaluator.fits(estimate) and estimate.step_s < fastest.step_s:
            fastest = estimate  # a search that stopped early may have missed it
        if evaluator.fits(estimate) and estimate.memory_bytes <= most_bytes:
            roomy.append((simplicity(evaluator, estimate, known), estimate))
    best = _simplest_near(roomy, fastest.step_s * (1 + within))
    return best[1] if best else fastest


def as_simple(evaluator: Evaluator, estimate: Estimate, other: Estimate) -> bool:
    """Whether an estimated layout leaves memory free and needs no more degrees, splits and wires than another."""
    needs = [simplicity(evaluator, each, ())[:3] for each in (estimate, other)]
    return needs[0] <= needs[1] and estimate.memory_bytes <= _most_bytes(evaluator)


def _most_bytes(evaluator: Evaluator) -> float:
    return min((1 - FREE) * evaluator.cluster.device.memory_bytes, evaluator.limit_bytes)


def _simplest_near(
    roomy: Iterable[tuple[Simplicity, Estimate]], longest_s: float
) -> tuple[Simplicity, Estimate] | None:
    near = (pair for pair in roomy if pair[1].step_s <= longest_s)
    return min(near, key=lambda pair: pair[0], default=None)


def _degrees(candidate: Candidate) -> int:
    parallel = candidate.parallel
    return sum(degree > 1 for degree in (parallel.tp, parallel.cp, parallel.pp, parallel.ep))


def _simplest_first(
    evaluator: Evaluator, rows: Sequence[Rows], known: Collection[Strategy], longest_s: float, most_bytes: float
) -> Iterator[tuple[Simplicity, Candidate]]:
    """Candidates that may be near, by rising lower bound of `simplicity`."""
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
        bounds = [(_degrees(each), *criteria, each.strategy not in known, each.bound_s) for each in candidates]
        yield from sorted(zip(bounds, candidates, strict=True), key=lambda pair: pair[0])


def one_of_each_kind(evaluator: Evaluator, estimates: Iterable[Estimate]) -> list[Estimate]:
    """The first of each kind of layout. A kind is degrees, collective, and the sequence of stages and wires from the
    innermost part to the outermost. Layouts of one kind may differ in the ranks of each stage, in kept parameters, in
    micro-batch and in recomputation."""
    kinds: dict[object, Estimate] = {}
    for estimate in estimates:
        strategy, parallel = estimate.candidate.strategy, estimate.candidate.parallel
        axes = Layout.of(strategy, evaluator.division(parallel).cluster.axes).axes
        parts = [(axis.stage.value.removesuffix("k"), axis.wire) for axis in axes if axis.size > 1]
        stages = tuple(stage for stage, _ in groupby(parts))
        kinds.setdefault((parallel, strategy.host, strategy.collective, stages), estimate)
    return list(kinds.values())
