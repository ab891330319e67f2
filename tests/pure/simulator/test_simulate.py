from collections import defaultdict
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.planner.setups import frozen, frozen_first_model, small_model
from zeromesh.cluster.catalogue import preset
from zeromesh.cluster.device import Kernel
from zeromesh.cost.constants import default_constants
from zeromesh.errors import ConfigError, InputError, MeshError, NotationError
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.spec import Recomputation, UnitKind
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.step import sent_bytes_per_axis
from zeromesh.simulator.mechanics import ENGINES
from zeromesh.simulator.run import simulate
from zeromesh.simulator.units import schedule_units
from zeromesh.simulator.workload import FixedWorkload
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.parts import layouts_of

GPT2 = model_preset("gpt2")
LLAMA = model_preset("llama-7b")
A800 = preset("a800-8x-hdr")
STRATEGIES = ["node=0,cluster=0", "node=1,cluster=0", "node=2,cluster=2", "node=3,cluster=3", "node=3d,cluster=1"]
STRATEGIES += ["node=3,cluster=3k", "node[4]=3,node[2]=1,cluster=0", "node=3@int8/int4,cluster=3k@int8/int4"]


def work(micro_batches: int = 2, world: int = 16, seq_len: int = 512, **fields) -> FixedWorkload:
    return FixedWorkload(seq_len=seq_len, global_batch_tokens=seq_len * world * micro_batches, **fields)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recomputation", [Recomputation.NONE, Recomputation.FULL])
def test_bytes_on_every_axis_are_the_schedules(strategy, recomputation):
    """The schedule's own count is tested against the table of the notation; the simulator must not drop or repeat."""
    cluster, workload = A800.take(16), work(3, recomputation=recomputation)
    simulated = simulate(GPT2, cluster, strategy, workload)
    schedule = Schedule.of(Layout.of(strategy, cluster.axes), schedule_units(GPT2, workload)[0])
    expected = sent_bytes_per_axis(schedule, micro_batches=3, recompute=recomputation is Recomputation.FULL)
    assert {a.axis: a.bytes_sent_per_device for a in simulated.axes} == pytest.approx(expected)


@pytest.mark.parametrize(
    "strategy",
    [
        "host=1,node=3,cluster=1",
        "host=2,node=1,cluster=0",
        "host=3,node=3,cluster=3h",
        "host=1,node=3,cluster=1;step=device",
        "host=3,node=3,cluster=1;step=device",
    ],
)
def test_shards_in_the_host_s_memory(strategy):
    """Bytes and memory are the schedule's; the step on the host is its memory's, which eight ranks share."""
    cluster, workload = A800.take(16), work(3)
    found, plain = (simulate(GPT2, cluster, each, workload) for each in (strategy, strategy.split(",", 1)[1]))
    schedule = Schedule.of(Layout.of(strategy, cluster.axes), schedule_units(GPT2, workload)[0], messages=False)
    lines = sent_bytes_per_axis(schedule, micro_batches=3)
    sent = {axis.axis: axis.bytes_sent_per_device for axis in found.axes}
    assert sent.pop("host") == pytest.approx(lines.pop("host up") + lines.pop("host down"))
    assert sent == pytest.approx(lines)
    trained = sum(p.padded for unit in schedule.placed for p in unit) / (8 if "cluster=0" in strategy else 16)
    assert schedule.memory.host is not None
    assert found.host_memory_bytes == schedule.memory.host.total_bytes + 2 * 4 * trained
    assert found.memory.optimizer == 0 and found.memory.total < plain.memory.total
    with pytest.raises(NotationError, match="not predicted for engine fsdp"):
        simulate(GPT2, cluster, strategy, workload, engine="fsdp")


