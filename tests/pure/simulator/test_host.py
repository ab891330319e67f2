"""Devices that move the bytes of collectives with the cores that compute: on CPU."""

import pytest

from zeromesh.cluster import Cluster, Device, Level, parse_cluster
from zeromesh.collectives.ho_ring.cost import overlapped_cost
from zeromesh.cost import CollectiveCost
from zeromesh.cost.collective import HOST
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.errors import ClusterError
from zeromesh.schedule import Transfer
from zeromesh.simulator.network import Job, Network, Work
from zeromesh.strategy import Layout


def network(cores: float | None) -> Network:
    return Network(lambda job, done, start, end: None, cores)


def started(clock: Network, *busy: tuple[tuple[int, float], ...]) -> None:
    """A job on a lane of its own for each, of no latency."""
    for number, shares in enumerate(busy):
        cost = CollectiveCost(seconds=max(s for _, s in shares), busy=shares, sent_bytes=1.0, taken=1 / 3)
        work = Work("gather", ("node",), cost, (1.0,))
        clock.submit(Job((work,), 0, 0, "unshard"), f"lane {number}")


def computed(cores: float | None, *busy: tuple[tuple[int, float], ...]) -> float:
    """What 4 s of computation take beside the jobs."""
    clock = network(cores)
    started(clock, *busy)
    clock.compute(4.0)
    return clock.now_s


def test_bytes_that_need_the_whole_processor_are_added_to_the_computation():
    assert computed(0.5, ((0, 1.0), (HOST, 1.0))) == pytest.approx(5.0)
    assert computed(1.0, ((0, 1.0), (HOST, 1.0))) == pytest.approx(5.0)


def test_a_slow_link_takes_little_of_the_processor():
    """A tenth of the processor for 2 s."""
    assert computed(0.5, ((0, 2.0), (HOST, 0.2))) == pytest.approx(4.2)


def test_computation_and_transfer_share_the_processor_alike():
    """Both want all of it: after a second either has done half a second's work."""
    clock = network(0.5)
    started(clock, ((0, 1.0), (HOST, 1.0)))
    (job,) = clock.lanes["lane 0"]
    clock.compute(0.5)
    assert clock.now_s == pytest.approx(1.0) and job.share_left == pytest.approx(0.5)
    clock.wait_for(job)
    assert clock.now_s == pytest.approx(1.5)


def test_two_transfers_on_different_levels_share_the_processor():
    clock = network(0.5)
    started(clock, ((0, 1.0), (HOST, 1.0)), ((1, 1.0), (HOST, 1.0)))
    for queue in list(clock.lanes.values()):
        clock.wait_for(queue[0]) if queue else None
    assert clock.now_s == pytest.approx(2.0)


def test_with_cores_to_spare_nothing_is_slower():
    assert computed(4.0, ((0, 1.0), (HOST, 0.25))) == pytest.approx(4.0)


def test_without_cores_it_is_as_on_a_device_of_its_own():
    assert computed(None, ((0, 1.0),)) == pytest.approx(1.0 + (4 - 1 / 1.5))


@pytest.mark.parametrize(("cores", "host", "seconds"), [(0.5, 1e9, 2.0), (4.0, 1e9, 1.0), (None, 1e9, 1.0)])
def test_a_transfer_is_no_faster_than_the_processor_moves_it(cores, host, seconds):
    """1 GB in all at 1 GB/s, with half a core that would move 1 GB/s if it were a whole one."""
    device = Device(name="cpu", memory_bytes=1e12, peak_flops={"fp32": 1e11}, cores=cores)
    level = Level(name="node", size=2, bandwidth_bytes_per_s=1e9, latency_s=0.0, kind="loopback", host_bytes_per_s=host)
    constants = default_constants()
    model = TransferModel(
        Cluster(name="c", device=device, levels=(level,)), constants, ComputeModel(device=device, constants=constants)
    )
    (axis,) = Layout.of("node=3", [("node", 2)]).axes
    found = model.cost(Transfer(operation="all_gather", axis=axis, numel=500_000_000, wire="fp32"))
    assert found.seconds == pytest.approx(seconds, rel=1e-3)
    assert (HOST in dict(found.busy)) == (cores is not None)


