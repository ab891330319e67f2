"""The engine on a checked device: nothing races, nothing is freed early, and the docs list all reads of the host.

Vector clocks do not depend on timing, so one process is enough: it is a rank of a world whose others hold the same.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zeromesh as zm
from tests.dist.engine.test_parts import PAIRS, in_parts
from tests.dist.parity import AwkwardBlock, Case, backward, evaluate, mesh_of, sharded
from tests.pure.strategy.mixes import mixes, notation
from tests.simdev.clean import SOURCES, require_clean, require_documented
from tests.simdev.faults import FAULTS, without_keeping, without_landing
from tests.simdev.ranks import alone
from tests.simdev.test_rehearse import step, with_experts
from zeromesh import simdev
from zeromesh.comm.lane import Lane, Ticket
from zeromesh.engine import beside, control
from zeromesh.engine.api import engine_of
from zeromesh.engine.backend import DeviceBackend
from zeromesh.errors import CommunicationError
from zeromesh.schedule.state import Reducing, Reduction

CASE = Case(steps=2, micro_batches=2, optimizer="both", device="simdev")
MIXES = [notation(mix) for mix in (*mixes(2), *(mix for mix in mixes(2, kept=True) if any("k" in s for s in mix)))]


def train(strategy: str, case: Case, *shape: int) -> None:
    with sharded(strategy, case, mesh_of(*shape or (2, 2), device="simdev")) as (model, optimizer):
        for step in range(case.steps):
            backward(model, case, step)
            if case.evaluate:
                evaluate(model, case, case.device)
            zm.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        engine_of(model).at_rest()
    del model, optimizer
    gc.collect()  # the engine's memory, under the checker


def checked(
    strategy: str, case: Case, *shape: int, leave_out: Callable[[], AbstractContextManager[None]] = nullcontext
) -> simdev.Checker:
    with simdev.Checker() as checker, leave_out():
        train(strategy, case, *shape)
    return checker


def require_ordered(strategy: str, case: Case, *shape: int) -> simdev.Checker:
    checker = checked(strategy, case, *shape)
    require_clean(checker, strategy)
    assert checker.checked > 500, strategy
    return checker


@alone()
def test_mixes_and_what_the_host_reads():
    """The engine itself reads twice at `zm.shard` and once a step."""
    simdev.counting_group(0, 4)
    for strategy in MIXES[::5]:
        checker = require_ordered(strategy, replace(CASE, evaluate=True))
        require_documented(checker, strategy, reads=2 + CASE.steps)
        in_steps = [wait for wait in checker.host_waits if not any("engine/build.py" in line for line in wait.stack)]
        waits = [wait for wait in in_steps if wait.where.startswith(SOURCES)]
        assert not waits, [str(wait) for wait in waits]


@alone()
def test_words_over_the_host_s_network_are_no_reads():
    """The pool's ranks may not use it: `tests.simdev.ranks.run`."""
    simdev.counting_group(0, 4)
    with mock.patch.object(control, "HOST_WORLD", 4):
        require_documented(require_ordered("node=3,cluster=1", CASE), "over gloo", reads=0)


@alone()
def test_shards_in_the_host_s_memory():
    """The host waits for its copies before it shows gradients and before it steps, and for no micro-batch."""
    simdev.counting_group(0, 4)
    for strategy in ("host=1,node=3,cluster=1", "host=2,node=1,cluster=0", "host=3,node=3,cluster=2"):
        require_ordered(f"{strategy};step=device", CASE)
        few, many = (require_ordered(strategy, replace(CASE, micro_batches=count)) for count in (1, 2))
        assert len(few.host_waits) == len(many.host_waits) > 0, strategy
        assert not [read for read in many.host_reads if "comm/host.py" in read.where], strategy
    require_ordered("host=2,node=1,cluster=0;overlap=none", CASE)
    checker = require_ordered("host=3d,node=3,cluster=3h", CASE)
    waits = [wait for wait in checker.host_waits if any("engine/backend.py" in line for line in wait.stack)]
    assert 0 < len(waits) <= 2 * 2 * CASE.steps + 2, len(waits)


