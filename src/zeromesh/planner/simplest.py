"""The layout to recommend: the simplest of those that are predicted to be nearly as fast as the fastest.

Predictions are some per cent off, so a layout that is predicted to be 1 % slower may be the faster one. Among layouts
within a share of the fastest that leave some memory free, the recommended one has, in this order:

1. the fewest degrees of other parallelism, the fewest split levels, the fewest wires other than the default;
2. the least memory, in steps of a tenth of the device's;
3. the fewest different stages;
4. a name that people know;
5. the shortest step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from zeromesh.planner.evaluate import Candidate, Estimate, Evaluator
from zeromesh.planner.fixed import choices, fastest
from zeromesh.strategy import Axis, Layout, Strategy

WITHIN = 0.02
"""Share of the fastest step that a simpler layout may take longer: below the median error of any table of
measurements that predictions are compared with."""

FREE = 0.05
"""Share of a device's memory that a recommended layout leaves free, for fragmentation and libraries' own buffers."""


def with_known(
    evaluator: Evaluator, best: Candidate, ranked: Iterable[Estimate], known: Iterable[Strategy], longest_s: float
) -> list[Estimate]:
    """`ranked` and `known` strategies at the degrees of `best`: all that fit, fastest first. Strategies that are known
    to take longer than `longest_s` are not simulated."""
    near = (each for each in known if choices(evaluator, each, best.parallel)[0][0].bound_s <= longest_s)
    tried = [evaluator.estimate(fastest(evaluator, each, best.parallel)[0]) for each in near]
    every = {estimate.candidate: estimate for estimate in (*ranked, *tried)}.values()
    fitting = [estimate for estimate in every if estimate.memory_bytes <= evaluator.limit_bytes]
    return sorted(fitting, key=lambda estimate: estimate.step_s)


def simplest(
    evaluator: Evaluator,
    best: Candidate,
    estimates: Iterable[Estimate],
    known: Collection[Strategy],
    longest_s: float,
) -> Candidate:
    """The layout to recommend; `best` itself where none leaves enough memory free.

    Args:
        evaluator: of the estimates.
        best: the fastest layout.
        estimates: of layouts that fit.
        known: strategies that people know by name.
        longest_s: the step that a layout may take.
    """
    device_bytes = evaluator.cluster.device.memory_bytes
    near = [e for e in estimates if e.step_s <= longest_s and e.memory_bytes <= (1 - FREE) * device_bytes]

    def rank(estimate: Estimate) -> tuple[float, ...]:
        strategy, parallel = estimate.candidate.strategy, estimate.candidate.parallel
        return (
            sum(degree > 1 for degree in (parallel.tp, parallel.cp, parallel.pp, parallel.ep)),
            len(strategy.axes) - len(strategy.names),
            sum(str(term.wire) != "" for term in strategy.axes),
            estimate.memory_bytes // (0.1 * device_bytes),
            len({term.stage for term in strategy.axes}),
            strategy not in known,
            estimate.step_s,
        )

    return min(near, key=rank).candidate if near else best


def one_of_each_kind(evaluator: Evaluator, estimates: Iterable[Estimate]) -> list[Estimate]:
    """The first of each kind of layout: the stage and the wire of each level's largest part, the degrees and the
    collective. Layouts that differ only in where a level is cut, in their micro-batch or in what they recompute are of
    one kind."""
    kinds: dict[object, Estimate] = {}
    for estimate in estimates:
        strategy, parallel = estimate.candidate.strategy, estimate.candidate.parallel
        largest: dict[str, Axis] = {}
        for axis in Layout.of(strategy, evaluator.division(parallel).cluster.axes).axes:
            if axis.size > largest.setdefault(axis.mesh_axis, axis).size:
                largest[axis.mesh_axis] = axis
        levels = tuple((name, axis.stage, axis.wire) for name, axis in largest.items())
        kinds.setdefault((parallel, strategy.collective, levels), estimate)
    return list(kinds.values())
