"""The result of a rehearsal: where memory ends, where ranks part, and how it is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeromesh.cost.collective import CollectiveCost
from zeromesh.errors import InputError
from zeromesh.rehearsal import launch
from zeromesh.rehearsal.launch import rehearse_config
from zeromesh.rehearsal.result import Call, HostRead, Launches, Memory, Peak, Place, Rehearsal, failures_of
from zeromesh.rehearsal.timeline import STEP_ENDS, Communication, Issued, Kernel, Order, TimedStep, replay
from zeromesh.trace import MemoryLine, TrafficLine


def peak(phase, unit, allocated, reserved):
    return Peak(place=Place(phase=phase, unit=unit), allocated_bytes=allocated, reserved_bytes=reserved)


SHARD, FORWARD, BACKWARD = peak("shard", None, 40, 50), peak("forward", "h.0", 70, 80), peak("backward", "h.1", 90, 110)
FOUND = Rehearsal(
    model="Net",
    strategy="node=3",
    mesh=(("node", 8),),
    world=8,
    rank=0,
    micro_batches=2,
    cluster="here",
    memory=Memory(
        kinds=(MemoryLine(kind="params", predicted_bytes=30, allocated_bytes=30),),
        rest_bytes=35,
        peaks=(SHARD, FORWARD, BACKWARD),
        growth=(SHARD, FORWARD, BACKWARD),
        overhead_bytes=5,
        limit_bytes=200,
    ),
    axes=(TrafficLine(axis="node", size=8, stage="3", predicted_bytes=9, sent_bytes=9, collectives=3),),
    launches=(
        Launches(unit="h.0", kind="reduce", count=2),
        Launches(unit="h.1", kind="reduce", count=3),
        Launches(unit="", kind="reduce", count=9),
    ),
    blocks=("h.0", "h.1"),
    host_reads=(HostRead(what="aten::item", where="train.py:7", count=2),),
    calls=(Call(axis="node", operation="all_gather", sent_bytes=7),),
    host_s=0.01,
    step_s=0.5,
    exposed_s=0.1,
)


def limited(limit_bytes):
    return replace(FOUND, memory=replace(FOUND.memory, limit_bytes=limit_bytes))


def test_memory_at_its_peak_and_where_it_ends() -> None:
    assert (FOUND.memory.peak, FOUND.memory.peak_reserved_bytes) == (BACKWARD, 110)
    assert FOUND.memory.activations_bytes == 90 - 35
    assert limited(115).memory.fails_at is None  # 110 reserved and 5 beside
    assert limited(114).memory.fails_at == BACKWARD
    assert limited(84).memory.fails_at == FORWARD  # the first one, though the later one needs more
    assert limited(None).memory.fails_at is None
    # Launches are the most of any block.
    assert FOUND.launches_per_unit() == {"reduce": 3}  # the root is no block


def test_ranks_part_where_one_issues_another_collective_or_none() -> None:
    other = replace(FOUND, rank=5)
    assert failures_of([FOUND, other]) == ()
    (said,) = failures_of([FOUND, replace(other, calls=())])
    assert "as number 1 of a step all_gather over node that sends 7 bytes on rank 0, none on rank 5" in said
    (said,) = failures_of([FOUND, replace(other, calls=(replace(FOUND.calls[0], sent_bytes=8),))])
    assert "sends 8 bytes on rank 5" in said
    # Each failure has its rank where there are several.
    broken = replace(limited(84), rank=5, failures=("in h.0: no",), races=("a race",))
    said = failures_of([FOUND, broken])
    assert said[0] == "rank 5: in h.0: no"
    assert said[1].startswith("rank 5: node=3 does not fit: it needs 115 B of a device of here, and 84 B are usable")
    assert said[2] == "rank 5: race: a race"


# ---- Virtual clocks of streams, against times worked out by hand


IN_FORWARD, IN_BACKWARD = Place(phase="forward", unit="layers.0"), Place(phase="backward", unit="layers.0")


def kernel(seconds: float, place: Place = IN_FORWARD, *, at_s: float = 0.0, moving: bool = False) -> Kernel:
    return Kernel(at_s=at_s, stream=0, seconds=seconds, moving=moving, place=place, kind="compute")


def gather(latency_s: float, busy_s: float, *, level: int = 0, **fields: Any) -> Communication:
    """On stream 1, as a gather, unless told otherwise."""
    costs = {name: fields.pop(name) for name in ("taken", "memory_s") if name in fields}
    cost = CollectiveCost(seconds=latency_s + busy_s, busy=((level, busy_s),), **costs)
    fields = {"at_s": 0.0, "stream": 1, "kind": "unshard", "unit": "layers.0", "sent_bytes": 8.0, **fields}
    return Communication(cost=cost, operation="all_gather", axis="node", **fields)


def after(event: int, of: int, stream: int) -> list[Order]:
    """`stream` goes on after all that `of` has been given so far."""
    return [Order(at_s=0.0, kind=kind, stream=s, event=event) for kind, s in (("record", of), ("wait", stream))]


def run(*issued: Issued, **options: Any) -> TimedStep:
    at_s = issued[-1].at_s
    (step,) = replay([*issued, Order(at_s=at_s, kind=STEP_ENDS)], label="", **options)
    return step


def test_streams_run_side_by_side_and_a_wait_is_what_is_left() -> None:
    step = run(gather(1.0, 4.0), kernel(2.0), *after(7, of=1, stream=0), kernel(1.0, IN_BACKWARD))
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
    step = run(kernel(1.0), kernel(1.0, IN_BACKWARD, at_s=3.0))
    assert step.seconds == 4.0
    assert run(kernel(1.0), kernel(1.0, IN_BACKWARD, at_s=3.0), host_scale=0.5).seconds == 2.5


def test_a_host_that_reads_no_longer_runs_ahead() -> None:
    """Both kernels are issued in the first second; the read lets the host issue the second one when the first ends."""
    read = Order(at_s=0.5, kind="host waits for stream", stream=0)
    assert run(kernel(5.0), kernel(1.0, IN_BACKWARD, at_s=1.0)).seconds == 6.0
    assert run(kernel(5.0), read, kernel(1.0, IN_BACKWARD, at_s=1.0)).seconds == 6.5


def test_collectives_share_links_and_slow_kernels_down() -> None:
    """For two seconds, of which the collective takes a quarter and leaves one and a half of computation."""
    assert run(gather(0.0, 2.0, taken=0.25), kernel(3.0)).seconds == pytest.approx(3.5)
    # Only kernels that wait for memory are slowed by the bytes that the collective moves.
    for moving, seconds in ((True, 3.5), (False, 3.0)):
        assert run(gather(0.0, 2.0, memory_s=0.5), kernel(3.0, moving=moving)).seconds == pytest.approx(seconds)
    # Two of 4 s on one link have half of it each: both take 8.
    shared = run(gather(0.0, 4.0), gather(0.0, 4.0, stream=2, kind="reduce"), *after(1, of=2, stream=0), kernel(1.0))
    apart = run(gather(0.0, 4.0), gather(0.0, 4.0, stream=2, level=1), *after(1, of=2, stream=0), kernel(1.0))
    assert (shared.seconds, apart.seconds) == (9.0, 5.0)
    assert [event.end_s for event in shared.trace.events if event.kind == "communicate"] == [8.0, 8.0]


def test_a_step_begins_where_the_computation_has_ended_the_one_before() -> None:
    end = Order(at_s=0.0, kind=STEP_ENDS)
    first, second = replay([kernel(2.0), gather(0.0, 9.0), end, *after(3, of=1, stream=0), kernel(1.0), end], label="")
    assert (first.seconds, second.seconds) == (2.0, 8.0)
    assert second.trace.seconds(kind="wait") == 7.0


# ---- A wrong rehearsal is refused before any process starts, in one message


DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(launch, "_rehearse", fail)


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {"world": 1024}, "mesh cluster=2 x node=2 has 4 ranks, but --world asks for 1024; .*--set mesh"),
        ([], {"ranks": (0, 4)}, "--rank: ranks of this mesh are 0 to 3, got 4"),
        (["strategy=node=3,rack=1"], {}, "rack"),
        ([], {"traced": True}, "--trace needs a cluster whose time is shown"),
        (
            ["mesh={node=4}", "strategy=node=3", "cluster=a800-8x-hdr"],
            *({}, "outermost first cluster, node; the mesh has node"),
        ),
    ],
)
def test_what_is_refused(overrides: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rehearse_config(DEMO, overrides, **options)
    with pytest.raises(AssertionError, match="a process was started"):  # by a mesh that may be re-sized
        rehearse_config(DEMO, ["faults.resize=true"], world=64)