@pytest.mark.parametrize("rate", [1e11, 3e12, 1e13])
def test_the_step_on_the_host_is_hidden_under_the_next_forward(rate):
    """But for the unit of which most is left when the forward comes to it, with those stepped on before."""
    machine = replace(A800.take(1), host_step_bytes_per_s=rate, host_copy_bytes_per_s=1e16)
    found = simulate(GPT2, machine, "host=1,node=0", work(2, world=1), record=True)
    assert found.trace is not None
    seconds = {name: defaultdict[str | None, float](float) for name in ("step", "forward")}
    for event in found.trace.events:
        if event.micro_batch <= 0 and event.name in seconds:
            seconds[event.name][event.unit] += event.end_s - event.start_s
    assert sum(seconds["step"].values()) == pytest.approx(30 * GPT2.num_params / rate, rel=1e-3)
    # The root comes first, and computes last.
    before = accumulate((seconds["forward"][unit] * (unit != "") for unit in seconds["step"]), initial=0.0)
    late = max(step - forward for step, forward in zip(accumulate(seconds["step"].values()), before, strict=False))
    exposed = sum(seconds for axes, name, seconds in found.exposed if name == "step")
    assert exposed == pytest.approx(late, rel=1e-3)


@pytest.mark.parametrize("recomputation", list(Recomputation))
def test_what_comes_before_all_that_trains_has_no_backward(recomputation):
    """Its parameters are gathered in forwards alone."""
    model, cluster = frozen_first_model(), A800.take(16)
    workload = work(2, recomputation=recomputation)
    ahead = {unit.name for unit in model.units if not unit.returned}
    assert ahead == {"model.embed_tokens", "model.layers.0"}
    units, specs = schedule_units(model, workload)
    schedule = Schedule.of(Layout.of("node=3,cluster=3", cluster.axes), units)
    plain, less = (
        sent_bytes_per_axis(schedule, micro_batches=2, recompute=recomputation is Recomputation.FULL, returned=returned)
        for returned in (lambda unit: True, lambda unit: specs[unit][0].returned)
    )
    gathered = sum(t.sent_bytes for placed in schedule.placed[2] for t in placed.routes["unshard"].steps)
    assert sum(plain.values()) - sum(less.values()) == 2 * 4 * gathered
    found = simulate(model, cluster, "node=3,cluster=3", workload)
    assert {axis.axis: axis.bytes_sent_per_device for axis in found.axes} == pytest.approx(less)
    trained = simulate(small_model(6), cluster, "node=3,cluster=3", workload)
    assert found.compute_s < 0.75 * trained.compute_s and found.memory.activations < trained.memory.activations


def test_a_tied_embedding_that_trains_brings_the_backward_to_all_blocks():
    tied = small_model(6, tied=True)
    blocks_frozen = [frozen(unit) if unit.kind is UnitKind.BLOCK else unit for unit in tied.units]
    assert all(unit.returned for unit in replace(tied, units=tuple(blocks_frozen)).units)
    whole = replace(tied, units=tuple(frozen(unit) for unit in tied.units[:1]) + tied.units[1:])
    assert all(unit.returned for unit in whole.units if unit.kind is UnitKind.BLOCK)


PARTS = (
    "node=3,cluster=1 | *.attn: node=0,cluster=3d | *.h.[0-3].mlp: node=3,cluster=3 | transformer.wte: node=1,cluster=0"
)