@alone()
def test_three_axes():
    simdev.counting_group(0, 8)
    for strategy in ("node=3,cluster=1,region=0", "node=3d,cluster=3,region=0", "node=2,cluster=3k,region=1"):
        require_ordered(strategy, CASE, 2, 2, 2)


@alone()
def test_parts():
    """Parts on the model's axes, and experts on axes of their own."""
    simdev.counting_group(0, 16)
    for own, other in PAIRS[::6]:
        require_ordered(in_parts(own, other), CASE, 8, 2)
    with simdev.Checker() as checker:
        model, optimizer = with_experts(mesh_of(8, 2, device="simdev"))
        for _ in range(2):
            step(model, optimizer)
        engine_of(model).at_rest()
    require_clean(checker, "experts")
    assert checker.checked > 500


@alone()
def test_other_cases():
    simdev.counting_group(0, 4)
    for case in (
        replace(CASE, weighted=True),
        replace(CASE, every_last=True, optimizer="sgd"),
        replace(CASE, precision="bf16", optimizer="adamw"),
        replace(CASE, precision="bf16-wire", optimizer="adamw", bucket_bytes=600),
    ):
        for strategy in ("node=3,cluster=1", "node=1,cluster=2"):
            require_ordered(strategy, case)
    for setting in ("prefetch=0", "prefetch=3", "overlap=gather", "overlap=none", "collective=ho_ring"):
        require_ordered(f"node=3,cluster=3;{setting}", CASE)


@alone()
def test_a_reduction_launches_three_kernels_besides_its_collectives():
    """Gradients and zeros into the slot, the sum out of it; a weight is a pass of its own, a wire of another dtype than
    the accumulator's a cast before and after."""
    simdev.counting_group(0, 4)
    in_bf16 = replace(CASE, precision="bf16-wire", optimizer="adamw")
    for case, more in ((CASE, 0), (replace(CASE, weighted=True), 1), (in_bf16, 2)):
        for strategy in ("node=3,cluster=1", "node=3d,cluster=0", "node=2,cluster=3k"):
            most = max(kernels_of_reductions(strategy, replace(case, micro_batches=1)))
            assert most <= 3 + more, (strategy, case, most)


def kernels_of_reductions(strategy: str, case: Case) -> list[float]:
    """Kernels by flat buffer of each unit's reductions."""
    heard, found, issue = list[simdev.recorder.Entry](), list[float](), DeviceBackend.reduce

    def reduce(self: DeviceBackend, unit: int, reduction: Reduction) -> Reducing[Ticket]:
        heard.clear()
        issued = issue(self, unit, reduction)
        kernels = sum(isinstance(entry, simdev.recorder.Kernel) for entry in heard)
        found.append(kernels / len(self.chains[unit].reduce))
        return issued

    with mock.patch.object(DeviceBackend, "reduce", reduce), simdev.Recorder(heard.append):
        train(strategy, case)
    return found


@alone()
def test_recomputation():
    simdev.counting_group(0, 4)
    forward = AwkwardBlock.forward
    for reentrant in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                AwkwardBlock,
                "forward",
                lambda self, x: checkpoint(forward, self, x, use_reentrant=reentrant),  # noqa: B023
            )
            for strategy in ("node=3,cluster=1", "node=3,cluster=3;prefetch=0", "node=2,cluster=3k"):
                require_ordered(strategy, CASE)