def test_a_call_takes_of_the_processor_and_is_part_of_the_latency():
    """Half a core: 1 ms of a call's processor time is 2 ms, more than a latency of 1 ms, less than one of 5 ms."""
    device = Device(name="cpu", memory_bytes=1e12, peak_flops={"fp32": 1e11}, cores=0.5)
    constants = default_constants()

    def gathered(latency_s: float) -> CollectiveCost:
        level = Level(
            name="node",
            size=2,
            bandwidth_bytes_per_s=1e9,
            latency_s=latency_s,
            kind="loopback",
            host_bytes_per_s=1e9,
            host_call_s=1e-3,
        )
        cluster = Cluster(name="c", device=device, levels=(level,))
        model = TransferModel(cluster, constants, ComputeModel(device=device, constants=constants))
        (axis,) = Layout.of("node=3", [("node", 2)]).axes
        return model.cost(Transfer(operation="all_gather", axis=axis, numel=500_000, wire="fp32"))

    short, long = gathered(1e-3), gathered(5e-3)
    assert dict(short.busy)[HOST] == dict(long.busy)[HOST] == pytest.approx(2e-3 + 2e-3)
    assert short.seconds == pytest.approx(2e-3 + 2e-3)
    assert long.seconds == pytest.approx(5e-3 + 2e-3, rel=0.02)  # and the launch


@pytest.mark.parametrize("host", [None, 1e9])
def test_an_operation_reaches_the_share_that_it_was_measured_to_reach(host):
    device = Device(name="cpu", memory_bytes=1e12, peak_flops={"fp32": 1e11}, cores=0.5)
    level = Level(
        name="node",
        size=2,
        bandwidth_bytes_per_s=1e9,
        latency_s=0.0,
        kind="loopback",
        host_bytes_per_s=host,
        shares={"all_reduce": 2.0, "reduce_scatter": 0.5},
    )
    constants = default_constants()
    model = TransferModel(
        Cluster(name="c", device=device, levels=(level,)), constants, ComputeModel(device=device, constants=constants)
    )
    (axis,) = Layout.of("node=3", [("node", 2)]).axes
    seconds = {
        operation: model.cost(Transfer(operation=operation, axis=axis, numel=500_000_000, wire="fp32")).seconds
        for operation in ("all_gather", "reduce_scatter", "all_reduce")
    }
    scale = 1 if host is None else 2
    assert seconds == pytest.approx({"all_gather": scale, "reduce_scatter": 2 * scale, "all_reduce": scale}, rel=1e-3)


def test_latency_is_longer_beside_computation():
    """3 ms of latency take 12 ms while the device computes, and what is left of them no longer than alone."""
    clock = network(0.5)
    cost = CollectiveCost(seconds=3e-3, busy=(), sent_bytes=1.0, busy_latency_s=9e-3)
    job = clock.submit(Job((Work("gather", ("node",), cost, (1.0,)),), 0, 0, "unshard"), "gather")
    clock.compute(8e-3)
    assert clock.now_s == pytest.approx(8e-3)
    clock.wait_for(job)
    assert clock.now_s == pytest.approx(9e-3)