def test_bytes_of_parts_are_their_schedules():
    cluster, workload = A800.take(16), work(3)
    simulated, layouts = simulate(GPT2, cluster, PARTS, workload), layouts_of(Strategy.parse(PARTS), cluster.axes, {})
    units, _ = schedule_units(GPT2, workload, parts=tuple(layouts)[1:])
    schedule = Schedule.of(layouts.pop(""), units, parts=layouts, messages=cluster.messages)
    sent = {axis.axis: axis.bytes_sent_per_device for axis in simulated.axes}
    assert sent == pytest.approx(sent_bytes_per_axis(schedule, micro_batches=3))
    assert all(sent[name] > 0 for name in ("*.attn:cluster", "*.h.[0-3].mlp:node", "transformer.wte:node"))
    held = [simulate(GPT2, cluster, text, workload).memory for text in ("node=3,cluster=3", "node=0,cluster=0", PARTS)]
    assert held[0].params < held[2].params < held[1].params and held[0].optimizer < held[2].optimizer
    whole, same = (
        simulate(GPT2, cluster, f"node=3,cluster=1{more}", workload) for more in ("", "|*.mlp:node=3,cluster=1")
    )
    assert same.memory.params == pytest.approx(whole.memory.params, rel=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_skipping_equal_micro_batches_is_exact(strategy, engine):
    """With a host that takes no time for a transfer, some, and more than anything else."""
    issue_s = (0.0, 1e-4, 1e-2)[(STRATEGIES.index(strategy) + sorted(ENGINES).index(engine)) % 3]
    constants = default_constants().at("host_issue_s", issue_s)
    skipped, whole = (
        simulate(GPT2, A800.take(16), strategy, work(7), engine=engine, constants=constants, record=record)
        for record in (False, True)
    )
    assert skipped.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert skipped.exposed_comm_s == pytest.approx(whole.exposed_comm_s, abs=1e-9)
    assert [s for _, _, s in skipped.exposed] == pytest.approx([s for _, _, s in whole.exposed], rel=1e-6)
    sent, expected = ([axis.bytes_sent_per_device for axis in each.axes] for each in (skipped, whole))
    assert sent == pytest.approx(expected)
    assert skipped.memory == whole.memory


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_less_overlap_never_helps(strategy):
    cluster, workload = A800.take(16), work()
    steps = [simulate(GPT2, cluster, f"{strategy};overlap={o}", workload).step_s for o in ("all", "gather", "none")]
    # Contention ends with the overlap, so the device may compute faster, never finish sooner than with its waits.
    assert steps[0] <= steps[1] * (1 + 1e-9) <= steps[2] * (1 + 2e-9)


@settings(max_examples=60)
@given(
    st.sampled_from([*STRATEGIES, "node=2@/int4,cluster=0@/int8"]),
    st.sampled_from(sorted(ENGINES)),
    st.sampled_from([GPT2, frozen_first_model()]),
    st.sampled_from(["bandwidth", "latency", "products", "memory"]),
    st.integers(0, 1),
    st.floats(1.1, 20),
    st.integers(1, 3),
    st.sampled_from([None, 1.0]),
)
def test_faster_hardware_never_slows_a_step(strategy, engine, model, what, index, factor, micro_batches, cores):
    """But for other transfers that computation meets because it ends sooner."""
    cluster, workload = A800.take(16), work(micro_batches)
    cluster = replace(cluster, device=replace(cluster.device, cores=cores))
    device, level = cluster.device, cluster.levels[index]
    match what:
        case "bandwidth":
            level = replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * factor)
        case "latency":
            level = replace(level, latency_s=level.latency_s / factor)
        case "products":
            rates = {name: rate * factor for name, rate in dict(device.achievable_flops).items()}
            device = replace(device, peak_flops=rates, achievable_flops=rates)
        case "memory":
            device = replace(device, memory_bytes_per_s=device.memory_bytes_per_s * factor)
    levels = tuple(level if i == index else lv for i, lv in enumerate(cluster.levels))
    before = simulate(model, cluster, strategy, workload, engine=engine).step_s
    faster = replace(cluster, levels=levels, device=device)
    assert simulate(model, faster, strategy, workload, engine=engine).step_s <= before * 1.001


PAPERS = """
llama-7b node=0,cluster=0 107.8              | llama-7b node=1,cluster=0 37.06
llama-7b node=3,cluster=0 13.48              | llama-13b node[4]=3,node[2]=1,cluster=0 32.54
llama-7b node=3,cluster[4]=1,cluster[*]=0 5.90  | llama-7b node=3,cluster[4]=3,cluster[*]=0 3.37
llama-7b node=2,cluster[4]=1,cluster[*]=0 17.69 | llama-7b node=3d,cluster[4]=1,cluster[*]=0 17.69
llama-65b node=3,cluster[4]=1,cluster[*]=0 57.13 | llama-65b node=3,cluster=0 130.6
"""


