"""The clock's network: work that runs at once shares links, memory and the processor that moves the bytes."""

import pytest

from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import Device
from zeromesh.cluster.level import Level
from zeromesh.cluster.read import parse_cluster
from zeromesh.collectives.ho_ring.cost import overlapped_cost
from zeromesh.cost.collective import HOST, CollectiveCost
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.errors import ClusterError, InternalError
from zeromesh.schedule.transfer import Transfer
from zeromesh.simulator.network import Job, Network, Work
from zeromesh.strategy import Layout


def work(latency: float = 0.0, *, host: float = 0.0, taken: float = 0.0, memory_s: float = 0.0, **busy: float) -> Work:
    """A collective that keeps level `l0`, `l1` ... busy for the given seconds, after its latency."""
    levels = tuple((int(name[1:]), seconds) for name, seconds in busy.items())
    longest = max((seconds for _, seconds in levels), default=0.0)
    levels += ((HOST, host),) if host else ()
    cost = CollectiveCost(seconds=latency + longest, busy=levels, sent_bytes=1.0, taken=taken, memory_s=memory_s)
    return Work("gather", ("node",), cost, (0.0,))


def job(*chain: Work, after: Job | None = None) -> Job:
    return Job(chain, 0, 0, "unshard", after)


def network(cores: float | None = None) -> Network:
    return Network(lambda job, done, start, end: None, cores)


@pytest.mark.parametrize(
    ("cores", "lanes", "works", "ends"),
    [
        (None, "gg", [work(l0=1.0), work(l0=1.0)], [1.0, 2.0]),  # a lane carries out one job after another
        (None, "gr", [work(l0=1.0), work(l0=1.0)], [2.0, 2.0]),  # two lanes share a level's links
        (None, "gr", [work(l0=1.0), work(l1=1.0)], [1.0, 1.0]),
        # A ring between nodes is bound by the network; inside the node it takes a tenth of the links.
        (None, "gr", [work(l0=1.0, l1=10.0), work(l0=1.0)], [10.1, 1.1]),
        (None, "gr", [work(1.0, l0=1.0), work(l0=1.0)], [2.0, 1.0]),  # latency keeps no link busy
        (None, "gr", [work(l0=1.0), work(l0=3.0)], [2.0, 4.0]),  # the longer has the links alone in the end
        (0.5, "gr", [work(l0=1.0, host=1.0), work(l1=1.0, host=1.0)], [2.0, 2.0]),  # both need the whole processor
    ],
)
def test_jobs_share_lanes_links_and_processor(cores, lanes, works, ends):
    net = network(cores)
    jobs = [net.submit(job(one), lane) for lane, one in zip(lanes, works, strict=True)]
    for each in jobs:
        net.wait_for(each)
    assert [each.done_s for each in jobs] == pytest.approx(ends, abs=0.02 if 10.1 in ends else 1e-9)


@pytest.mark.parametrize(
    ("refreshes", "lane", "ends"),
    [
        (1, "unshard", (1.0, 1.0)),
        (2, "unshard", (1.0, 5.0)),  # the second refresh begins when the first has ended
        (3, "unshard", (1.0, 9.0)),
        (3, "up", (1.0, 1.0)),  # a copy is none of NCCL's
    ],
)
def test_launch_order_holds_collectives_up_behind_those_that_wait_for_their_lane(refreshes, lane, ends):
    for implicit, expected in zip((False, True), ends, strict=True):
        net = Network(lambda job, done, start, end: None, implicit=implicit)
        for _ in range(refreshes):
            net.submit(job(work(l1=4.0)), "refresh")
        gather = net.submit(job(work(l0=1.0)), lane)
        net.wait_for(gather)
        assert gather.done_s == pytest.approx(expected)


def test_a_chain_holds_its_place_in_the_launch_order_until_its_last_collective_has_begun():
    net = Network(lambda job, done, start, end: None, implicit=True)
    net.submit(job(work(l1=4.0), work(l1=2.0)), "refresh")
    first, second = (net.submit(job(work(l0=1.0)), lane) for lane in ("unshard", "reduce"))
    before = net.signature(str)
    net.wait_for(first)
    assert (first.done_s, second.done_s) == pytest.approx((6.0, 6.0))  # both on the same links
    assert net.signature(str) != before


