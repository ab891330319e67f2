"""Planning from end to end: search, explain, and the plan as a value that `zeromesh.shard` and the trainer accept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zeromesh.cluster.cluster import Cluster
from zeromesh.errors import InputError, short_repr
from zeromesh.model.spec import ModelSpec, Recomputation
from zeromesh.parallel import Parallel
from zeromesh.planner.evaluate import Candidate, Choice, Evaluator
from zeromesh.planner.explain import Reason, compare, explain
from zeromesh.planner.fixed import fastest as fastest_choices
from zeromesh.planner.known import known_strategies
from zeromesh.planner.robust import CONTENDERS, Dependence, least_regret
from zeromesh.planner.search import Found, Options, search
from zeromesh.planner.simplest import WITHIN, as_simple, one_of_each_kind, simplest
from zeromesh.planner.space import HOSTS, shares_of
from zeromesh.planner.workload import Workload
from zeromesh.progress import progress
from zeromesh.simulator.mechanics import Mechanics
from zeromesh.strategy import Stage, Strategy
from zeromesh.strategy.plan import Plan
from zeromesh.trace import Trace

_NEAR = 1.25
"""Layouts that are slower by more than this are not compared: they stay slower with all constants in their ranges."""

TRACED_MICRO_BATCHES = 4
"""Most micro-batches in a timeline: all but the first and the last are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    model: ModelSpec
    cluster: Cluster  # cut to the world in use
    workload: Workload
    best: Choice  # the recommended one: the simplest that is nearly as fast as the fastest
    fastest: Choice  # of those that fit
    candidates: tuple[Choice, ...]  # the best, the fastest, and the fastest of each other kind of layout
    why: tuple[Reason, ...]  # why the alternatives lose
    found: Found = field(repr=False)
    depends: Dependence | None  # the unmeasured constant that the recommendation depends on most
    limit_bytes: float  # usable memory of a device
    host_s: float  # seconds of the best one's step due to shards in the host's memory; 0 if there are none
    seconds: float  # of planning
    trace: Trace | None = None  # the best one's, if asked for; of at most `TRACED_MICRO_BATCHES` micro-batches

    __repr__ = short_repr

    @property
    def plan(self) -> Plan:
        return as_plan(self.best, self.cluster, self.workload)

    def to_json(self) -> dict[str, Any]:
        """The object that `zeromesh plan --json` prints."""
        return {
            "best": self.best.to_json(),
            "fastest": self.fastest.to_json(),
            "candidates": [choice.to_json() for choice in self.candidates],
            "searched": self.found.searched,
            "seconds": self.seconds,
            "why": [reason.to_json() for reason in self.why],
            "gap": self.found.gap,
            "depends": self.depends and asdict(self.depends),
            "pruned_by_memory": self.found.pruned_memory,
            "simulated": self.found.simulated,
            "memory_limit_bytes": self.limit_bytes,
            "host_s": self.host_s,
            "front": [
                {
                    "strategy": str(point.candidate.strategy),
                    "parallel": asdict(point.candidate.parallel),
                    "micro_batch": point.candidate.micro_batch,
                    "recomputation": point.candidate.recomputation.value,
                    "step_s": point.step_s,
                    "memory_bytes": point.memory_bytes,
                    "host_memory_bytes": point.host_memory_bytes,
                }
                for point in self.found.front
            ],
        }


def as_plan(choice: Choice, cluster: Cluster, workload: Workload) -> Plan:
    """A choice as a value to run; its mesh has the strategy's axes."""
    return _as_plan(choice.candidate, cluster, workload, choice.to_json())


def _as_plan(candidate: Candidate, cluster: Cluster, workload: Workload, predicted: dict[str, Any]) -> Plan:
    parallel = candidate.parallel
    return Plan(
        strategy=candidate.strategy,
        mesh=cluster.cut(inner=parallel.tp, outer=parallel.pp).axes,
        micro_batch=candidate.micro_batch,
        micro_batches=candidate.micro_batches,
        recompute=candidate.recomputation.value,
        seq_len=workload.seq_len,
        param_dtype=workload.param_dtype,
        reduce_dtype=workload.reduce_dtype,
        grad_dtype=workload.grad_dtype,
        master_dtype=workload.master_dtype,
        parallel=parallel if parallel.cuts else None,
        predicted=predicted,
    )


