"""One given strategy: its best micro-batch and recomputation."""

from __future__ import annotations

import numpy as np

from zeromesh.cluster import Cluster
from zeromesh.cost import Constants, default_constants
from zeromesh.model import ModelSpec
from zeromesh.planner.evaluate import Candidate, Choice, Evaluator
from zeromesh.planner.space import STAGES, Block
from zeromesh.planner.workload import Workload
from zeromesh.simulator import DEFAULT_MARGIN, Mechanics
from zeromesh.strategy import Layout, Strategy


def simulate_strategy(
    model: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    strategy: Strategy,
    *,
    engine: str | Mechanics = "zeromesh",
    constants: Constants | None = None,
    memory_margin: float = DEFAULT_MARGIN,
    trace: bool = False,
) -> Choice:
    """Simulates a strategy; what the workload leaves open is chosen: the fastest that fits, else the smallest.

    Raises:
        MeshError: the strategy does not fit the cluster's levels.
        InputError: the batch does not divide.
    """
    constants = constants or default_constants()
    evaluator = Evaluator(model, cluster, workload, engine, constants, memory_margin)
    every = choices(evaluator, strategy)
    fitting = (c for c, memory in every if memory <= evaluator.limit_bytes and evaluator.simulation(c).fits)
    best = next(fitting, None) or min(every, key=lambda pair: pair[1])[0]
    return Choice(candidate=best, simulation=evaluator.simulation(best, record=trace))


def choices(evaluator: Evaluator, strategy: Strategy) -> list[tuple[Candidate, float]]:
    """Every micro-batch and recomputation of a strategy by rising bound, each with its memory's bound."""
    bounds = evaluator.bounds()  # of lossless wires: for quantised ones still the order of the choices
    block = _one_row(Layout.of(strategy, evaluator.cluster.axes))
    state, time, optimizer_s = bounds.state_bytes(block), bounds.time(block), bounds.optimizer_s(block)
    choices = []
    for recomputation in evaluator.workload.recomputations():
        for micro_batch, micro_batches in evaluator.workload.splits(evaluator.cluster.world):
            compute = bounds.micro_batch_s(micro_batch, recomputation)
            candidate = Candidate(
                strategy=strategy,
                micro_batch=micro_batch,
                micro_batches=micro_batches,
                recomputation=recomputation,
                bound_s=float(time.at(micro_batches, compute, optimizer_s)[0]),
            )
            choices.append((candidate, float(state[0]) + bounds.activation_bytes(micro_batch, recomputation)))
    return sorted(choices, key=lambda pair: pair[0].bound_s)


def _one_row(layout: Layout) -> Block:
    levels = [name for name, _ in layout.mesh]
    sizes = [[np.ones(1, dtype=np.int64) for _ in STAGES] for _ in levels]
    for axis in layout.axes:
        sizes[levels.index(axis.mesh_axis)][STAGES.index(axis.stage)] *= axis.size
    nothing = np.zeros(1, dtype=np.int64)
    return Block(indices=tuple(nothing for _ in levels), sizes=tuple(tuple(level) for level in sizes))