def test_chains_and_jobs_that_wait_for_others():
    net = network()
    net.wait_for(net.submit(job(), "gather"))
    assert net.now_s == 0.0
    net.wait_for(net.submit(job(work(0.5, l0=1.0), work(l1=2.0)), "gather"))
    assert net.now_s == pytest.approx(3.5)
    first = net.submit(job(work(l0=1.0)), "refresh")
    after = net.submit(job(work(l1=1.0), after=first), "gather")
    net.wait_for(after)
    assert after.done_s == pytest.approx(3.5 + 2.0)
    with pytest.raises(InternalError, match="never ends"):
        net.wait_for(net.submit(job(work(l0=1.0), after=job(work(l0=1.0))), "reduce"))


@pytest.mark.parametrize(
    ("cores", "works", "computed", "moving", "ends"),
    [
        # Two of the four seconds take three, while the transfer runs; the other two run alone.
        (None, [work(l0=3.0, taken=1 / 3)], [4.0], 0.0, [5.0]),
        # One second takes two while both run, one and a half take two while one does, and the last runs alone.
        (None, [work(l0=4.0, taken=1 / 4), work(l1=2.0, taken=1 / 4)], [3.5, 1.0], 0.0, [5.0, 6.0]),
        # One second beside the latency, two in the three of the transfer, one alone; none where nothing is moved.
        (None, [work(latency=1.0, l0=3.0, memory_s=2.0)], [4.0], 0.5, [5.0]),
        (None, [work(l0=3.0, memory_s=2.0)], [3.0], 0.0, [3.0]),
        # Two that slow each other down move no more than alone: in four seconds half of the memory is theirs.
        (None, [work(l0=2.0, memory_s=1.0), work(l0=2.0, memory_s=1.0)], [2.0, 1.0], 1.0, [4.0, 5.0]),
        # A processor that moves the bytes: all of it is needed, a tenth of it for 2 s, or none that computes.
        (0.5, [work(l0=1.0, host=1.0, taken=1 / 3)], [4.0], 0.0, [5.0]),
        (1.0, [work(l0=1.0, host=1.0, taken=1 / 3)], [4.0], 0.0, [5.0]),
        (0.5, [work(l0=2.0, host=0.2, taken=1 / 3)], [4.0], 0.0, [4.2]),
        (4.0, [work(l0=1.0, host=0.25, taken=1 / 3)], [4.0], 0.0, [4.0]),
    ],
)
def test_transfers_slow_computation_down(cores, works, computed, moving, ends):
    net = network(cores)
    for lane, one in enumerate(works):
        net.submit(job(one), f"lane {lane}")
    for seconds, end in zip(computed, ends, strict=True):
        net.compute(seconds, moving=moving)
        assert net.now_s == pytest.approx(end)


def test_computation_and_transfer_share_the_processor_alike():
    """Both want all of it: after a second either has done half a second's work."""
    net = network(0.5)
    sent = net.submit(job(work(l0=1.0, host=1.0)), "gather")
    net.compute(0.5)
    assert net.now_s == pytest.approx(1.0) and sent.share_left == pytest.approx(0.5)
    net.wait_for(sent)
    assert net.now_s == pytest.approx(1.5)
    # 3 ms of latency take 12 ms while the device computes, and the rest of them no longer than alone.
    net = network(0.5)
    cost = CollectiveCost(seconds=3e-3, busy=(), sent_bytes=1.0, busy_latency_s=9e-3)
    sent = net.submit(job(Work("gather", ("node",), cost, (1.0,))), "gather")
    net.compute(8e-3)
    assert net.now_s == pytest.approx(8e-3)
    net.wait_for(sent)
    assert net.now_s == pytest.approx(9e-3)


# Seconds of one collective on such devices ----------------------------------------------------------------------------


def cost_of(operation="all_gather", wire="fp32", *, size=2, numel=500_000_000, cores=0.5, **level) -> CollectiveCost:
    """1 GB in all at 1 GB/s, unless told otherwise."""
    device = Device(name="c", memory_bytes=1e12, peak_flops={"fp32": 1e11}, memory_bytes_per_s=1e10, cores=cores)
    found = Level(name="node", size=size, bandwidth_bytes_per_s=1e9, kind="loopback", **{"latency_s": 0.0, **level})
    cluster, constants = Cluster(name="c", device=device, levels=(found,)), default_constants()
    model = TransferModel(cluster, constants, ComputeModel(device=device, constants=constants))
    (axis,) = Layout.of("node=3", [("node", size)]).axes
    return model.cost(Transfer(operation=operation, axis=axis, numel=numel, wire=wire))