@pytest.mark.parametrize("strategy", ["node=3,cluster=1", "host=1,node=3,cluster=1", "host[50%]=2,node=2,cluster=1"])
@pytest.mark.parametrize("fused", [None, True])
@alone()
def test_a_scaler(strategy, fused):
    """With fused kernels it tells them the scale; a step that overflows changes nothing."""
    simdev.counting_group(0, 4)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)]
    with simdev.Checker() as checker:
        model = zm.shard(torch.nn.Sequential(*blocks), mesh_of(2, 2, device="simdev"), strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("simdev", init_scale=8.0)

        def step(factor: float = 1.0, unscale: bool = True) -> None:
            loss = model(torch.ones(2, 8, device="simdev")).square().sum() * factor
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                zm.clip_grad_norm_(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        for unscale in (True, True, False):
            step(unscale=unscale)
        scale, before = scaler.get_scale(), [param.local.clone() for param in model.parameters()]
        step(factor=float("inf"))
        after = [param.local.clone() for param in model.parameters()]
    require_clean(checker, "GradScaler")
    assert (scale, scaler.get_scale()) == (8.0, 4.0)
    assert all(map(torch.equal, before, after))


@alone()
def test_a_rate_on_the_device_has_come_to_the_host_before_it_is_read():
    simdev.counting_group(0, 4)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)]
    with simdev.Checker() as checker:
        model = zm.shard(torch.nn.Sequential(*blocks), mesh_of(2, 2, device="simdev"), "host=1,node=3,cluster=1")
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="simdev"), fused=True)
        for _ in range(2):
            model(torch.ones(2, 8, device="simdev")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine_of(model).at_rest()
    require_clean(checker, "a rate on the device")


@alone()
def test_clipping_with_parts_and_tensor_parallelism_never_waits():
    """Parameters that are divided over unlike ranks have their norms added up without a word to the host."""
    simdev.counting_group(0, 8)
    mesh = init_device_mesh("simdev", (2, 2, 2), mesh_dim_names=("cluster", "node", "tp"))
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)]
    plan = {"0.0": ColwiseParallel(output_layouts=Replicate()), "1.0": ColwiseParallel(output_layouts=Replicate())}
    model = parallelize_module(torch.nn.Sequential(*blocks), mesh["tp"], plan)
    model = zm.shard(model, mesh["cluster", "node"], "node=3,cluster=1 | 2: node=0,cluster=3")
    model(torch.ones(2, 8, device="simdev")).square().sum().backward()
    assert len({param.elements.spans for param in model.parameters()}) > 1
    with simdev.Checker() as checker:
        total = zm.clip_grad_norm_(model, 1.0)
    assert not checker.host_reads and not checker.host_waits, (checker.host_reads, checker.host_waits)
    assert total.device.type == "simdev" and total > 0


@pytest.mark.parametrize("wait", FAULTS)
@alone()
def test_a_fault_is_found(wait):
    simdev.counting_group(0, 4)
    control._stream.cache_clear()  # a stream from before may be that of a lane too: a device hands out 32 in turn
    strategy, leave_out = FAULTS[wait]
    checker = checked(strategy, CASE, leave_out=leave_out)
    assert checker.races or checker.early_frees


@pytest.mark.parametrize(
    ("lane", "strategy", "precision"),
    [
        ("up", "host=1,node=3,cluster=1", "fp64"),
        ("step 0", "host=1,node=3,cluster=1;step=device", "fp64"),
        ("gather/cluster", "host=3,node=3,cluster=2", "fp64"),
        ("gather/cluster", "host=3,node=3h,cluster=1", "bf16"),
    ],
)
@alone()
def test_masters_are_changed_once_their_copies_have_left(lane, strategy, precision):
    """A copy up reads them; parameters that come down are written over masters inside them, and over the next cast; a
    step on the device writes them."""
    simdev.counting_group(0, 4)
    case = replace(CASE, precision=precision, optimizer="adamw", micro_batches=1)

    def change() -> simdev.Checker:
        with simdev.Checker() as checker, sharded(strategy, case, mesh_of(2, 2, device="simdev")) as (model, optimizer):
            backward(model, case, 0)
            optimizer.step()
            interpreter = engine_of(model).interpreter
            zm.refresh(model)
            interpreter.catch_up()  # as a forward would, unit by unit
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1)
            zm.refresh(model)
            interpreter.catch_up()
        return checker

    assert not change().races
    with without_landing(lane):
        assert change().races


def step_on_used_parameters() -> None:
    """Words that ranks agree on are waited for in the step after: until then the ticket alone keeps them."""
    blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)))
    model = zm.shard(blocks, mesh_of(2, 2, device="simdev"), "node=0,cluster=0")
    for _ in range(3):
        model(torch.ones(2, 8, device="simdev")).square().sum().backward()
        zm.zero_grad(model)


