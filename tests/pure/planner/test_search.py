"""The search finds the same as brute force, says how sure it is, and gives advice where nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.pure.planner.setups import rootless_model, small_cluster, small_model
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.cluster.cluster import Cluster
from zeromesh.errors import InputError
from zeromesh.model.presets import preset
from zeromesh.model.spec import Recomputation
from zeromesh.planner.emit import EMITTERS
from zeromesh.planner.fixed import simulate_choices
from zeromesh.planner.known import known_strategies
from zeromesh.planner.plan import plan
from zeromesh.planner.search import NothingFitsError, Options, search
from zeromesh.planner.space import Space
from zeromesh.planner.workload import Workload
from zeromesh.simulator.run import simulate
from zeromesh.simulator.units import schedule_units
from zeromesh.strategy import Stage, Strategy
from zeromesh.strategy.plan import Plan

WORKLOAD = Workload(seq_len=256, global_batch_tokens=256 * 16 * 2)


TIGHT = small_cluster(4, 4, memory_bytes=2.0e9, outer_bytes_per_s=2e9)


def on_cores(cluster: Cluster) -> Cluster:
    """HO-Ring is tried on gloo alone, so on devices whose own cores move the bytes; and only if asked for elsewhere."""
    return replace(cluster, device=replace(cluster.device, cores=1.0))


def brute_force(cluster: Cluster, options: tuple[str, ...] = ("",)) -> list[float]:
    """With each of the options, the best of every layout, micro-batch and recomputation, simulated."""
    space = Space(cluster.axes, "none")
    best = dict.fromkeys(options, float("inf"))
    (block,) = space.blocks()
    splits = WORKLOAD.splits(cluster.world)
    for row, option, (micro_batch, _), recomputation in product(range(len(block)), options, splits, Recomputation):
        layout = space.strategy([int(column[row]) for column in block.indices])
        work = WORKLOAD.fixed(micro_batch, recomputation)
        found = simulate(small_model(), cluster, f"{layout}{option}", work)
        if found.fits:
            best[option] = min(best[option], found.step_s)
    return list(best.values())


def test_the_optimum_over_collectives_is_that_of_brute_force() -> None:
    cluster = on_cores(small_cluster(4, 4, memory_bytes=1.97e9, outer_bytes_per_s=10e9))
    options = Options(splits="none", max_simulations=None, front=0, collective="ho_ring")
    found, _ = search(small_model(), cluster, WORKLOAD, options=options)
    plain, overlapped = brute_force(cluster, ("", ";collective=ho_ring"))
    assert found.best.step_s == pytest.approx(min(plain, overlapped), rel=1e-9)
    assert found.gap == 0.0 and found.simulated < found.searched / 2
    assert overlapped < 0.99 * plain
    assert found.best.candidate.strategy.collective == "ho_ring"


@pytest.mark.parametrize(
    ("cluster", "options", "expected"),
    [
        (TIGHT, {}, {"auto"}),
        (on_cores(TIGHT), {"collective": "hierarchical"}, {"auto"}),
        (on_cores(TIGHT), {}, {"auto", "ho_ring"}),
        (on_cores(TIGHT), {"collective": "ho_ring"}, {"auto", "ho_ring"}),
    ],
)
def test_overlapped_levels_are_chosen_where_the_engine_has_them(
    cluster: Cluster, options: dict[str, Any], expected: set[str]
) -> None:
    found, _ = search(small_model(), cluster, WORKLOAD, options=Options(**options))
    assert {estimate.candidate.strategy.collective for estimate in found.ranked} == expected


def test_the_gap_is_honest() -> None:
    """A search that stops early promises no less than a whole one finds."""
    every = Options(splits="none", max_simulations=None, front=0)
    whole, _ = search(small_model(), TIGHT, WORKLOAD, options=every)
    for budget in (1, 3, 10):
        assert budget < whole.simulated
        short, _ = search(small_model(), TIGHT, WORKLOAD, options=replace(every, max_simulations=budget))
        assert short.bound_s <= whole.best.step_s <= short.best.step_s
        assert short.best.step_s * (1 - short.gap) <= whole.best.step_s * (1 + 1e-12)


def test_splits_and_wires_only_help() -> None:
    """And lossless never quantises."""
    cluster = small_cluster(4, 2, memory_bytes=2.0e9, outer_bytes_per_s=1e9)
    found = []
    for more in ({"splits": "none"}, {"splits": "once"}, {"splits": "all"}, {"splits": "all", "wires": "any"}):
        options = Options(max_simulations=None, front=0, **more)  # type: ignore[arg-type]  # a literal each
        found.append(search(small_model(), cluster, WORKLOAD, options=options)[0])
    times = [each.best.step_s for each in found]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]
    *lossless, lossy = found
    assert not any(estimate.candidate.strategy.quantised for each in lossless for estimate in each.ranked)
    assert lossy.best.candidate.strategy.quantised


def test_nothing_fits_says_the_smallest_and_how_many_devices_would_do() -> None:
    cluster = find_cluster("a800-8x-hdr").take(8)
    workload = Workload(seq_len=2048, global_batch_tokens=2048 * 8)
    with pytest.raises(NothingFitsError, match=r"llama-65b fits on 8 x A800.* under no strategy") as error:
        search(preset("llama-65b"), cluster, workload, options=Options(host="none"))
    assert "GB per device" in str(error.value)
    devices = int(str(error.value).rpartition("about ")[2].split()[0])
    enough = find_cluster("a800-8x-hdr").take(devices)
    found, _ = search(preset("llama-65b"), enough, Workload(seq_len=2048, global_batch_tokens=2048 * devices))
    assert found.best.memory_bytes <= 0.92 * 80e9
    with pytest.raises(NothingFitsError, match=r"no number of devices would do"):
        search(small_model(), small_cluster(4, 4, memory_bytes=0.9e9), WORKLOAD)
    # Megatron-LM shards the optimizer's states alone: no number of devices makes room for parameters and gradients.
    model = preset("llama-13b")
    with pytest.raises(NothingFitsError, match=r"no number of devices would do.* cut the model \(--tp, --pp"):
        plan(model, cluster, workload, emit=lambda each: EMITTERS["megatron-lm"](each, model))


def test_where_nothing_fits_the_host_s_memory_is_searched_too() -> None:
    """Layouts that exceed a machine's memory are left out; the optimum is that of brute force."""
    model, without = small_model(4, 1024), small_cluster(4, memory_bytes=1.65e9)
    workload = Workload(seq_len=256, global_batch_tokens=256 * 4 * 2, micro_batch=1)
    options = Options(splits="none", max_simulations=None, front=0)
    with pytest.raises(NothingFitsError, match="the smallest is node="):
        search(model, without, workload, options=replace(options, host="none"))
    every = [
        simulate(model, without, f"host={host},node={stage};step={step}", workload.fixed(1, recomputation))
        for host, stage in product(("1", "2", "3", "3d"), ("0", "1", "2", "3", "3k", "3d", "3dk"))
        for step in ("host", "device")
        for recomputation in Recomputation
    ]
    for machine_bytes in (None, 1.2e9):
        cluster = replace(without, host_memory_bytes=machine_bytes)
        found, _ = search(model, cluster, workload, options=options)
        there = [replace(one, machine_limit_bytes=cluster.host_limit_bytes) for one in every]
        assert found.best.step_s == pytest.approx(min(one.step_s for one in there if one.fits), rel=1e-9)
        assert found.gap == 0.0 and found.best.host_memory_bytes > 0
        crowded = [one for one in there if one.memory.total <= one.memory_limit_bytes and not one.fits]
        assert bool(crowded) == (machine_bytes is not None)


