"""Degrees beside data in the planner: searched, bounded, explained, printed as a job of torchtitan."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.planner.setups import small_cluster
from tests.pure.simulator.test_division import SEQ, model
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.cost.constants import default_constants
from zeromesh.errors import InputError
from zeromesh.model.presets import preset
from zeromesh.model.spec import Recomputation
from zeromesh.parallel import Parallel
from zeromesh.planner.emit import EMITTERS, emit_torchtitan
from zeromesh.planner.evaluate import Evaluator
from zeromesh.planner.fixed import choices, simulate_choices
from zeromesh.planner.plan import plan
from zeromesh.planner.search import NothingFitsError, Options, search
from zeromesh.planner.workload import Workload
from zeromesh.strategy import Strategy
from zeromesh.strategy.plan import Plan

WORK = Workload(seq_len=SEQ, global_batch_tokens=SEQ * 64)
MIXES = ["node=3,cluster=1", "node=0,cluster=0", "node=3,cluster=3k", "node[2]=3,node[*]=1,cluster=3d"]


@settings(max_examples=25)
@given(st.sampled_from(MIXES), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.data())
def test_bounds_lie_below_the_simulation(strategy: str, tp: int, cp: int, pp: int, data: st.DataObject) -> None:
    ep = data.draw(st.sampled_from([1, 2, 4]))
    cluster = small_cluster(8, 4, outer_bytes_per_s=data.draw(st.sampled_from([1e9, 12e9])))
    spec = model(8, experts=8 if ep > 1 else 0)
    evaluator = Evaluator(spec, cluster, WORK, "zeromesh", default_constants(), 0.08)
    parallel = Parallel(tp=tp, cp=cp, pp=pp, ep=ep)
    for candidate, least_bytes in choices(evaluator, Strategy.parse(strategy), parallel)[:4]:
        found = evaluator.simulation(candidate)
        assert candidate.bound_s <= found.step_s * (1 + 1e-9)
        assert least_bytes <= found.memory.total * (1 + 1e-9)
        _, of_memory = evaluator.bounds(parallel=parallel)
        state = found.memory.params + found.memory.grads + found.memory.optimizer
        assert of_memory.least_bytes <= max(state, found.memory.total)


def test_a_search_of_all_degrees_finds_the_best_of_each() -> None:
    cluster = small_cluster(2, 4, memory_bytes=2.1e9, outer_bytes_per_s=3e9)
    spec, work = model(), replace(WORK, micro_batch=1, recomputation=Recomputation.FULL)
    options = Options(splits="none", max_simulations=None, front=0, host="none")
    found, _ = search(spec, cluster, replace(work, tp=None, pp=None), options=options)
    best = []
    for tp, pp in product((1, 2), (1, 2, 4)):
        with suppress(NothingFitsError):
            one, _ = search(spec, cluster, replace(work, tp=tp, pp=pp), options=options)
            assert {estimate.candidate.parallel for estimate in one.ranked} == {Parallel(tp=tp, pp=pp)}
            best.append(one.best.step_s)
    assert len(best) > 3
    assert found.best.step_s == pytest.approx(min(best), rel=1e-9) and found.gap == 0.0


def test_what_fits_under_no_layout_fits_where_the_model_is_cut() -> None:
    """Sequences of 32,768 tokens without recomputation: 214 GB a rank. The plan says by which degrees it is cut."""
    llama, cluster = preset("llama-7b"), find_cluster("a800-8x-hdr").take(64)
    work = Workload(seq_len=32768, global_batch_tokens=32768 * 64, micro_batch=1, recomputation=Recomputation.NONE)
    with pytest.raises(NothingFitsError):
        search(llama, cluster, work)
    planned = plan(llama, cluster, replace(work, tp=None), options=Options(splits="none", max_simulations=4))
    parallel = planned.best.candidate.parallel
    assert parallel.tp in (4, 8) and planned.best.simulation.fits
    assert planned.to_json()["best"]["parallel"] == asdict(parallel)
    assert planned.plan.parallel == parallel
    assert planned.plan.mesh == cluster.cut(inner=parallel.tp).axes
    assert all(reason.strategy.startswith("tp=") for reason in planned.why)


def test_degrees_are_checked_once_for_all() -> None:
    cluster = small_cluster(4, 4)
    with pytest.raises(InputError, match="tp must divide the heads of small, 8; got 3"):
        plan(model(), cluster, replace(WORK, tp=3))
    with pytest.raises(InputError, match="of which small has none"):
        plan(model(), cluster, replace(WORK, ep=2, tp=None))
    with pytest.raises(InputError, match="tp must be given, got None: only a search chooses degrees"):
        simulate_choices(model(), cluster, replace(WORK, tp=None), Strategy.parse("node=3,cluster=1"))
    with pytest.raises(InputError, match="needs at least 4 micro-batches a step; got 1"):
        plan(model(), cluster, replace(WORK, pp=4, micro_batch=16))
    # Plans with degrees are read back.
    made = a_plan("node=3,cluster=0", tp=2, pp=2)
    assert Plan.from_json(made.to_json()) == made
    assert Plan.from_json(a_plan("node=3,cluster=0").to_json()).parallel is None


# torchtitan -----------------------------------------------------------------------------------------------------------


def a_plan(strategy: str, **degrees: Any) -> Plan:
    fields: dict[str, Any] = {"micro_batch": 2, "micro_batches": 8, "seq_len": 4096, "recompute": "selective"}
    fields |= {"param_dtype": "bf16", "grad_dtype": "fp32", "parallel": Parallel(**degrees) if degrees else None}
    return Plan(strategy=Strategy.parse(strategy), mesh=(("node", 4), ("cluster", 4)), **fields)


def test_jobs_of_torchtitan() -> None:
    job = tomllib.loads(emit_torchtitan(a_plan("node=3,cluster=0", tp=8, cp=2), model()))
    assert job["parallelism"] == {
        "data_parallel_replicate_degree": 4,
        "data_parallel_shard_degree": 2,
        "fsdp_reshard_after_forward": "always",
        "tensor_parallel_degree": 8,
        "context_parallel_degree": 2,
        "context_parallel_rotate_method": "allgather",
        "expert_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
    }
    assert job["training"]["local_batch_size"] == 2 and job["training"]["global_batch_size"] == 2 * 8 * 8
    assert job["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    # A pipeline of torchtitan.
    made = a_plan("node=3dk,cluster=3dk", pp=2, pp_schedule="interleaved", pp_chunks=2)
    text = emit_torchtitan(made, model(8))
    job = tomllib.loads(text)["parallelism"]
    assert job["data_parallel_shard_degree"] == 16 and job["fsdp_reshard_after_forward"] == "never"
    assert job["pipeline_parallel_schedule"] == "Interleaved1F1B" and job["pipeline_parallel_layers_per_stage"] == 2
    assert tomllib.loads(text)["training"]["local_batch_size"] == 16
    assert "gradients are reduced in float32, torchtitan's only choice; the plan has bf16" in text


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (a_plan("node=3,cluster=1", tp=2), "torchtitan cannot express stage 1 over 4 ranks: 3 or 3k inside"),
        (a_plan("node=3,cluster=0", pp=2), "stage 3 over 4 ranks: 3d or 3dk inside"),
        (a_plan("node=3,cluster=0", cp=8), "cp or ep that is wider than the 4 ranks"),
        (a_plan("node=3,cluster=0", tp=2, sequence_parallel=False), "tp without sequence parallelism"),
        (replace(a_plan("node=3,cluster=3"), param_dtype="fp16"), "parameters in fp16"),
    ],
)
def test_what_torchtitan_cannot_express(made: Plan, message: str) -> None:
    with pytest.raises(InputError, match=message):
        emit_torchtitan(made, model())
    for engine in ("fsdp2", "deepspeed", "megatron-fsdp"):
        with pytest.raises(InputError, match="cannot express tp=2: what is emitted shards over data-parallel ranks"):
            EMITTERS[engine](a_plan("node=3,cluster=3", tp=2), model())