@pytest.mark.parametrize(
    ("cores", "host", "seconds"), [(0.5, 1e9, 2.0), (4.0, 1e9, 1.0), (None, 1e9, 1.0), (0.5, None, 1.0)]
)
@pytest.mark.parametrize("shares", [{}, {"all_reduce": 2.0, "reduce_scatter": 0.5}])
def test_a_transfer_is_no_faster_than_the_processor_moves_it(cores, host, seconds, shares):
    """At 1 GB/s of a whole core; each operation as fast as it was measured to be, or as all are."""
    scales = {"all_gather": 1.0, "reduce_scatter": 2.0, "all_reduce": 1.0} if shares else {"all_gather": 1.0}
    for operation, scale in scales.items():
        found = cost_of(operation, cores=cores, host_bytes_per_s=host, shares=shares)
        assert found.seconds == pytest.approx(scale * seconds, rel=1e-3)
        assert (HOST in dict(found.busy)) == (cores is not None and host is not None)


def test_a_call_takes_of_the_processor_and_is_part_of_the_latency():
    """Half a core: 1 ms of a call's processor time is 2 ms, more than a latency of 1 ms, less than one of 5 ms."""
    host = {"host_bytes_per_s": 1e9, "host_call_s": 1e-3}
    short, long = (cost_of(numel=500_000, latency_s=latency_s, **host) for latency_s in (1e-3, 5e-3))
    assert dict(short.busy)[HOST] == dict(long.busy)[HOST] == pytest.approx(2e-3 + 2e-3)
    assert short.seconds == pytest.approx(2e-3 + 2e-3)
    assert long.seconds == pytest.approx(5e-3 + 2e-3, rel=0.02)  # and the launch


def test_the_keys_of_the_file():
    text = """
    name = "c"
    device = { name = "cpu", memory = "1 GB", cores = 0.5, peak = { fp32 = "1 GFLOP/s" } }
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
    (level,) = found.levels
    assert (found.device.cores, level.host_bytes_per_s, level.share("all_reduce")) == (0.5, 2e9, 1.5)
    assert (level.busy_latency_s, level.host_call_s) == pytest.approx((5e-6, 2e-3)) and level.share("all_gather") == 1.0
    for old, new, message in (
        ('host_rate = "2 GB/s"', "", r"host_call must not be negative, and goes with a host_rate; got 0\.002 s and no"),
        ('"5 us"', '"0 us"', "busy_latency is the latency while devices compute"),
        ("all_reduce", "all_reduc", r"level\[0\]\.shares\.all_reduc: unknown key; did you mean all_reduce"),
        ("0.5", "0", r"device\.cores: expected a finite value above zero"),
        ('"2 GB/s"', "2", r"level\[0\]\.host_rate: expected a rate"),
    ):
        with pytest.raises(ClusterError, match=message):
            parse_cluster(text.replace(old, new))


@pytest.mark.parametrize("latency_s", [0.0, 1e-3])
@pytest.mark.parametrize("calls_s", [0.0, 4e-3])
def test_beside_computation_a_step_takes_what_was_measured(latency_s, calls_s):
    """For any time alone: three steps of 5 ms for a ring of four ranks. A call's processor time is a part of that."""
    host = {"host_bytes_per_s": 1e8, "host_call_s": calls_s / 2} if calls_s else {}
    for operation in ("all_gather", "reduce_scatter"):
        one, other = (
            cost_of(operation, size=4, numel=1_000_000, latency_s=latency_s, busy_latency_s=busy_s, **host)
            for busy_s in (None, 5e-3)
        )
        assert one.busy_latency_s == 0.0 and other.seconds == one.seconds
        whole = calls_s + other.latency_s + other.busy_latency_s
        assert whole == pytest.approx(default_constants().launch_s + 3 * 5e-3), operation


def test_quantisers_and_levels_at_work_at_once_add_no_latency_beside_computation():
    wire, lossless = (cost_of("all_gather", kind, size=4, busy_latency_s=5e-3) for kind in ("int8", "fp32"))
    assert wire.busy_latency_s == pytest.approx(lossless.busy_latency_s)
    assert overlapped_cost(lossless, lossless, 4).busy_latency_s == lossless.busy_latency_s > 0


@pytest.mark.parametrize("wire", ["bf16", "int8", "fp32"])
def test_an_all_reduce_that_the_engine_makes_of_two_halves_costs_both(wire):
    """The backend's own, in fp32, is faster."""
    shares = (("all_gather", 0.5), ("reduce_scatter", 2.0), ("all_reduce", 8.0))
    whole, *halves = (
        cost_of(each, wire, size=4, numel=1_000_000, shares=shares).seconds
        for each in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert whole < sum(halves) if wire == "fp32" else whole == pytest.approx(sum(halves))