@pytest.mark.parametrize("row", PAPERS.replace("\n", "|").strip("|").split("|"))
def test_model_state_is_the_papers_formula(row):
    """(2/s_p + 2/s_g + 12/s_os) * parameters with bf16 gradients: papers' table, to the last digit shown."""
    model, strategy, state_gb = row.split()
    memory = simulate(model_preset(model), A800.take(64), strategy, work(1, 64, 512, grad_dtype="bf16")).memory
    state = memory.params + memory.grads + memory.optimizer
    assert state / 1e9 == pytest.approx(float(state_gb), abs=0.525 * 10 ** -len(state_gb.split(".")[1]))


def test_recomputation_trades_memory_for_time():
    cluster = A800.take(16)
    none, selective, full = (
        simulate(LLAMA, cluster, "node=3,cluster=1", work(1, 16, 2048, recomputation=r)) for r in Recomputation
    )
    assert none.memory.activations > selective.memory.activations > full.memory.activations
    assert none.step_s < selective.step_s < full.step_s
    assert 0.7 > none.mfu > full.mfu > 0.3
    # Where the head's backward is the peak: all that was saved, its own working set, and its weight's gradient.
    workload = work(1, 16, 2048, recomputation=Recomputation.FULL)
    found = simulate(LLAMA, A800.take(16), "node=3,cluster=1", workload).memory.activations
    *_, head = LLAMA.units
    saved = LLAMA.saved_activation_bytes(2048, Recomputation.FULL) + head.activations.working.at(2048)
    assert found == pytest.approx(2048 * saved + 2 * head.num_params)
    assert 2048 * LLAMA.peak_activation_bytes(2048, Recomputation.FULL) == pytest.approx(2048 * saved)


def test_the_trace_holds_the_step():
    result, again = (simulate(GPT2, A800.take(16), "node=3,cluster=1", work(2), record=True) for _ in range(2))
    assert result == again
    assert result.compute_s + result.exposed_comm_s == pytest.approx(result.step_s)
    assert result.tokens_per_s_per_device == pytest.approx(2 * 512 / result.step_s)
    trace = result.trace
    assert trace is not None
    assert trace.seconds(kind="compute") == pytest.approx(result.compute_s)
    assert trace.seconds(kind="wait") == pytest.approx(result.exposed_comm_s)
    for axis in result.axes:
        assert trace.sent_bytes(axis=axis.axis) == pytest.approx(axis.bytes_sent_per_device)
    assert max(size for _, size in trace.memory) == pytest.approx(result.memory.total)
    assert trace.memory[-1][1] == pytest.approx(result.memory.total - result.memory.activations)
    # A lane does one thing at a time.
    trace = simulate(LLAMA, A800.take(64), "node=3,cluster=1", work(2, 64), record=True).trace
    assert trace is not None
    lanes: dict[str, list[tuple[float, float]]] = {}
    for event in trace.events:
        if event.kind == "communicate":
            lanes.setdefault(event.resource, []).append((event.start_s, event.end_s))
    assert set(lanes) == {"refresh/cluster", "unshard/node", "reduce/node", "reduce/cluster"}
    for intervals in lanes.values():
        intervals.sort()
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(intervals))


@pytest.mark.parametrize(
    ("parts", "fields", "options", "error", "message"),
    [
        ("|*.mpl: node=0,cluster=0", {}, {}, NotationError, r"part \*\.mpl matches no module of the model"),
        ("|<Linear>: node=0,cluster=0", {}, {}, NotationError, r"part <Linear> is the modules of a class.*a pattern"),
        ("|*.mlp: node=0,cluster=0", {}, {"engine": "fsdp"}, InputError, r"cannot be predicted beside engine fsdp"),
        ("|*.mlp: node=0", {}, {}, MeshError, r"part \*\.mlp: .* gives no stage to mesh axis 'cluster'"),
        ("", {"world": 20}, {}, ConfigError, r"would last 3 micro-batches and the devices idle 17% .* 16384 or 24576"),
        ("", {"micro_batch": 0}, {}, ConfigError, "micro_batch must be at least 1"),
        ("", {}, {"engine": "fdsp"}, ConfigError, "unknown engine 'fdsp'; did you mean fsdp"),
        ("", {"optimizer": "sgd"}, {}, ConfigError, "optimizer must be one of adamw, muon; got 'sgd'"),
        ("", {"ownership": "all"}, {}, ConfigError, "ownership must be one of slices, owners; got 'all'"),
    ],
)
def test_what_is_refused(parts, fields, options, error, message):
    with pytest.raises(error, match=message):
        simulate(GPT2, A800.take(16), f"node=3,cluster=1{parts}", work(**fields), **options)


