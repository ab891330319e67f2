"""Why the alternatives lose: the runner-up and each well-known strategy against the best, with seconds and places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from zeromesh.cluster.cluster import Cluster
from zeromesh.planner.evaluate import Candidate, Evaluator
from zeromesh.planner.fixed import fastest
from zeromesh.simulator.result import Simulation
from zeromesh.strategy import Stage, Strategy
from zeromesh.strategy.stage import DEFAULT_WIRE
from zeromesh.units import format_seconds

Outcome = Literal["chosen", "slower", "excluded"]

_CALLED = {
    "unshard all_gather": "parameter gathers",
    "refresh all_gather": "gathers of updated parameters",
    "refresh broadcast": "broadcasts of updated parameters",
    "reduce reduce_scatter": "gradient reduce-scatters",
    "reduce all_reduce": "gradient all-reduces",
    "step": "the optimizer's step",
    "unshard up": "parameter copies up",
    "unshard down": "kept copies down",
    "refresh up": "updated parameter copies up",
    "refresh down": "updated parameter copies down",
    "reduce up": "gradient copies up",
    "reduce down": "gradient copies down",
}
"""Names of the simulator's collectives, for sentences."""

_NAMED = 3
"""Most places that a sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    name: str  # its common name
    strategy: str  # in the notation
    outcome: Outcome  # excluded: it does not fit
    text: str  # one sentence
    step_s: float | None  # at its best micro-batch and recomputation; None if it does not fit
    loses: tuple[tuple[str, float], ...] = ()  # (where, seconds), the most first: costs that the best does not have
    memory_bytes: float  # needed; the least possible if it does not fit
    host_memory_bytes: float  # needed in its host's memory, for each device

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"loses": [{"where": where, "seconds": seconds} for where, seconds in self.loses]}


def explain(evaluator: Evaluator, best: Candidate, known: Mapping[str, Strategy]) -> list[Reason]:
    """Compares the known strategies with the best; those of MiCS up to the first that fits."""
    reasons = []
    mics_fits = False
    for name, strategy in known.items():
        mics = name.startswith("MiCS")
        if mics and mics_fits:
            continue
        (choice,) = fastest(evaluator, strategy, best.parallel)
        fits = evaluator.simulation(choice).fits
        reason = compare(evaluator, best, choice, name) if fits else _excluded(evaluator, choice, name)
        reasons.append(reason)
        mics_fits |= (mics or name == "HSDP") and reason.outcome != "excluded"
    return reasons


def compare(evaluator: Evaluator, best: Candidate, other: Candidate, name: str) -> Reason:
    mine, theirs = evaluator.simulation(best), evaluator.simulation(other)
    loses = _losses(mine, theirs)
    cluster = evaluator.division(best.parallel).cluster
    same = best.parallel == other.parallel and _on(cluster, best.strategy) == _on(cluster, other.strategy)
    lossy = theirs.step_s < mine.step_s and other.strategy.quantised and not best.strategy.quantised
    text = "this is the best" if same else _sentence(mine, theirs, other, loses)
    if lossy:
        text = f"excluded since its wires are quantised (--wire any allows them); it would be {text}"
    return Reason(
        name=name,
        strategy=other.named,
        outcome="chosen" if same else "excluded" if lossy else "slower",
        text=text,
        step_s=theirs.step_s,
        loses=loses,
        memory_bytes=theirs.memory.total,
        host_memory_bytes=theirs.host_memory_bytes,
    )


def _on(cluster: Cluster, strategy: Strategy) -> Strategy:
    """The strategy with stage 0 on levels of one member, for comparisons."""
    sizes = dict(cluster.axes)
    terms = tuple(
        replace(term, stage=Stage.ZERO, wire=DEFAULT_WIRE) if sizes[term.name] == 1 else term for term in strategy.axes
    )
    return replace(strategy, axes=terms)


def _losses(mine: Simulation, theirs: Simulation) -> tuple[tuple[str, float], ...]:
    """Seconds that `theirs` takes more than `mine`, by place; gains are negative."""
    change: defaultdict[str, float] = defaultdict(float)
    for sign, simulation in ((-1, mine), (1, theirs)):
        for axes, collective, seconds in simulation.exposed:
            place = "+".join(dict.fromkeys(axis.partition("[")[0] for axis in axes.split("+")))
            change[f"{_CALLED.get(collective, collective)} on {place}"] += sign * seconds
        change["computation"] += sign * simulation.compute_s
    paid = [(where, seconds) for where, seconds in change.items() if abs(seconds) > 1e-3 * mine.step_s]
    return tuple(sorted(paid, key=lambda pair: -pair[1]))


def _sentence(mine: Simulation, theirs: Simulation, other: Candidate, loses: tuple[tuple[str, float], ...]) -> str:
    more = theirs.step_s / mine.step_s - 1
    settings = f"micro-batch {other.micro_batch}, recomputation {other.recomputation.value}"
    if abs(more) < 5e-4:
        return f"as fast within .05 % at {settings}, with {theirs.memory.total / 1e9:.1f} GB"
    pays = [f"{format_seconds(seconds)} of {place}" for place, seconds in loses if seconds > 0][:_NAMED]
    wins = [f"{format_seconds(-seconds)} of {place}" for place, seconds in reversed(loses) if seconds < 0][:_NAMED]
    parts = [f"{verb} {', '.join(places)}" for verb, places in (("pays", pays), ("saves", wins)) if places]
    where = "; ".join(parts) or "a little everywhere"
    return f"{abs(more):.1%} {'slower' if more > 0 else 'faster'} at {settings}: {where}"


def _excluded(evaluator: Evaluator, least: Candidate, name: str) -> Reason:
    simulation = evaluator.simulation(least)
    memory = simulation.memory
    parts = [(key, value) for key, value in memory.as_dict().items() if key != "total"]
    largest = ", ".join(f"{key} {value / 1e9:.1f}" for key, value in sorted(parts, key=lambda p: -p[1])[:3])
    text = (
        f"does not fit: at least {memory.total / 1e9:.1f} GB per device, {evaluator.limit_bytes / 1e9:.1f} GB are "
        f"usable ({largest} GB at micro-batch {least.micro_batch}, recomputation {least.recomputation.value})"
    )
    return Reason(
        name=name,
        strategy=least.named,
        outcome="excluded",
        text=text if memory.total > evaluator.limit_bytes else simulation.notes()[-1],  # then the host's is short
        step_s=None,
        memory_bytes=memory.total,
        host_memory_bytes=simulation.host_memory_bytes,
    )
