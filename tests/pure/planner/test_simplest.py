"""The layout that is recommended: simple, near the fastest, with memory to spare, and one that its engine can run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from tests.pure.planner.setups import small_cluster, small_model
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.constants import default_constants
from zeromesh.errors import InputError
from zeromesh.model.presets import preset
from zeromesh.model.spec import ModelSpec, Recomputation
from zeromesh.planner.emit import EMITTERS
from zeromesh.planner.evaluate import Candidate, Evaluator
from zeromesh.planner.known import known_strategies
from zeromesh.planner.plan import Planned, as_plan, plan
from zeromesh.planner.search import Found, NothingFitsError, Options, search
from zeromesh.planner.simplest import FREE, WITHIN, one_of_each_kind, simplicity
from zeromesh.planner.space import Space
from zeromesh.planner.workload import Workload
from zeromesh.report.build import choice_lines

MODEL = preset("llama-7b")
CLUSTER = find_cluster("h100-8x-ndr").take(16)
WORK = Workload(seq_len=4096, global_batch_tokens=1 << 20, micro_batch=2, recomputation=Recomputation.NONE)


@pytest.fixture(scope="module")
def planned() -> Planned:
    return plan(MODEL, CLUSTER, WORK)


def test_a_plain_layout_is_recommended_where_split_ones_gain_little(planned: Planned) -> None:
    assert str(planned.best.candidate.strategy) == "node=3,cluster=3"
    assert planned.best.simulation.step_s <= (1 + WITHIN) * planned.fastest.simulation.step_s
    assert planned.best.simulation.memory.total <= (1 - FREE) * CLUSTER.device.memory_bytes
    assert len(planned.fastest.candidate.strategy.axes) > 2
    assert planned.plan.strategy == planned.best.candidate.strategy
    first, error, network = choice_lines(planned)
    assert first.startswith(f"fastest: {planned.fastest.simulation.named}; it is ") and "more memory" in first
    assert error.startswith("both step times are predictions, which were ") and "% off at the median of " in error
    assert network.endswith("% of the step is computation: any of these layouts will do")
    simulation = planned.best.simulation
    slow = replace(planned.best, simulation=replace(simulation, step_s=1.1 * simulation.step_s))
    *_, network = choice_lines(replace(planned, candidates=(*planned.candidates, slow)))
    assert network.endswith("% of the step is computation: with this layout the network hardly matters")
    # Candidates are of different kinds.
    shown = [choice.candidate for choice in planned.candidates]
    estimates = [estimate for estimate in planned.found.ranked if estimate.candidate in shown]
    evaluator = Evaluator(MODEL, CLUSTER, WORK, "zeromesh", default_constants(), 0.0)
    assert len(one_of_each_kind(evaluator, estimates)) == len(estimates)
    assert shown[0] == planned.best.candidate and shown[1] == planned.fastest.candidate
    others = [estimate for candidate in shown for estimate in estimates if estimate.candidate == candidate]
    assert all(each.differs(before) for at, each in enumerate(others[2:], 2) for before in others[:at])


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    sizes=st.sampled_from([(4,), (4, 2), (4, 4)]),
    memory_bytes=st.sampled_from([2.05e9, 2.6e9, 8e9]),
    outer_bytes_per_s=st.sampled_from([0.5e9, 2e9, 12e9]),
    within=st.sampled_from([0.0, 0.005, 0.02, 0.1]),
    engine=st.sampled_from(["", "", *EMITTERS]),
)
def test_no_simpler_layout_is_near_the_fastest(
    sizes: tuple[int, ...], memory_bytes: float, outer_bytes_per_s: float, within: float, engine: str
) -> None:
    """Against every layout without splits, or that the engine can express, at every micro-batch and recomputation."""
    model = small_model()
    cluster = small_cluster(*sizes, memory_bytes=memory_bytes, outer_bytes_per_s=outer_bytes_per_s)
    work = Workload(seq_len=256, global_batch_tokens=256 * cluster.world * 2)
    options = Options(splits="once" if engine else "none", max_simulations=None, front=0, host="none")
    emit = (lambda each: EMITTERS[engine](each, model)) if engine else None
    try:
        found = plan(model, cluster, work, options=options, within=within, robust=False, emit=emit)
    except NothingFitsError:
        assume(False)

    evaluator = Evaluator(model, cluster, work, "zeromesh", default_constants(), options.memory_margin)
    space = Space(cluster.axes, options.splits)
    every = [
        Candidate(strategy=layout, micro_batch=size, micro_batches=count, recomputation=recomputation)
        for layout in layouts_of(space)
        if runs(engine, layout_plan(found, layout), model)
        for (size, count), recomputation in product(work.splits(cluster.world), Recomputation)
    ]
    fitting = [each for each in map(evaluator.estimate, every) if each.memory_bytes <= evaluator.limit_bytes]
    fastest_s = min(each.step_s for each in fitting)
    assert found.fastest.simulation.step_s == pytest.approx(fastest_s)
    best = evaluator.estimate(found.best.candidate)
    assert best.step_s <= fastest_s * (1 + within) * (1 + 1e-12)
    if within == 0:
        assert found.best.candidate == found.fastest.candidate
        return
    roomy = [each for each in fitting if each.memory_bytes <= (1 - FREE) * cluster.device.memory_bytes]
    near = [each for each in roomy if each.step_s <= fastest_s * (1 + within)]
    known = set(known_strategies(cluster).values())
    if near:
        assert simplicity(evaluator, best, known)[:-1] == min(simplicity(evaluator, each, known) for each in near)[:-1]
    else:
        assert found.best.candidate == found.fastest.candidate


def layouts_of(space: Space) -> list[Any]:
    return [
        space.strategy([int(column[row]) for column in block.indices])
        for block in space.blocks()
        for row in range(len(block))
    ]


def layout_plan(found: Planned, strategy: Any) -> Any:
    return replace(found.plan, strategy=strategy)


def runs(engine: str, each: Any, model: Any = MODEL) -> bool:
    if not engine:
        return True
    try:
        EMITTERS[engine](each, model)
    except InputError:
        return False
    return True


@cache
def of_all(cluster: str, world: int) -> Found:
    return search(*asked(cluster, world))[0]


def asked(cluster: str, world: int) -> tuple[ModelSpec, Cluster, Workload]:
    model = preset("gpt2") if world == 1 else MODEL
    return model, find_cluster(cluster).take(world), Workload(seq_len=1024, global_batch_tokens=1024 * world * 2)


@pytest.mark.parametrize(
    ("engine", "cluster", "world"),
    [
        ("deepspeed", "h100-8x-ndr", 64),
        ("fsdp2", "h100-8x-ndr", 64),
        ("megatron-fsdp", "frontier-mi250x", 64),
        ("torchtitan", "h100-8x-ndr", 1),
    ],
)
def test_every_engine_gets_the_fastest_plan_that_it_can_express(engine: str, cluster: str, world: int) -> None:
    model, hardware, work = asked(cluster, world)
    found = plan(model, hardware, work, emit=lambda each: EMITTERS[engine](each, model), top=1)
    for choice in (found.best, found.fastest, *found.candidates):
        assert EMITTERS[engine](as_plan(choice, hardware, work), model)
    every = of_all(cluster, world)
    assert every.bound_s <= found.fastest.simulation.step_s <= found.best.simulation.step_s
    assert 0 < found.found.searched <= every.searched


def test_wires_that_change_the_numbers_are_never_recommended_unasked() -> None:
    """Behind slow links ZeRO++'s would be the fastest that DeepSpeed can express."""
    work = Workload(seq_len=4096, global_batch_tokens=1 << 18)
    cluster = find_cluster("a100-8x-100g").take(64)
    found = plan(MODEL, cluster, work, emit=lambda each: EMITTERS["deepspeed"](each, MODEL))
    assert not any(choice.candidate.strategy.quantised for choice in (found.best, found.fastest, *found.candidates))