@alone()
def test_what_a_job_refers_to_is_kept_until_it_is_done():
    simdev.counting_group(0, 4)
    with simdev.Checker() as checker:
        step_on_used_parameters()
    assert not checker.early_frees and not checker.races
    with simdev.Checker() as checker, without_keeping():
        step_on_used_parameters()
    assert checker.early_frees


@alone()
def test_a_lane_that_closes_comes_before_what_is_freed_after_it():
    for close in (True, False):
        with simdev.Checker() as checker:
            lane, values = Lane("test", device=torch.device("simdev", 0)), torch.zeros(8, device="simdev")
            lane.submit(partial(values.add_, 1))
            if close:
                lane.close()
            del values
            gc.collect()
        assert bool(checker.early_frees) is not close


@alone()
def test_jobs_that_follow_one_of_the_host_are_launched_later_and_in_order():
    """Nobody is kept waiting before, and they come after the caller's work at the time of submission alone."""
    device, ran, values = torch.device("simdev", 0), list[str](), torch.zeros(8, device="simdev")
    ended, gate, others = threading.Event(), threading.Event(), torch.zeros(8, device="simdev")
    host = Lane("step", device=torch.device("cpu"))
    lane, further = (Lane(name, device=device) for name in ("gather", "gather/outer"))
    with simdev.Checker() as checker:
        host.submit(lambda: None).wait()
        before = host.submit(partial(gate.wait, 20), "step a")
        tickets = [
            lane.submit(partial(values.add_, 1), after=before),
            lane.submit(partial(ran.append, "b")),
            lane.submit(partial(ran.append, "c")),
        ]
        tickets.append(further.submit(partial(ran.append, "d"), after=tickets[1]))
        values.add_(1)  # not before the first job, for whoever submitted that
        others.add_(1)
        free = further.submit(partial(others.add_, 1), after=None)  # behind `d`
        assert not ran and not any(ticket.launched() for ticket in (*tickets, free))
        assert all(ticket.follows is before for ticket in (*tickets, free))
        gate.set()
        tickets[3].wait()
        assert ran == ["b", "d"] and tickets[3].follows is None and not tickets[2].launched()
        lane.launch()
        assert ran == ["b", "d", "c"]
        free.wait()
    assert len({race.earlier_where for race in checker.races}) == 1, checker.races
    late = lane.submit(partial(ran.append, "e"), after=host.submit(partial(ended.wait, 20)))
    lane.close()
    ended.set()
    with pytest.raises(CommunicationError, match="a job was not run: its lane has been closed"):
        late.wait()
    assert "e" not in ran


@pytest.mark.parametrize("strategy", ["host=1,node=1,cluster=1", "host=2,node=3,cluster=2", "host=3,node=3,cluster=3"])
@alone()
def test_neither_a_step_nor_the_forward_before_waits_for_a_unit_s_step_on_the_host(strategy):
    simdev.counting_group(0, 4)
    blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)))
    model = zm.shard(blocks, mesh_of(2, 2, device="simdev"), strategy, bucket_bytes=0)
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.ones(2, 8, device="simdev")
    gates, run = [threading.Event() for _ in blocks], beside._run
    left = iter(gates)

    def held(*args):
        assert next(left).wait(20)
        run(*args)

    def let_next(unit):
        assert not any(gate.is_set() for gate in gates[unit + 1 :])
        for gate in gates[unit + 1 : unit + 2]:
            gate.set()

    def end_micro_batch():
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    end_micro_batch()  # the first step makes the states, and is waited for
    with simdev.Checker() as checker:
        with mock.patch.object(beside, "_run", held):
            end_micro_batch()
        gates[0].set()
        for unit, block in enumerate(blocks):
            block.get_submodule("1").register_forward_hook(lambda *_, unit=unit: let_next(unit))
        model(batch)
        engine_of(model).at_rest()
    require_clean(checker, strategy)
    assert all(gate.is_set() for gate in gates)
