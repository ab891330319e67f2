import pytest

from zeromesh.cost import CollectiveCost
from zeromesh.errors import InternalError
from zeromesh.simulator.network import Job, Network, Work


def work(latency: float = 0.0, taken: float = 0.0, memory_s: float = 0.0, **busy: float) -> Work:
    """A collective that keeps level `l0`, `l1` ... busy for the given seconds, after its latency."""
    levels = tuple((int(name[1:]), seconds) for name, seconds in busy.items())
    longest = max((seconds for _, seconds in levels), default=0.0)
    cost = CollectiveCost(seconds=latency + longest, busy=levels, taken=taken, memory_s=memory_s)
    return Work("gather", ("node",), cost, (0.0,))


def network() -> Network:
    return Network(lambda job, done, start, end: None)


def job(*chain: Work, after: Job | None = None) -> Job:
    return Job(chain, 0, 0, "unshard", after)


def test_a_lane_carries_out_its_jobs_one_after_another():
    net = network()
    first, second = (net.submit(job(work(l0=1.0)), "gather") for _ in range(2))
    net.wait_for(second)
    assert (first.done_s, second.done_s) == (pytest.approx(1.0), pytest.approx(2.0))


def test_a_chain_goes_step_by_step():
    net = network()
    net.wait_for(net.submit(job(work(0.5, l0=1.0), work(l1=2.0)), "gather"))
    assert net.now_s == pytest.approx(3.5)


def test_lanes_on_one_level_share_its_links_and_on_two_do_not():
    for level, end in (("l0", 2.0), ("l1", 1.0)):
        net = network()
        jobs = [net.submit(job(work(l0=1.0)), "gather"), net.submit(job(work(**{level: 1.0})), "reduce")]
        for each in jobs:
            net.wait_for(each)
        assert net.now_s == pytest.approx(end)


def test_a_transfer_that_hardly_uses_a_level_hardly_slows_it():
    """A ring between nodes is bound by the network; inside the node it takes a tenth of the links."""
    net = network()
    ring = net.submit(job(work(l0=1.0, l1=10.0)), "gather")
    inside = net.submit(job(work(l0=1.0)), "reduce")
    net.wait_for(inside)
    assert net.now_s == pytest.approx(1.1)
    net.wait_for(ring)
    assert net.now_s == pytest.approx(10.1, abs=0.02)


def test_latency_keeps_no_link_busy():
    net = network()
    waiting = net.submit(job(work(1.0, l0=1.0)), "gather")
    running = net.submit(job(work(l0=1.0)), "reduce")
    net.wait_for(running)
    assert net.now_s == pytest.approx(1.0)
    net.wait_for(waiting)
    assert net.now_s == pytest.approx(2.0)


def test_when_one_of_two_ends_the_other_has_the_links_alone():
    net = network()
    short = net.submit(job(work(l0=1.0)), "gather")
    long = net.submit(job(work(l0=3.0)), "reduce")
    net.wait_for(short)
    assert net.now_s == pytest.approx(2.0)
    net.wait_for(long)
    assert net.now_s == pytest.approx(4.0)


def test_a_job_waits_for_another_lanes_job():
    net = network()
    first = net.submit(job(work(l0=1.0)), "refresh")
    after = net.submit(job(work(l1=1.0), after=first), "gather")
    net.wait_for(after)
    assert after.done_s == pytest.approx(2.0)


def test_compute_slows_down_only_while_something_runs():
    net = network()
    net.submit(job(work(l0=3.0, taken=1 / 3)), "gather")
    net.compute(4.0)
    # Two of the four seconds take three, while the transfer runs; the other two run alone.
    assert net.now_s == pytest.approx(5.0)


def test_what_runs_at_once_takes_of_the_device_together():
    net = network()
    net.submit(job(work(l0=4.0, taken=1 / 4)), "gather")
    net.submit(job(work(l1=2.0, taken=1 / 4)), "reduce")
    net.compute(3.5)
    # One second takes two while both run, one and a half take two while one does, and the last runs alone.
    assert net.now_s == pytest.approx(5.0)
    net.compute(1.0)
    assert net.now_s == pytest.approx(6.0)


def test_compute_that_waits_for_memory_loses_what_a_transfer_moves_there():
    net = network()
    net.submit(job(work(latency=1.0, l0=3.0, memory_s=2.0)), "gather")
    net.compute(4.0, moving=0.5)
    # One second beside the latency, two in the three of the transfer, one alone.
    assert net.now_s == pytest.approx(5.0)
    net.submit(job(work(l0=3.0, memory_s=2.0)), "gather")
    net.compute(3.0)
    assert net.now_s == pytest.approx(8.0)


def test_transfers_that_slow_each_other_down_move_no_more_than_alone():
    net = network()
    for lane in ("gather", "reduce"):
        net.submit(job(work(l0=2.0, memory_s=1.0)), lane)
    net.compute(2.0, moving=1.0)
    # Both take four seconds, in which half of the memory is theirs.
    assert net.now_s == pytest.approx(4.0)
    net.compute(1.0, moving=1.0)
    assert net.now_s == pytest.approx(5.0)


def test_an_empty_chain_ends_at_once_and_a_cycle_is_an_error():
    net = network()
    net.wait_for(net.submit(job(), "gather"))
    assert net.now_s == 0.0
    never = job(work(l0=1.0))
    with pytest.raises(InternalError, match="never ends"):
        net.wait_for(net.submit(job(work(l0=1.0), after=never), "reduce"))
