"""The engine records the events that the simulator writes for the same schedule, in the same order."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import zeromesh as zm
from tests.dist.engine.test_communication import LOSSLESS
from tests.dist.parity import Case, backward, mesh_of, sharded
from tests.dist.pool import on_ranks
from tests.traffic import communication
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import Device
from zeromesh.cluster.level import Level
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.engine.api import engine_of
from zeromesh.observe import record
from zeromesh.observe.record import _HostClock, _Recorder
from zeromesh.schedule.interpreter import Interpreter
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.step import run_micro_batch
from zeromesh.simulator.chains import Chains
from zeromesh.simulator.clock import ClockBackend
from zeromesh.simulator.mechanics import find_engine
from zeromesh.trace import Trace

Call = tuple[str, str | None, int, str | None, float]
"""Name, unit, micro-batch, axis, bytes."""

BF16 = Case(precision="bf16-wire")
CASES = dict.fromkeys(
    [*LOSSLESS[1::6], "host=2,node=1,cluster=1", "node=3,cluster=3k;prefetch=3"],
    Case(precision="fp32", micro_batches=1),
) | {
    "node=3,cluster=1": BF16,  # there an all-reduce is two exchanges, and one event
    "node=3,cluster=1;overlap=none": BF16,
    "node=1,cluster=3;overlap=gather": BF16,
    "node=3,cluster=3;collective=ho_ring": Case(precision="fp32"),
    "node=0,cluster=0;collective=ho_ring": Case(precision="fp32"),
    "node=0@/int8,cluster=0@/int8": Case(precision="fp32", micro_batches=1),
    "node=3@int8/int4,cluster=3k@int8/int4": Case(precision="fp32", micro_batches=1),
    "node=3d,cluster=1": Case(precision="fp32"),
}


def predicted(schedule: Schedule, micro_batches: int) -> Trace:
    """The simulator's events for a schedule, on links and a device of no particular speed, which exchange messages."""
    device = Device(name="d", memory_bytes=1e12, peak_flops={"bf16": 1e12}, cores=1.0)
    levels = tuple(
        Level(name=name, size=size, bandwidth_bytes_per_s=1e9, latency_s=1e-6) for name, size in schedule.layout.mesh
    )
    constants = default_constants()
    model = TransferModel(
        Cluster(name="c", device=device, levels=levels), constants, ComputeModel(device=device, constants=constants)
    )
    mechanics = find_engine("zeromesh")
    on_host = (any(b.buffer.trainable and "master" in b.on_host_kinds for b in unit) for unit in schedule.placed)
    steps = [(1e-3 * steps_there, 0.0) for steps_there in on_host] if schedule.memory.host else []
    clock = ClockBackend(Chains(schedule, mechanics, model), record=True, steps=steps)
    clock.begin_step()
    interpreter = Interpreter(schedule=schedule, backend=clock)
    interpreter.stepped(range(len(schedule.units)))
    for micro in range(micro_batches):
        clock.micro_batch = micro
        run_micro_batch(
            interpreter,
            last=micro == micro_batches - 1,
            compute=lambda phase, unit: clock.compute(phase, unit, 1e-3),
        )
    clock.drain()
    clock.micro_batch = -1
    clock.compute("optimizer", -1, 1e-3)
    return Trace(label="predicted", events=tuple(clock.events))


def measured(strategy: str, case: Case, *shape: int) -> tuple[Trace, Schedule]:
    """The second of two recorded steps, which is a steady one: the first shows the order of the units."""
    with sharded(strategy, case, mesh_of(*shape)) as (model, optimizer):
        with zm.record_trace(model) as recording:
            for step in range(2):
                backward(model, case, step)
                optimizer.step()
                optimizer.zero_grad()
        assert len(recording.steps) == 2
        return recording.steps[1], engine_of(model).schedule


