"""One given strategy: its best micro-batches and recomputations."""

from __future__ import annotations

import numpy as np

from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.constants import default_constants
from zeromesh.model.spec import ModelSpec
from zeromesh.parallel import WHOLE, Parallel
from zeromesh.planner.evaluate import Candidate, Choice, Estimate, Evaluator
from zeromesh.planner.search import bounded
from zeromesh.planner.settings import settings_of
from zeromesh.planner.space import STAGES, Block
from zeromesh.planner.workload import Workload
from zeromesh.simulator.mechanics import Mechanics
from zeromesh.simulator.run import DEFAULT_MARGIN
from zeromesh.strategy import Layout, Stage, Strategy


def simulate_choices(
    model: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    strategy: Strategy,
    *,
    engine: str | Mechanics = "zeromesh",
    memory_margin: float = DEFAULT_MARGIN,
    top: int = 1,
    trace: bool = False,
) -> tuple[Choice, ...]:
    """Simulates a strategy with the workload's open choices: the `top` fastest ones that fit, fastest first, or the
    smallest if none fits. With `trace` the first has its trace. Raises MeshError if the strategy does not fit the
    cluster's levels; InputError if the batch or a degree does not divide."""
    evaluator = Evaluator(model, cluster, workload, engine, default_constants(), memory_margin)
    best, *others = fastest(evaluator, strategy, workload.parallel, top)
    return (evaluator.choice(best, record=trace), *map(evaluator.choice, others))


def fastest(evaluator: Evaluator, strategy: Strategy, parallel: Parallel, top: int = 1) -> list[Candidate]:
    """The `top` fastest choices that fit, fastest first; the smallest if none fits."""
    every = choices(evaluator, strategy, parallel)
    wires = {(term.name, term.wire) for term in strategy.axes}
    plain = len(wires) == len(strategy.names) and strategy.prefetch == 1 and not strategy.parts
    fitting: list[Estimate] = []
    for candidate, memory in every:
        if len(fitting) >= top and plain and bounded(evaluator.mechanics) and candidate.bound_s >= fitting[-1].step_s:
            break
        if memory <= evaluator.limit_bytes and evaluator.has_room(candidate):
            fitting = sorted([*fitting, evaluator.estimate(candidate)], key=lambda estimate: estimate.step_s)[:top]
    return [estimate.candidate for estimate in fitting] or [min(every, key=lambda pair: pair[1])[0]]


def choices(evaluator: Evaluator, strategy: Strategy, parallel: Parallel = WHOLE) -> list[tuple[Candidate, float]]:
    """Every micro-batch and recomputation of a strategy by rising bound, each with the least memory that it needs.

    The bound is only approximate with several wires on one level, a prefetch other than 1, parts or another engine. It
    still gives the order of the choices.
    """
    layout = Layout.of(strategy.with_parts({}), evaluator.division(parallel).cluster.axes)
    host = strategy.host if strategy.percent == 100 else Stage.ZERO
    of_strategy = _wires(layout), strategy.collective, parallel, host
    block, (bounds, of_memory) = _one_row(layout), evaluator.bounds(*of_strategy)
    time, optimizer_s = bounds.time(block), bounds.optimizer_s(block)
    static, of_activations = evaluator.static_bytes(strategy, parallel), 1 + evaluator.constants.allocator_share
    choices = []
    for setting in settings_of(bounds, of_memory, parallel):
        bound_s = time.at(setting.micro_batches, setting.compute, optimizer_s)
        candidate = setting.candidate(strategy, float(bound_s[0]))
        choices.append((candidate, static + of_activations * setting.activation_bytes))
    return sorted(choices, key=lambda pair: pair[0].bound_s)


def _wires(layout: Layout) -> tuple[str, ...]:
    """The wire of each level, as after `@`; the default if the level's parts have several."""
    found = [{str(axis.wire) for axis in layout.axes if axis.mesh_axis == name} for name, _ in layout.mesh]
    return tuple(wires.pop().removeprefix("@") if len(wires) == 1 else "" for wires in found)


def _one_row(layout: Layout) -> Block:
    levels = [name for name, _ in layout.mesh]
    sizes = [[np.ones(1, dtype=np.int64) for _ in STAGES] for _ in levels]
    for axis in layout.axes:
        stage = Stage(axis.stage.value.replace("h", "k"))  # sends the same
        sizes[levels.index(axis.mesh_axis)][STAGES.index(stage)] *= axis.size
    nothing = np.zeros(1, dtype=np.int64)
    return Block(indices=tuple(nothing for _ in levels), sizes=tuple(tuple(level) for level in sizes))