@pytest.mark.parametrize("strategy", ["node=0,cluster=0", "node=1,cluster=2"])
@pytest.mark.parametrize("recomputation", [Recomputation.NONE, Recomputation.FULL])
def test_small_units_are_joined_where_no_parameters_are_sharded(strategy, recomputation):
    """Two blocks of 14 MB fill a bucket: half the calls, the same bytes, the same computation, block by block."""
    cluster, workload = A800.take(16), work(2, recomputation=recomputation)
    apart = replace(ENGINES["zeromesh"], bucket_bytes=0)
    two, one = (simulate(GPT2, cluster, strategy, workload, engine=e, record=True) for e in ("zeromesh", apart))

    def reduced(simulated):
        events = simulated.trace.events
        return {e.unit for e in events if e.kind == "communicate" and e.name.startswith("reduce")}

    def computed(simulated, name):
        return sum(event.kind == "compute" and event.name == name for event in simulated.trace.events)

    pairs = {f"transformer.h.{i} to transformer.h.{i + 1}" for i in range(0, 12, 2)}
    assert reduced(two) == {"", *pairs}
    assert reduced(one) == {"", *(f"transformer.h.{i}" for i in range(12))}
    assert [a.bytes_sent_per_device for a in two.axes] == pytest.approx(
        [a.bytes_sent_per_device for a in one.axes], rel=1e-5
    )
    assert two.memory.activations == one.memory.activations
    gathered = (simulate(GPT2, cluster, "node=3,cluster=1", work(), engine=e) for e in ("zeromesh", apart))
    assert next(gathered) == next(gathered)  # which are never joined
    for name in ("forward", "recompute", "backward"):
        assert computed(two, name) == computed(one, name)


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "bytes_each"),
    [
        ("node=3,cluster=3", 3, 3 * (2 + 2)),  # into the slot that they are sent from, in bf16
        ("node=3@/fp32,cluster=3", 1, 2 + 4),
        ("node=1,cluster=1", 3, (2 + 4) + 2 * (2 + 4 + 4)),  # copied to the accumulator, then added to it
        ("node=1,cluster=1", 1, 2 + 2),  # alone, and so sent from there in bf16
        ("node=0,cluster=0", 1, 2 + 2),
        ("node=1@/fp32,cluster=1@/fp32", 1, 2 + 4),
    ],
)
def test_gradients_are_copied_to_where_they_are_reduced(strategy, micro_batches, bytes_each):
    """By the computation, at the rate of the device's memory or the measured one; other engines' copies are counted
    with their collectives."""
    model, cluster, workload = small_model(), A800.take(16), work(micro_batches)
    constants = default_constants()
    for name in ("channel_share", "node_passes", "card_passes"):  # else collectives slow the copies down
        constants = constants.at(name, 0.0)

    def compute_s(collects: bool, *kernels: Kernel) -> float:
        mechanics = replace(ENGINES["zeromesh"], collects=collects, workspace=False)
        measured = replace(cluster, device=replace(cluster.device, kernels=kernels))
        return simulate(model, measured, strategy, workload, engine=mechanics, constants=constants).compute_s

    moved, rate = model.num_trainable * bytes_each, cluster.device.memory_bytes_per_s * constants.memory_share
    assert compute_s(True) - compute_s(False) == pytest.approx(moved / rate, rel=1e-6)
    kernel = Kernel(kind="gradients", dtype="bf16", forward=1e9, backward=1e9)
    assert compute_s(True, kernel) - compute_s(False) == pytest.approx(moved / 1e9, rel=1e-6)
    assert [name for name, mechanics in ENGINES.items() if mechanics.collects] == ["zeromesh"]
