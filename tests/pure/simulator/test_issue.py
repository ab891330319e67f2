"""The host that issues a device's transfers: [Note: Host] of `zeromesh.simulator.clock`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.pure.planner.setups import small_model
from zeromesh.cluster import Cluster, find_cluster
from zeromesh.cost import default_constants
from zeromesh.model import preset
from zeromesh.parallel import Parallel
from zeromesh.simulator import FixedWorkload, Mechanics, Simulation, find_engine, simulate
from zeromesh.simulator.chains import Chains
from zeromesh.simulator.clock import ClockBackend, HostSeconds
from zeromesh.simulator.division import Division
from zeromesh.simulator.run import Setup

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
    names = tuple(unit.name for unit in setup.schedule.units)
    return ClockBackend(
        Chains(setup.schedule, setup.mechanics, setup.transfers), setup.mechanics, names, record=False, host=host
    )


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


def test_large_units_hide_their_host() -> None:
    """All but what is issued before the first of them computes: the first gathers."""
    work = FixedWorkload(seq_len=4096, global_batch_tokens=4096 * 16 * 8)
    steps = [
        simulate(preset("llama-7b"), CLUSTER, "node=3,cluster=3", work, constants=default_constants().at(*host))
        for host in (("host_issue_s", 0.0), ("host_issue_s", 1e-3))
    ]
    assert steps[0].step_s < steps[1].step_s < steps[0].step_s + 5e-3


def test_a_processor_issues_to_itself() -> None:
    processor = replace(CLUSTER, device=replace(CLUSTER.device, cores=1.0))
    assert simulated("node=3,cluster=1", 0.1, processor) == simulated("node=3,cluster=1", 0.0, processor)


@pytest.mark.parametrize("issue_s", [1e-4, 1e-3, 1e-2])
def test_micro_batches_repeat_with_a_host_too(issue_s: float) -> None:
    """What is skipped is what is simulated where every micro-batch is."""
    skipping, every = (
        simulated("node=3,cluster=1", issue_s, micro_batches=9, record=record) for record in (False, True)
    )
    assert skipping.step_s == pytest.approx(every.step_s, rel=1e-9)
    assert stood_still(skipping) == pytest.approx(stood_still(every), rel=1e-6)
