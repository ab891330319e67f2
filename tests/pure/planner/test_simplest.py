"""The layout that is recommended: simple, near the fastest, with memory to spare, and one that its engine can run."""

from __future__ import annotations

import pytest

from zeromesh.cluster import find_cluster
from zeromesh.cost import default_constants
from zeromesh.model import Recomputation, preset
from zeromesh.planner import Workload, as_plan, plan
from zeromesh.planner.emit import EMITTERS, can_express
from zeromesh.planner.evaluate import Evaluator
from zeromesh.planner.simplest import FREE, WITHIN, one_of_each_kind
from zeromesh.report import choice_lines

MODEL = preset("llama-7b")
CLUSTER = find_cluster("h100-8x-ndr").take(16)
WORK = Workload(seq_len=4096, global_batch_tokens=1 << 20, micro_batch=2, recomputation=Recomputation.NONE)


@pytest.fixture(scope="module")
def planned():
    return plan(MODEL, CLUSTER, WORK)


def test_a_plain_layout_is_recommended_where_split_ones_gain_little(planned):
    assert str(planned.best.candidate.strategy) == "node=3,cluster=3"
    assert planned.best.simulation.step_s <= (1 + WITHIN) * planned.fastest.simulation.step_s
    assert planned.best.simulation.memory.total <= (1 - FREE) * CLUSTER.device.memory_bytes
    assert len(planned.fastest.candidate.strategy.axes) > 2
    assert planned.plan.strategy == planned.best.candidate.strategy
    first, *_ = choice_lines(planned)
    assert first.startswith(f"fastest: {planned.fastest.simulation.named}; it is ") and "more memory" in first
    # Candidates are of different kinds.
    shown = [choice.candidate for choice in planned.candidates]
    estimates = [estimate for estimate in planned.found.ranked if estimate.candidate in shown]
    evaluator = Evaluator(MODEL, CLUSTER, WORK, "zeromesh", default_constants(), 0.0)
    assert len(one_of_each_kind(evaluator, estimates)) == len(estimates)
    assert shown[0] == planned.best.candidate and shown[1] == planned.fastest.candidate


def test_what_a_shorter_or_longer_step_may_take(planned):
    planned = plan(MODEL, CLUSTER, WORK, within=0)
    assert planned.best.candidate == planned.fastest.candidate
    assert len(choice_lines(planned)) == 1
    # Both layouts fit and are as fast; only how far each level is cut, memory, stages and the name decide.
    wider = plan(MODEL, CLUSTER, WORK, within=0.5)
    assert wider.best.simulation.memory.total <= planned.best.simulation.memory.total
    assert len(wider.best.candidate.strategy.axes) == 2


@pytest.mark.parametrize("engine", sorted(EMITTERS))
def test_every_engine_gets_a_plan_that_it_can_express(engine):
    planned = plan(MODEL, CLUSTER, WORK, accepts=lambda each: can_express(engine, each, MODEL))
    assert EMITTERS[engine](planned.plan, MODEL)


@pytest.mark.parametrize("engine", ["deepspeed", None])
def test_wires_that_change_the_numbers_are_never_recommended_unasked(engine):
    """Behind slow links ZeRO++'s would be the fastest that DeepSpeed can express."""
    accepts = None if engine is None else lambda each: can_express(engine, each, MODEL)
    work = Workload(seq_len=4096, global_batch_tokens=1 << 18)
    found = plan(MODEL, find_cluster("a100-8x-100g").take(64), work, accepts=accepts)
    assert not any(choice.candidate.strategy.quantised for choice in (found.best, found.fastest, *found.candidates))


def test_another_engine_s_fastest_is_one_that_it_can_run():
    planned = plan(MODEL, CLUSTER, WORK, engine="fsdp", accepts=lambda each: can_express("fsdp2", each, MODEL))
    for choice in (planned.best, planned.fastest):
        assert can_express("fsdp2", as_plan(choice, CLUSTER, WORK), MODEL)