@progress("searching layouts")
def plan(
    model: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    *,
    options: Options | None = None,
    engine: str | Mechanics = "zeromesh",
    top: int = 5,
    trace: bool = False,
    within: float = WITHIN,
    robust: bool = True,
    emit: Callable[[Plan], object] | None = None,
) -> Planned:
    """The recommended layout of `model` on `cluster`, and why the others lose. It is the simplest one that is nearly as
    fast as the fastest that fits (`zeromesh.planner.simplest`).

    Args:
        cluster: cut to the world in use (`Cluster.take`).
        workload: micro-batch and recomputation are searched if they are open.
        top: number of candidates to list.
        trace: also make the best one's timeline.
        within: share of the fastest step by which a simpler layout may be slower; 0 recommends the fastest.
        robust: choose by the least regret if constants decide that measurements leave open
            (`zeromesh.planner.robust`).
        emit: restricts the search to plans for which this call raises no InputError, for another engine.

    Raises:
        NothingFitsError: no candidate fits in memory.
        InputError: the batch does not divide, or `emit` refuses every layout.
    """
    start = time.perf_counter()
    options = options or Options()
    if emit is not None:
        options = replace(options, collective="hierarchical")  # others are zeromesh's own

    def refusal(strategy: Strategy, parallel: Parallel) -> InputError | None:
        any_choice = Candidate(
            strategy=strategy, micro_batch=1, micro_batches=1, recomputation=Recomputation.NONE, parallel=parallel
        )
        try:
            if emit is not None:
                emit(_as_plan(any_choice, cluster, workload, {}))
        except InputError as error:
            return error
        return None

    found, evaluator = search(
        model, cluster, workload, options=options, engine=engine, refuses=refusal if emit else None
    )
    parallel = found.best.candidate.parallel
    every = known_strategies(evaluator.division(parallel).cluster)

    def known(host: Stage) -> dict[str, Strategy]:
        placed = {name: replace(strategy, host=host) for name, strategy in every.items()}
        return {
            name: strategy
            for name, strategy in placed.items()
            if refusal(strategy, parallel) is None
            and (options.splits != "none" or len(strategy.axes) == len(strategy.names))
        }

    for strategy in known(found.best.candidate.strategy.host).values():
        fastest_choices(evaluator, strategy, parallel)
    if emit is None:
        _try_shares(evaluator, found)
    found = found.again(evaluator, options.wires)
    best = found.best
    if within > 0:
        names = {strategy for host in HOSTS for strategy in known(host).values()}
        best = simplest(evaluator, found, names, within, options.max_simulations)
        found = found.again(evaluator, options.wires)
    kinds = one_of_each_kind(evaluator, dict.fromkeys((best, found.best, *found.ranked)))
    depends = None
    if robust and within > 0:
        simple = [each for each in kinds if each.step_s <= _NEAR * best.step_s and as_simple(evaluator, each, best)]
        contenders = list(dict.fromkeys((best, *simple)))[:CONTENDERS]
        longest_s = max(best.step_s, found.best.step_s * (1 + within))
        best, depends = least_regret(evaluator, contenders, within, longest_s)
    first = list(dict.fromkeys((best, found.best)))
    why = explain(evaluator, best.candidate, known(best.candidate.strategy.host))
    shown = first.copy()
    for kind in kinds:
        if kind not in first and all(map(kind.differs, shown)):
            shown.append(kind)
    shown = shown[: max(1, top)]
    candidates = tuple(evaluator.choice(estimate.candidate) for estimate in shown)
    runner_up = next((c.candidate for c in candidates if c.candidate.named != best.candidate.named), None)
    if runner_up is not None:
        why.insert(0, compare(evaluator, best.candidate, runner_up, "runner-up"))
    # The same step on devices with enough memory.
    on_device = replace(best.candidate, strategy=replace(best.candidate.strategy, host=Stage.ZERO))
    return Planned(
        model=model,
        cluster=cluster,
        workload=workload,
        best=candidates[0],
        fastest=evaluator.choice(first[-1].candidate),
        candidates=candidates,
        why=tuple(why),
        found=found,
        depends=depends,
        limit_bytes=evaluator.limit_bytes,
        host_s=best.step_s - evaluator.estimate(on_device).step_s,
        seconds=time.perf_counter() - start,
        trace=traced(evaluator, best.candidate) if trace else None,
    )


def _try_shares(evaluator: Evaluator, found: Found) -> None:
    """Estimates falling shares of the host, as long as they fit: for each stage of the host, of the fastest layout and
    of the fastest without split levels."""
    first: dict[object, Candidate] = {}
    for candidate in (each.candidate for each in found.ranked) if found.best.candidate.strategy.hosted else ():
        strategy = candidate.strategy
        first.setdefault(strategy.host, candidate)
        if len(strategy.axes) == len(strategy.names):
            first.setdefault((strategy.host, "whole"), candidate)
    for candidate in dict.fromkeys(each for each in first.values() if each.strategy.hosted):
        fitted = False
        for strategy in shares_of(candidate.strategy):
            best, *_ = fastest_choices(evaluator, strategy, candidate.parallel)
            fits = evaluator.has_room(best)
            if fitted and not fits:
                break
            fitted = fits


def traced(evaluator: Evaluator, candidate: Candidate) -> Trace | None:
    """The timeline of a step, with at most `TRACED_MICRO_BATCHES` micro-batches."""
    count = min(candidate.micro_batches, TRACED_MICRO_BATCHES)
    tokens = evaluator.workload.global_batch_tokens // candidate.micro_batches * count
    shorter = replace(evaluator, workload=replace(evaluator.workload, global_batch_tokens=tokens))
    return shorter.simulation(replace(candidate, micro_batches=count), record=True).trace