def lanes(trace: Trace) -> dict[str, list[Call]]:
    """The calls of each kind over each axis, in order, without those that send nothing."""
    found = defaultdict(list)
    for event in trace.events:
        if event.kind == "communicate" and event.sent_bytes:
            call = (event.name, event.unit, event.micro_batch, event.axis, event.sent_bytes)
            found[event.resource].append(call)
    return found


def computed(trace: Trace) -> set[tuple[str, str | None, int]]:
    return {(e.name, e.unit, e.micro_batch) for e in trace.events if e.kind == "compute"}


def require_whole_row(found: Trace, *, overlapped: bool) -> None:
    """On the rank's own row nothing overlaps, and nothing is missing but the user's own work between."""
    row = sorted((e for e in found.events if e.resource == "compute"), key=lambda e: e.start_s)
    assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(row))
    assert row[-1].name == "optimizer"
    assert found.seconds(kind="wait") > 0
    sent = [e for e in found.events if e.kind == "communicate" and e.sent_bytes]
    for event in sent:
        if not event.name.startswith("refresh"):
            assert 0 <= event.start_s <= event.end_s <= found.step_s
    if not overlapped:  # all communication lies in a wait for it
        waits = [e for e in row if e.kind == "wait"]
        for event in sent:
            assert any(wait.start_s <= event.start_s and event.end_s <= wait.end_s for wait in waits), event


@on_ranks(4)
def test_the_same_events():
    for strategy, case in CASES.items():
        found, schedule = measured(strategy, case, 2, 2)
        expected = predicted(schedule, case.micro_batches)
        assert lanes(found) == lanes(expected), strategy
        trained = {unit.name for unit in schedule.units if unit.trainable}
        # A frozen unit's backward is in the model of time; here no point of its own ends it.
        assert {c for c in computed(found) if c[1] in trained} == {c for c in computed(expected) if c[1] in trained}
        assert communication(found) == communication(expected), strategy
        if strategy.startswith("node=3,cluster=1"):
            require_whole_row(found, overlapped="none" not in strategy)


@on_ranks(2)
def test_nothing_stays_behind():
    case = Case(precision="fp32", micro_batches=1, world=2)
    with sharded("node=3", case, mesh_of(2)) as (model, optimizer):
        engine = engine_of(model)
        before = {name: getattr(engine.backend, name) for name in ("lanes", "chains")}
        with pytest.raises(ZeroDivisionError), zm.record_trace(model) as recording:
            backward(model, case, 0)
            optimizer.step()
            raise ZeroDivisionError
        assert {name: getattr(engine.backend, name) for name in before} == before
        backward(model, case, 1)
        assert len(recording.steps) == 1


class Recomputed(torch.nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@on_ranks(2)
def test_recomputation_is_seen():
    model = zm.shard(Recomputed(*(torch.nn.Linear(8, 8) for _ in range(3))), mesh_of(2), "node=3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zm.record_trace(model) as recording:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert {e.unit for e in recording.steps[0].events if e.name == "recompute"} == {"0", "1", "2"}
    rows = json.loads(recording.steps[0].to_json())["traceEvents"]
    assert {row["args"]["name"] for row in rows if row["name"] == "thread_name"} >= {"compute", "unshard/node"}


def test_times_are_taken_where_parameters_lie(monkeypatch):
    """Without a mesh the control is the host's, and the root may own nothing: another unit's buffer says it."""
    seen: list[torch.device] = []

    class Clock(_HostClock):
        def __init__(self, device: torch.device) -> None:
            seen.append(device)

    monkeypatch.setattr(record, "_DeviceClock", Clock)
    blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    model = zm.shard(torch.nn.ModuleDict({"blocks": blocks}), None, "node=0", bucket_bytes=0)
    engine = engine_of(model)
    root, block, _ = engine.backend.units
    assert not root.buffers and isinstance(_Recorder(engine).clock, _HostClock)
    monkeypatch.setattr(block.buffers[0], "device", torch.device("cuda", 3))
    assert isinstance(_Recorder(engine).clock, Clock) and seen == [torch.device("cuda", 3)]