def test_another_engine_s_offload_is_searched_as_far_as_it_goes() -> None:
    model, cluster = small_model(4, 1024), small_cluster(4, memory_bytes=1.65e9)
    workload, found = Workload(seq_len=256, global_batch_tokens=256 * 4 * 2), {}
    for engine in ("fsdp2", "deepspeed"):
        planned = plan(model, cluster, workload, emit=lambda each, emit=EMITTERS[engine]: emit(each, model))
        found[engine] = {choice.simulation.strategy for choice in planned.candidates}
    assert all(re.fullmatch("host=3,node=3k?|host=3d,node=3dk?", name) for name in found["fsdp2"])
    assert found["fsdp2"] and {"host=3,node=3"} <= found["deepspeed"] <= {
        "host=1,node=1",
        "host=2,node=2",
        "host=2,node=3",
        "host=3,node=3",
    }
    with pytest.raises(NothingFitsError, match="under no strategy: the smallest is node="):
        plan(model, cluster, workload, emit=lambda each: EMITTERS["megatron-fsdp"](each, model))
    with pytest.raises(NothingFitsError, match=r"in the host's memory are not searched for engine fsdp$"):
        search(model, small_cluster(4, memory_bytes=1.0e9), workload, engine="fsdp")
    with pytest.raises(NothingFitsError, match=r"not searched for processors, whose memory is the host's$"):
        search(model, on_cores(small_cluster(4, memory_bytes=0.1e9)), workload)