def test_the_keys_of_the_file():
    text = """
    name = "c"
    [device]
    name = "cpu"
    memory = "1 GB"
    cores = 0.5
    [device.peak]
    fp32 = "1 GFLOP/s"
    [[level]]
    name = "node"
    size = 2
    bandwidth = "1 GB/s"
    latency = "1 us"
    host_rate = "2 GB/s"
    host_call = "2 ms"
    shares = { all_reduce = 1.5 }
    busy_latency = "5 us"
    """
    found = parse_cluster(text)
    assert found.device.cores == 0.5 and found.levels[0].host_bytes_per_s == 2e9
    assert found.levels[0].busy_latency_s == pytest.approx(5e-6)
    assert found.levels[0].host_call_s == pytest.approx(2e-3)
    with pytest.raises(
        ClusterError, match=r"host_call must not be negative, and goes with a host_rate; got 0\.002 s and no"
    ):
        parse_cluster(text.replace('host_rate = "2 GB/s"', ""))
    with pytest.raises(ClusterError, match="busy_latency is the latency while devices compute"):
        parse_cluster(text.replace('"5 us"', '"0 us"'))
    assert found.levels[0].share("all_reduce") == 1.5 and found.levels[0].share("all_gather") == 1.0
    with pytest.raises(ClusterError, match=r"level\[0\]\.shares\.all_reduc: unknown key; did you mean all_reduce"):
        parse_cluster(text.replace("all_reduce", "all_reduc"))
    with pytest.raises(ClusterError, match=r"device\.cores: expected a finite value above zero"):
        parse_cluster(text.replace("0.5", "0"))
    with pytest.raises(ClusterError, match=r"level\[0\]\.host_rate: expected a rate"):
        parse_cluster(text.replace('"2 GB/s"', "2"))


def model_of(**level: float) -> TransferModel:
    device = Device(name="cpu", memory_bytes=1e9, peak_flops={"fp32": 1e9}, memory_bytes_per_s=1e10, cores=0.5)
    found = Level(name="node", size=4, bandwidth_bytes_per_s=1e9, kind="loopback", **{"latency_s": 0.0, **level})
    constants = default_constants()
    cluster = Cluster(name="c", device=device, levels=(found,))
    return TransferModel(cluster, constants, ComputeModel(device=device, constants=constants))


def call(operation: str, wire: str = "fp32") -> Transfer:
    (axis,) = Layout.of("node=3", [("node", 4)]).axes
    return Transfer(operation=operation, axis=axis, numel=1_000_000, wire=wire)


@pytest.mark.parametrize("latency_s", [0.0, 1e-3])
@pytest.mark.parametrize("calls_s", [0.0, 4e-3])
def test_beside_computation_a_step_takes_what_was_measured(latency_s, calls_s):
    """Whatever it is alone: three steps of 5 ms for a ring of four ranks. A call's processor time is a part of that."""
    host = {"host_bytes_per_s": 1e8, "host_call_s": calls_s / 2} if calls_s else {}
    alone, busy = model_of(latency_s=latency_s, **host), model_of(latency_s=latency_s, busy_latency_s=5e-3, **host)
    for operation in ("all_gather", "reduce_scatter"):
        one, other = alone.cost(call(operation)), busy.cost(call(operation))
        assert one.busy_latency_s == 0.0 and other.seconds == one.seconds
        whole = calls_s + other.latency_s + other.busy_latency_s
        assert whole == pytest.approx(default_constants().launch_s + 3 * 5e-3), operation


def test_quantisers_are_no_latency_that_grows_beside_computation():
    wire, lossless = (model_of(busy_latency_s=5e-3).cost(call("all_gather", kind)) for kind in ("int8", "fp32"))
    assert wire.busy_latency_s == pytest.approx(lossless.busy_latency_s)


def test_levels_at_work_at_once_wait_as_one_of_them_does():
    cost = model_of(busy_latency_s=5e-3).cost(call("all_gather"))
    assert overlapped_cost(cost, cost, 4).busy_latency_s == cost.busy_latency_s > 0


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_an_all_reduce_that_the_engine_makes_of_two_halves_costs_both(wire):
    model = model_of(shares=(("all_gather", 0.5), ("reduce_scatter", 2.0), ("all_reduce", 8.0)))
    halves = [model.cost(call(half, wire)) for half in ("reduce_scatter", "all_gather")]
    assert model.cost(call("all_reduce", wire)).seconds == pytest.approx(sum(half.seconds for half in halves))
    assert model.cost(call("all_reduce")).seconds < sum(
        model.cost(call(h)).seconds for h in ("reduce_scatter", "all_gather")
    )
