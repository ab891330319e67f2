"""Differences of the engines of published tables, seen from outside; and the host that issues transfers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.pure.planner.setups import small_cluster, small_model
from zeromesh.cluster.catalogue import find_cluster, preset
from zeromesh.cluster.cluster import Cluster
from zeromesh.collectives.ho_ring.cost import overlapped_cost
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.model.presets import preset as model_preset
from zeromesh.parallel import Parallel
from zeromesh.schedule.memory import part_numel
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.unit import FlatBuffer, Role, Unit
from zeromesh.simulator.chains import Chains
from zeromesh.simulator.clock import ClockBackend, HostSeconds
from zeromesh.simulator.division import Division
from zeromesh.simulator.mechanics import Mechanics, find_engine
from zeromesh.simulator.result import Simulation
from zeromesh.simulator.run import Setup, simulate
from zeromesh.simulator.workload import FixedWorkload
from zeromesh.strategy import Layout
from zeromesh.trace import Event

A800 = preset("a800-8x-hdr")
ON_CORES = replace(A800, device=replace(A800.device, cores=64.0))
"""Which exchange messages, so that levels overlap."""
LLAMA = model_preset("llama-7b")
WORK = FixedWorkload(seq_len=4096, global_batch_tokens=4096 * 64)


@pytest.mark.parametrize(
    ("engine", "strategy", "expected"),
    [
        # Ours goes axis by axis, and sums over several replicated levels level by level; others at once.
        ("zeromesh", "node=3,cluster=3", "node gather, cluster gather, node reduce, cluster reduce"),
        ("zeromesh", "node=0,cluster=0", "node reduce, cluster sum, node reduce gather"),
        ("fsdp", "node=3,cluster=3", "node+cluster gather, node+cluster reduce"),
        ("fsdp", "node=3,cluster=0", "node gather, node reduce, cluster sum"),
        ("amsp", "node=1,cluster=0", "node+cluster sum, node broadcast"),  # from owners
        *((engine, "node=0,cluster=0", "node+cluster sum") for engine in ("fsdp", "deepspeed", "amsp")),
    ],
)
def test_collectives_of_an_engine(engine, strategy, expected):
    names = {
        "gather": "unshard all_gather",
        "reduce": "reduce reduce_scatter",
        "sum": "reduce all_reduce",
        "reduce gather": "reduce all_gather",
        "broadcast": "refresh broadcast",
    }
    found = simulate(LLAMA, A800.take(64), strategy, WORK, engine=engine, record=True)
    assert found.trace is not None and found.strategy == strategy
    events = {(event.axis, event.name) for event in found.trace.events if event.kind == "communicate"}
    pairs = (each.split(" ", 1) for each in expected.split(", "))
    assert events == {(axis, names[name]) for axis, name in pairs}


def test_a_strategys_collective_option_is_honoured():
    """Overlapped levels take no longer and send the same; a flat ring no less than its share on each axis."""
    (flat, joint), (_, paired), (_, in_turn) = (
        (found, {e.axis for e in found.trace.events if e.kind == "communicate"})
        for cluster, c in ((A800, "flat"), (ON_CORES, "ho_ring"), (A800, "ho_ring"))
        if (found := simulate(LLAMA, cluster.take(64), f"node=3,cluster=3;collective={c}", WORK, record=True)).trace
    )
    assert joint == paired == {"node+cluster"}
    assert in_turn == {"node", "cluster"}  # as the engine does where ranks exchange no messages
    sent = {axis.axis: axis.bytes_sent_per_device for axis in flat.axes}
    gathers_and_reductions = 2 * LLAMA.num_params * 63 / 64 * 3
    assert sum(sent.values()) == pytest.approx(gathers_and_reductions, rel=0.1)
    assert sent["cluster"] == pytest.approx(sum(sent.values()) / 8)
    three = "node[4]=3,node[2]=2,cluster=2"
    for strategy in ("node=3,cluster=3", "node=3,cluster=3k", "node=2,cluster=2", three):
        plain, ho_ring = (
            simulate(LLAMA, ON_CORES.take(64), strategy + option, WORK) for option in ("", ";collective=ho_ring")
        )
        assert [a.bytes_sent_per_device for a in ho_ring.axes] == [a.bytes_sent_per_device for a in plain.axes]
        # With three axes one waits in the lane of the other two; level by level each has a lane of its own.
        assert ho_ring.step_s <= plain.step_s * (1.01 if strategy is three else 1 + 1e-9)


def test_overlapped_reductions_have_the_slices_that_the_engine_has():
    """16 GB in fp32 on 4 x 4 ranks, in messages: shards of 1 GiB, whose slices of 1 MiB the workspace shortens."""
    cluster = small_cluster(4, 4)
    cluster = replace(cluster, device=replace(cluster.device, cores=1.0))
    assert cluster.messages
    constants = default_constants()
    model = TransferModel(cluster, constants, ComputeModel(device=cluster.device, constants=constants))
    flat = FlatBuffer(numel=1 << 32, param_dtype="fp32", master_dtype="fp32")
    layout = Layout.of("node=2,cluster=2;collective=ho_ring", cluster.axes)
    schedule = Schedule.of(layout, [Unit(name="block", role=Role.BLOCK, buffers=(flat,))])
    ((lane, (work,)),) = Chains(schedule, find_engine("zeromesh"), model).chain("reduce", 0)
    assert lane == "reduce/node+cluster"
    major, minor = (model.cost(step) for step in schedule.placed[0][0].routes["reduce"].steps)
    slices = -(-(1 << 28) // part_numel(8 << 20, 4, 4, terms=4 * 15, longest_bytes=1 << 20))
    assert slices > 1024
    assert work.cost == overlapped_cost(major, minor, slices)


def test_levels_overlap_where_nothing_is_copied_between_them():
    def events(strategy: str) -> list[Event]:
        result = simulate(LLAMA, ON_CORES.take(64), f"{strategy};collective=ho_ring", WORK, record=True)
        assert result.trace is not None
        return [event for event in result.trace.events if event.kind == "communicate"]

    gathers, reductions = ("unshard all_gather", "node+cluster"), ("reduce reduce_scatter", "node+cluster")
    for strategy, expected in (
        ("node=3,cluster=3", {gathers, reductions}),
        ("node=3@int8/,cluster=3", {reductions}),
        ("node=3@/int4,cluster=3", {gathers}),
    ):
        assert {(e.name, e.axis) for e in events(strategy) if "+" in e.axis} == expected
    # The copy that is kept lies between the two gathers of a block; root, embedding and head keep none.
    blocks = {e.axis for e in events("node=3,cluster=3k") if e.name == gathers[0] and "layers" in e.unit}
    assert blocks == {"node", "cluster"}


CLUSTER = find_cluster("a800-8x-hdr").take(16)
OURS = find_engine("zeromesh")


def simulated(
    strategy: str,
    issue_s: float,
    cluster: Cluster = CLUSTER,
    *,
    micro_batches: int = 3,
    record: bool = False,
    engine: Mechanics = OURS,
) -> Simulation:
    constants = default_constants().at("host_issue_s", issue_s)
    work = FixedWorkload(seq_len=512, global_batch_tokens=512 * cluster.world * micro_batches)
    return simulate(small_model(12), cluster, strategy, work, engine=engine, constants=constants, record=record)


def stood_still(simulation: Simulation) -> float:
    return sum(seconds for axes, _, seconds in simulation.exposed if axes == "host")


def test_a_host_is_ahead_of_its_device_by_what_is_queued_and_no_more() -> None:
    clock = backend(HostSeconds(issue=0.25, ahead=1.0))
    clock.begin_step()
    clock.unshard(1, from_kept=False, after=None)
    assert clock.now_s == 0.25  # abreast as the step begins
    clock.compute("forward", 1, 10.0)
    begun_s = clock.now_s
    for expected_s in (0.0, 0.0, 0.0, 0.0, 0.25, 0.5):
        clock.unshard(1, from_kept=False, after=None)
        assert clock.now_s - begun_s == pytest.approx(expected_s)
    assert clock.totals.exposed_s["host", "issue"] == pytest.approx(0.75)


def backend(host: HostSeconds) -> ClockBackend:
    work = FixedWorkload(seq_len=512, global_batch_tokens=512 * 16)
    division = Division.of(small_model(4), CLUSTER, Parallel(), seq_len=512)
    setup = Setup.of(division, division.parts[0], "node=3,cluster=1", work, "zeromesh", None)
    chains = Chains(setup.schedule, setup.mechanics, setup.transfers)
    return ClockBackend(chains, record=False, host=host)


@pytest.mark.parametrize("engine", [OURS, replace(OURS, overlap_boundary=False)], ids=["overlapping", "deferring"])
@pytest.mark.parametrize("strategy", ["node=0", "node=1", "node=2", "node=3", "node=3d"])
def test_a_step_takes_as_long_as_its_host(strategy: str, engine: Mechanics) -> None:
    """Where nothing else takes long: of all transfers of the step."""
    node = CLUSTER.take(8)
    before, short = (simulated(f"{strategy},cluster=0", issue_s, node, engine=engine) for issue_s in (0.0, 1e-6))
    assert stood_still(before) == 0.0
    assert before.step_s <= short.step_s <= before.step_s + 50e-6
    long = simulated(f"{strategy},cluster=0", 0.1, node, record=True, engine=engine)
    assert long.trace is not None
    sent = sum(event.kind == "communicate" for event in long.trace.events)  # one a transfer, on one level
    assert sent * 0.1 <= long.step_s <= sent * 0.1 + before.step_s
    assert stood_still(long) == pytest.approx(sent * 0.1, rel=0.02)


@pytest.mark.parametrize("strategy", ["node=3,cluster=0", "node=3,cluster=3"])
def test_a_device_that_stands_still_for_the_host_does_so_at_each_gather(strategy):
    """A block of llama-7b has 202 M elements, five gathers of at most 5e7; embedding and head three each, norms one."""
    engine = find_engine("deepspeed")
    steps = [
        simulate(LLAMA, A800.take(64), strategy, WORK, engine=replace(engine, host_gather_s=host)).step_s
        for host in (0.0, 1e-3)
    ]
    forward_and_back = (32 * 5 + 2 * 3 + 1) + 30 * 5  # the last two blocks are still there
    assert steps[1] - steps[0] == pytest.approx(1e-3 * forward_and_back * WORK.micro_batches(64), rel=0.02)