def test_a_large_model_is_trained_on_one_small_device_from_the_host_s_memory() -> None:
    """The device holds two blocks at a time, with the embedding and the head."""
    cluster = replace(find_cluster("rtx4090-8x-10g").take(1), host_memory_bytes=256e9)
    workload = Workload(seq_len=2048, global_batch_tokens=1 << 13)
    found, _ = search(preset("llama-13b"), cluster, workload)
    strategy = found.best.candidate.strategy
    assert strategy.host.shards_params
    (choice,) = simulate_choices(preset("llama-13b"), cluster, workload, strategy)
    block, ends = 317e6, 2 * 164e6
    gathered, grads = 2 * (2 * block + ends), 4 * (2 * block + ends)  # one is reduced, the sum so far comes up
    assert choice.simulation.fits
    assert choice.simulation.memory.buffers == pytest.approx(gathered + grads, rel=0.02)


def test_a_large_model_on_small_devices_takes_what_a_machine_has_of_memory() -> None:
    """Where something fits without the host it is searched only if asked for, and not recommended for nothing.

    With 128 GB llama-7b takes host=2: `tests/pure/cli/test_plan.py`."""
    small = find_cluster("rtx4090-8x-10g").take(4)
    workload = Workload(seq_len=2048, global_batch_tokens=1 << 16, recomputation=Recomputation.FULL)
    options, answers = Options(splits="none"), {}
    for name, machine_bytes in (("llama-7b", 96e9), ("llama-13b", 256e9)):
        machine = replace(small, host_memory_bytes=machine_bytes)
        planned = plan(preset(name), machine, workload, options=options, robust=False)
        best, strategy = planned.best.simulation, planned.best.candidate.strategy
        answers[name, machine_bytes] = best.strategy.partition(",")[0]
        assert best.fits and machine_bytes * 0.7 < best.machine_memory_bytes < machine_bytes * 0.95
        (choice,) = simulate_choices(preset(name), small, workload, strategy)
        assert choice.simulation.step_s == best.step_s
        assert strategy.step == "device" and abs(planned.host_s) / best.step_s < 0.02  # four ranks share one memory
        assert [reason.strategy for reason in planned.why][-1].startswith(f"host={strategy.host.value},node=3")
    assert [*answers.values()] == ["host[90%]=1", "host=3"]
    with pytest.raises(
        NothingFitsError,
        match=r"llama-13b fits on 4 x RTX-4090.* is node=3,.*would fit with 234.3 GB of a machine's memory, of which "
        r"121.6 GB are usable \(95% of 128 GB\)$",
    ):
        plan(preset("llama-13b"), replace(small, host_memory_bytes=128e9), workload, options=options)
    # A given strategy that exceeds the machine's memory: its smallest choice is shown, not the fastest.
    less, given = replace(small, host_memory_bytes=32e9), Strategy.parse("host=2,node=3,cluster=0")
    (smallest,) = simulate_choices(preset("llama-7b"), less, workload, given, top=2)
    assert not smallest.simulation.fits and smallest.candidate.micro_batch == 1
    one = small_cluster(4, memory_bytes=2.0e9)
    found, _ = search(small_model(), one, WORKLOAD, options=options)
    assert {estimate.candidate.strategy.host for estimate in found.ranked} == {Stage.ZERO}
    planned = plan(small_model(), one, WORKLOAD, options=replace(options, host="any"), robust=False)
    assert planned.best.candidate.strategy.host is Stage.ZERO and planned.host_s == 0.0
    assert planned.found.searched == 5 * found.searched


