"""Virtual clocks of streams, against times worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from zeromesh.cost.collective import CollectiveCost
from zeromesh.rehearsal.result import Place
from zeromesh.rehearsal.timeline import Communication, Issued, Kernel, Order, StepEnd, TimedStep, replay

FORWARD, BACKWARD = Place(phase="forward", unit="layers.0"), Place(phase="backward", unit="layers.0")


def kernel(seconds: float, place: Place = FORWARD, *, at_s: float = 0.0, moving: bool = False) -> Kernel:
    return Kernel(at_s=at_s, stream=0, seconds=seconds, moving=moving, place=place, lane="compute")


def gather(latency_s: float, busy_s: float, *, level: int = 0, **fields: Any) -> Communication:
    """On stream 1 and the lane of gathers, unless told otherwise."""
    costs = {name: fields.pop(name) for name in ("taken", "memory_s") if name in fields}
    cost = CollectiveCost(seconds=latency_s + busy_s, busy=((level, busy_s),), **costs)
    fields = {"at_s": 0.0, "stream": 1, "lane": "unshard", "unit": "layers.0", "sent_bytes": 8.0, **fields}
    return Communication(cost=cost, operation="all_gather", axis="node", **fields)


def after(event: int, of: int, stream: int) -> list[Order]:
    """`stream` goes on after all that `of` has been given so far."""
    return [Order(at_s=0.0, kind=kind, stream=s, event=event) for kind, s in (("record", of), ("wait", stream))]


def run(*issued: Issued, **options: Any) -> TimedStep:
    at_s = issued[-1].at_s
    (step,) = replay([*issued, StepEnd(at_s=at_s)], label="", **options)
    return step


def test_streams_run_side_by_side_and_a_wait_is_what_is_left() -> None:
    step = run(gather(1.0, 4.0), kernel(2.0), *after(7, of=1, stream=0), kernel(1.0, BACKWARD))
    assert step.seconds == 6.0
    assert [(e.name, e.start_s, e.end_s) for e in step.trace.events if e.resource == "compute"] == [
        ("forward", 0.0, 2.0),
        ("wait", 2.0, 5.0),
        ("backward", 5.0, 6.0),
    ]
    (sent,) = [event for event in step.trace.events if event.kind == "communicate"]
    assert (sent.resource, sent.name, sent.start_s, sent.end_s) == ("unshard/node", "unshard all_gather", 0.0, 5.0)


def test_a_device_waits_for_what_is_not_there_yet() -> None:
    """A wait for work that has ended is none; where the host is late, the device stands still."""
    step = run(gather(0.0, 1.0), kernel(2.0), *after(7, of=1, stream=0), kernel(1.0))
    assert step.seconds == 3.0
    assert step.trace.seconds(kind="wait") == 0.0
    step = run(kernel(1.0), kernel(1.0, BACKWARD, at_s=3.0))
    assert step.seconds == 4.0
    assert run(kernel(1.0), kernel(1.0, BACKWARD, at_s=3.0), host_scale=0.5).seconds == 2.5


def test_a_host_that_reads_no_longer_runs_ahead() -> None:
    """Both kernels are issued in the first second; the read lets the host issue the second one when the first ends."""
    read = Order(at_s=0.5, kind="host stream", stream=0)
    assert run(kernel(5.0), kernel(1.0, BACKWARD, at_s=1.0)).seconds == 6.0
    assert run(kernel(5.0), read, kernel(1.0, BACKWARD, at_s=1.0)).seconds == 6.5


def test_collectives_share_links_and_slow_kernels_down() -> None:
    """For two seconds, of which the collective takes a quarter and leaves one and a half of computation."""
    assert run(gather(0.0, 2.0, taken=0.25), kernel(3.0)).seconds == pytest.approx(3.5)
    # Only kernels that wait for memory are slowed by the bytes that the collective moves.
    for moving, seconds in ((True, 3.5), (False, 3.0)):
        assert run(gather(0.0, 2.0, memory_s=0.5), kernel(3.0, moving=moving)).seconds == pytest.approx(seconds)
    # Two of 4 s on one link have half of it each: both take 8.
    shared = run(gather(0.0, 4.0), gather(0.0, 4.0, stream=2, lane="reduce"), *after(1, of=2, stream=0), kernel(1.0))
    apart = run(gather(0.0, 4.0), gather(0.0, 4.0, stream=2, level=1), *after(1, of=2, stream=0), kernel(1.0))
    assert (shared.seconds, apart.seconds) == (9.0, 5.0)
    assert [event.end_s for event in shared.trace.events if event.kind == "communicate"] == [8.0, 8.0]


def test_a_step_begins_where_the_computation_has_ended_the_one_before() -> None:
    end = StepEnd(at_s=0.0)
    first, second = replay([kernel(2.0), gather(0.0, 9.0), end, *after(3, of=1, stream=0), kernel(1.0), end], label="")
    assert (first.seconds, second.seconds) == (2.0, 8.0)
    assert second.trace.seconds(kind="wait") == 7.0


def test_launch_order_lets_a_gather_wait_for_refreshes_that_wait_for_their_stream() -> None:
    refresh = gather(0.0, 4.0, level=1, stream=2, lane="refresh")
    for refreshes, seconds in ((1, 2.0), (2, 6.0), (3, 10.0)):
        issued = (*[refresh] * refreshes, gather(0.0, 1.0), *after(7, of=1, stream=0), kernel(1.0))
        assert run(*issued).seconds == 2.0
        assert run(*issued, launch_order="implicit").seconds == seconds
