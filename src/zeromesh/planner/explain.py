"""Why the alternatives lose: the runner-up and each well-known strategy against the best, in seconds and where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from zeromesh.planner.bounds import Bounds
from zeromesh.planner.evaluate import Candidate, Evaluator
from zeromesh.planner.known import Known, known_strategies
from zeromesh.planner.space import STAGES, Block
from zeromesh.simulate import Simulation
from zeromesh.strategy import Layout, Strategy

Outcome = Literal["chosen", "slower", "excluded"]

_TRIED = 2
"""Micro-batches and recomputations simulated of a known strategy, the lowest bounds that fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One alternative.

    Args:
        name: what people call it.
        strategy: in the notation.
        outcome: chosen, slower, or excluded since it does not fit.
        text: one sentence.
        step_s: its step time at its best micro-batch and recomputation; None where it does not fit.
        loses: (where, seconds), the most first: what the best does not pay.
        memory_bytes: what it needs; the least that it can do with where it does not fit.
    """

    name: str
    strategy: str
    outcome: Outcome
    text: str
    step_s: float | None
    loses: tuple[tuple[str, float], ...] = ()
    memory_bytes: float

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "strategy": self.strategy,
            "outcome": self.outcome,
            "text": self.text,
            "step_s": self.step_s,
            "loses": [{"where": where, "seconds": seconds} for where, seconds in self.loses],
            "memory_bytes": self.memory_bytes,
        }


def explain(evaluator: Evaluator, best: Candidate, runner_up: Candidate | None) -> list[Reason]:
    """The runner-up first, then the known strategies, those of MiCS up to the first that fits."""
    reasons = []
    if runner_up is not None:
        reasons.append(_compare(evaluator, best, runner_up, "runner-up"))
    mics_fits = False
    for known in known_strategies(evaluator.cluster):
        mics = known.name.startswith("MiCS")
        if mics and mics_fits:
            continue
        reason = _explain_known(evaluator, best, known)
        reasons.append(reason)
        mics_fits |= (mics or known.name == "HSDP") and reason.outcome != "excluded"
    return reasons


def _explain_known(evaluator: Evaluator, best: Candidate, known: Known) -> Reason:
    choices = _choices(evaluator, known.strategy)
    fitting = [
        choice
        for choice, memory in choices
        if memory <= evaluator.limit_bytes and evaluator.estimate(choice).memory_bytes <= evaluator.limit_bytes
    ][:_TRIED]
    if not fitting:
        least = min(choices, key=lambda pair: pair[1])[0]
        return _excluded(evaluator, least, known.name)
    fastest = min(fitting, key=lambda choice: evaluator.estimate(choice).step_s)
    return _compare(evaluator, best, fastest, known.name)


def _choices(evaluator: Evaluator, strategy: Strategy) -> list[tuple[Candidate, float]]:
    """Every micro-batch and recomputation of a strategy by rising bound, each with its memory's bound."""
    wires = tuple("" for _ in evaluator.cluster.levels)
    bounds = Bounds(evaluator.model, evaluator.cluster, evaluator.workload, evaluator.constants, wires)
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


def _compare(evaluator: Evaluator, best: Candidate, other: Candidate, name: str) -> Reason:
    mine, theirs = evaluator.simulation(best), evaluator.simulation(other)
    loses = _losses(mine, theirs)
    same = mine.step_s == theirs.step_s and best.strategy == other.strategy
    return Reason(
        name=name,
        strategy=str(other.strategy),
        outcome="chosen" if same else "slower",
        text="this is the best" if same else _sentence(mine, theirs, other, loses),
        step_s=theirs.step_s,
        loses=loses,
        memory_bytes=theirs.memory.total,
    )


def _losses(mine: Simulation, theirs: Simulation) -> tuple[tuple[str, float], ...]:
    """Seconds that one pays more than the other, by where; gains are negative."""
    change: Counter[str] = Counter()
    for sign, simulation in ((-1, mine), (1, theirs)):
        for axes, collective, seconds in simulation.exposed:
            change[f"{collective} on {axes}"] += sign * seconds  # type: ignore[assignment]  # counts of seconds
        change["computation"] += sign * simulation.compute_s  # type: ignore[assignment]  # counts of seconds
    paid = [(where, float(seconds)) for where, seconds in change.items() if abs(seconds) > 1e-3 * mine.step_s]
    return tuple(sorted(paid, key=lambda pair: -pair[1]))


def _sentence(mine: Simulation, theirs: Simulation, other: Candidate, loses: tuple[tuple[str, float], ...]) -> str:
    more = theirs.step_s / mine.step_s - 1
    settings = f"micro-batch {other.micro_batch}, recomputation {other.recomputation.value}"
    if abs(more) < 5e-4:
        return f"as fast within .05 % at {settings}, with {theirs.memory.total / 1e9:.1f} GB"
    where = ", ".join(f"{_seconds(seconds)} {place}" for place, seconds in loses if seconds > 0) or "small differences"
    gains = ", ".join(f"{_seconds(seconds)} {place}" for place, seconds in loses if seconds < 0)
    back = f", and wins {gains}" if gains else ""
    return f"{more:.1%} slower at {settings}: pays {where}{back}"


def _seconds(seconds: float) -> str:
    return f"{abs(seconds):.3g} s"


def _excluded(evaluator: Evaluator, least: Candidate, name: str) -> Reason:
    simulation = evaluator.simulation(least)
    memory = simulation.memory
    parts = [(key, value) for key, value in memory.as_dict().items() if key != "total"]
    largest = ", ".join(f"{key} {value / 1e9:.1f}" for key, value in sorted(parts, key=lambda p: -p[1])[:3])
    return Reason(
        name=name,
        strategy=str(least.strategy),
        outcome="excluded",
        text=(
            f"does not fit: at least {memory.total / 1e9:.1f} GB per device, {evaluator.limit_bytes / 1e9:.1f} GB are "
            f"usable ({largest} GB at micro-batch {least.micro_batch}, recomputation {least.recomputation.value})"
        ),
        step_s=None,
        memory_bytes=memory.total,
    )