@pytest.mark.parametrize(
    ("tokens", "micro_batch", "message"),
    [
        (256 * 16 * 4 + 1, None, "not a multiple of the sequence length 256; the nearest are 16384 and 16640 tokens"),
        (
            256 * 24,
            None,
            "24 sequences cannot be divided evenly among 16 devices.*25.0% of all device time.*4096 and 8192 tokens",
        ),
        (256 * 8, None, "the nearest batches that divide are 4096 tokens"),
        (
            256 * 16 * 6,
            4,
            "6 sequences per step, which is not a multiple of micro_batch 4; the nearest that divide are 2 and",
        ),
    ],
)
def test_batches_that_do_not_divide(tokens: int, micro_batch: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        work = Workload(seq_len=256, global_batch_tokens=tokens, micro_batch=micro_batch)
        search(small_model(), small_cluster(4, 4), work)


def test_a_plan_is_a_value_that_reads_itself() -> None:
    """This holds for given choices too, and for a model of blocks alone, as nn.Sequential of equal layers: its root has
    no parameters, and no block takes its place."""
    planned = plan(small_model(), small_cluster(4, 4), WORKLOAD)
    again = Plan.from_json(planned.plan.to_json())
    assert again == planned.plan
    assert again.micro_batch * again.micro_batches == 2
    assert again.master_dtype == "fp32"
    assert planned.plan.predicted is not None
    assert planned.plan.predicted["step_s"] == planned.best.simulation.step_s
    workload = replace(WORKLOAD, global_batch_tokens=256 * 64, micro_batch=2, recomputation=Recomputation.SELECTIVE)
    found, _ = search(rootless_model(), TIGHT, workload)
    choices = {(each.candidate.micro_batch, each.candidate.recomputation) for each in found.ranked}
    assert choices == {(2, Recomputation.SELECTIVE)}
    units, _ = schedule_units(rootless_model(), workload.fixed(2, Recomputation.SELECTIVE))
    assert [(unit.name, unit.buffers) for unit in units[:1]] == [("", ())] and len(units) == 1 + 4


@pytest.mark.parametrize("memory_bytes", [8e9, 2.05e9])
@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "node=3,cluster=3k@int8/"])
def test_the_fastest_choices_of_a_strategy_come_first(strategy: str, memory_bytes: float) -> None:
    """Where the wire is the bound, the choice of the lowest bound is not always the fastest."""
    cluster = small_cluster(4, 4, memory_bytes=memory_bytes, outer_bytes_per_s=0.2e9)
    workload = replace(WORKLOAD, global_batch_tokens=256 * 16 * 8)
    every = [
        simulate(small_model(), cluster, strategy, workload.fixed(size, recomputation))
        for size, recomputation in product((1, 2, 4, 8), Recomputation)
    ]
    fitting = sorted(one.step_s for one in every if one.fits)
    assert (3 < len(fitting) < len(every)) == (memory_bytes < 8e9)
    for top in (1, 3):
        found = simulate_choices(small_model(), cluster, workload, Strategy.parse(strategy), top=top)
        assert [choice.simulation.step_s for choice in found] == fitting[:top]
    tight = replace(cluster, device=replace(cluster.device, memory_bytes=1e9))
    (smallest,) = simulate_choices(small_model(), tight, workload, Strategy.parse(strategy), top=3)
    assert smallest.simulation.memory.total == min(one.memory.total for one in every)


def test_known_strategies_go_by_levels_of_several_members() -> None:
    cluster = find_cluster("a800-8x-hdr").take(8)
    planned = plan(small_model(), cluster, Workload(seq_len=256, global_batch_tokens=256 * 64))
    chosen = [reason for reason in planned.why if reason.outcome == "chosen"]
    best = next(term.stage.value for term in planned.plan.strategy.axes if term.name == "node")
    known = {"1": "ZeRO-1", "2": "ZeRO-2", "3": "ZeRO-3 / FSDP"}
    assert [reason.name for reason in chosen] == [known[best]] if best in known else not chosen
    assert all(reason.strategy.endswith("cluster=0") for reason in planned.why)
    # Groups are of the outermost level with several members.
    cluster = find_cluster("frontier-mi250x").take(8)
    inner, middle, outer = cluster.levels
    sizes = [(replace(inner, size=2), replace(middle, size=4), replace(outer, size=1))]
    sizes += [(replace(inner, size=2), replace(middle, size=1), replace(outer, size=4))]
    found = [str(known_strategies(replace(cluster, levels=levels))["MiCS over 2"]) for levels in sizes]
    names = [level.name for level in cluster.levels]
    assert found[0] == f"{names[0]}=3,{names[1]}[2]=3,{names[1]}[*]=0,{names[2]}=0"
    assert found[1] == f"{names[0]}=3,{names[1]}=0,{names[2]}[2]=3,{names[2]}[*]=0"


def test_sums_and_masters_of_fp64_are_fp64() -> None:
    """As the engine has them, whichever are asked for."""
    works = [replace(WORKLOAD, param_dtype=dtype).fixed(1, Recomputation.NONE) for dtype in ("fp64", "fp32")]
    assert (works[0].grad_dtype, works[0].master_dtype) == ("fp64", "fp64")
    double, single = (simulate(small_model(), small_cluster(2, 2), "node=1,cluster=1", w).memory for w in works)
    assert double.grads == 2 * single.grads and double.optimizer == 2 * single.optimizer


def test_the_why_agrees_with_the_numbers() -> None:
    cluster = find_cluster("a800-8x-hdr").take(64)
    planned = plan(preset("llama-13b"), cluster, Workload(seq_len=4096, global_batch_tokens=4096 * 64 * 4), within=0)
    names = {reason.name for reason in planned.why}
    assert {"runner-up", "ZeRO-1", "ZeRO-2", "ZeRO-3 / FSDP", "HSDP", "ZeRO++ hpZ", "ZeRO++"} <= names
    best = planned.best.simulation
    for reason in planned.why:
        if reason.outcome == "slower":
            assert reason.step_s is not None
            assert reason.step_s >= best.step_s
            paid = sum(seconds for _, seconds in reason.loses)
            assert paid == pytest.approx(reason.step_s - best.step_s, abs=0.02 * best.step_s)
        elif reason.outcome == "excluded" and "does not fit" in reason.text:
            assert reason.memory_bytes > planned.limit_bytes
            assert reason.step_s is None
    zero_1 = next(reason for reason in planned.why if reason.name == "ZeRO-1")
    assert zero_1.outcome == "excluded"
    front = [(point.memory_bytes, point.step_s) for point in planned.found.front]
    assert len(front) >= 3 and front == sorted(front)
    assert [step for _, step in front] == sorted((step for _, step in front), reverse=True)
    assert planned.found.front[-1].step_s == planned.found.best.step_s


def test_other_engines_are_planned_without_a_proof() -> None:
    """Their collectives span several axes at once: bounds axis by axis do not hold, compute alone does."""
    cluster = small_cluster(4, 4, outer_bytes_per_s=2e9)
    found, evaluator = search(small_model(), cluster, WORKLOAD, engine="fsdp")
    assert evaluator.simulation(found.best.candidate).engine == "fsdp"
    assert found.bound_s <= evaluator.simulation(found.best.candidate).compute_s
    with pytest.raises(InputError, match="the bounds do not hold for fsdp"):
        search(small_model(), cluster, WORKLOAD, engine="fsdp", options=Options(max_simulations=None))
