"""Training on device tensors is plain training: four processes, each with a simulated device, streams and all.

Three axes are in `test_order`, whose one process finds races, and on the host in `tests/dist/engine/test_parity`.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from tests.dist.engine.test_quantised import MICRO_BATCHES, Net, off, train
from tests.dist.parity import Case, check_case, mesh_of
from tests.simdev.clean import require_documented
from tests.simdev.ranks import on_devices
from zeromesh import simdev
from zeromesh.engine import beside
from zeromesh.engine.api import engine_of
from zeromesh.files import usable_cores

CASE = Case(steps=2, micro_batches=2, optimizer="both", device="simdev")
PAIR = replace(CASE, world=2)


def check_all(strategies: list[str], case: Case, *shape: int) -> None:
    """On a rank: the numbers, beside plain training on the host; and that nothing raced on the way."""
    for strategy in strategies:
        with simdev.Checker() as checker:
            check_case(strategy, case, *shape)
        require_documented(
            checker, strategy, reads=2 + case.steps * (2 if case.weighted else 1), besides=copying(strategy)
        )


def copying(strategy: str) -> tuple[str, ...]:
    """Files that bring tensors of the host back to its memory: values at `zm.shard` and, where other gradients lie on
    the device, the factor that they are clipped by; of parts the groups that they lend."""
    shared = ("engine/steps.py:",) if "host[" in strategy or "|" in strategy else ()
    lent = ("engine/parts.py:",) if "|" in strategy else ()
    return ("engine/flat.py:", *shared, *lent) if "host" in strategy else ()


@on_devices(4)
def test_mixes_on_two_axes():
    """Each stage of either axis: the device's part, streams and their order, is decided for those. Other cases have
    sums of micro-batches."""
    inner, outer = ("0", "1", "2", "3", "3d", "3k"), ("1", "3", "0", "2", "3d", "3k")
    case = replace(CASE, micro_batches=1)
    check_all([f"node={a},cluster={b}" for a, b in zip(inner, outer, strict=True)], case, 2, 2)


@on_devices(4)
def test_other_cases():
    wire = replace(CASE, precision="bf16-wire", optimizer="adamw")
    check_all(["node=3,cluster=1"], wire, 2, 2)
    check_all(["node=0,cluster=0"], replace(wire, micro_batches=1), 2, 2)
    check_all(["node=1,cluster=2"], replace(CASE, weighted=True, evaluate=True), 2, 2)
    check_all(["node=3,cluster=3;collective=ho_ring"], CASE, 2, 2)


@on_devices(4)
def test_shards_in_the_host_s_memory():
    check_all(["host=1,node=3,cluster=1", "host=3,node=3,cluster=2"], CASE, 2, 2)
    check_all(["host=3d,node=3,cluster=3h"], replace(CASE, micro_batches=1), 2, 2)


@on_devices(2)
def test_shards_in_the_host_s_memory_that_no_second_axis_changes():
    """The last are stepped on by the device."""
    once = replace(PAIR, micro_batches=1)
    check_all(["host=2,node=1", "host[50%]=1,node=3", "node=3 | *.up: host=1,node=1"], PAIR, 2)
    check_all([f"{mix};step=device" for mix in ("host=2,node=1", "host=3d,node=3h")], once, 2)
    check_all(["host[50%]=1,node=3;step=device"], replace(once, precision="bf16-wire", steps=3), 2)
    with mock.patch.object(beside, "STREAMED_ELEMENTS", 11):  # in pieces, which cut parameters
        check_all([f"{mix};step=device" for mix in ("host=1,node=3", "host=3,node=3")], once, 2)


class Skips(nn.Module):
    """Leaves out one of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.skipped = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else x + block(x)
        return x


def mean_losses(strategy: str) -> list[float]:
    """The mean over ranks, each of which skips another block, or none; told to all between forward and backward."""
    torch.manual_seed(0)
    model = zm.shard(Skips().double(), mesh_of(2, 2, device="simdev"), strategy, bucket_bytes=0)
    optimizer, rank, means = torch.optim.AdamW(model.parameters(), lr=1e-2), dist.get_rank(), list[float]()
    for step in range(4):
        model.skipped = (rank + step) % 5
        batch = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank)).double()
        loss = model(batch.to("simdev")).square().mean()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        means.append(mean.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return means


@on_devices(4)
def test_ranks_may_skip_units_whose_refreshes_wait_for_steps_on_the_host():
    """Else one that uses a unit would wait for one that has not launched its refresh, and that one for its word."""
    run = beside._run

    def late(*args):
        time.sleep(0.01 * dist.get_rank())
        run(*args)

    with mock.patch.object(beside, "_run", late):
        assert mean_losses("host=1,node=1,cluster=1") == mean_losses("node=1,cluster=1")


class Telling(nn.Linear):
    """As models of transformers do."""

    @property
    def device(self) -> torch.device:
        return next(param.device for param in self.parameters())


@on_devices(2)
def test_a_model_whose_parameters_lie_on_the_host_tells_its_device():
    mesh = init_device_mesh("simdev", (2,), mesh_dim_names=("node",))
    model = zm.shard(nn.Sequential(Telling(4, 4)), mesh, "host=3,node=3")
    assert next(model.parameters()).device.type == "cpu"
    assert (type(model[0]).__name__, model[0].device.type) == ("Telling", "simdev")
    assert isinstance(model[0], Telling)
    threads, step = [], engine_of(model).backend.lanes["step"]
    step.submit(lambda: threads.append(torch.get_num_threads())).wait()
    assert threads == [max(torch.get_num_threads(), usable_cores() // 2)]


@on_devices(4)
def test_an_axis_that_is_a_dimension_uses_the_mesh_s_own_communicator():
    """One model at a time, though it is one of several that are free: so many models that all of them are in use."""
    mesh = mesh_of(2, 2, device="simdev")
    models = [zm.shard(nn.Linear(8, 8), mesh, "node=3,cluster=1") for _ in range(6)]
    for axis in ("node", "cluster"):
        lines = [engine_of(model).backend.groups[axis] for model in models]
        used = [channel.process_group for line in lines for channel in (line.gather, line.reduce)]
        assert used.count(mesh.get_group(axis)) == 1 and len(set(used)) == len(used)


# ---- Quantised wires and error feedback on devices that have no Triton: torch's operations code on the device itself


TO_THE_BIT = ["node=3@int8/int4+ef,cluster=3k@int8/int4+ef", "node=2@int8[64]/int4[32]+ef,cluster=0@/int8+ef"]
"""All roundings to nearest, so that nothing is drawn."""

WITHIN_BOUNDS = ["node=3d@int8/int8,cluster=1@/int4", "node=0@/int8,cluster=2@/int4"]
"""Sums are rounded at random, by the device's own draws."""


@on_devices(4)
def test_training_is_that_of_the_host_to_the_bit():
    """Losses of steps in which each message, kept copy and residual takes part, and masters at the end."""
    torch.manual_seed(0)
    base = Net(num_blocks=4)
    for strategy in TO_THE_BIT:
        on_host = zm.shard(copy.deepcopy(base), mesh_of(2, 2), strategy)
        expected = train(on_host, steps=3)
        with simdev.Checker() as checker:
            model = zm.shard(copy.deepcopy(base), mesh_of(2, 2, device="simdev"), strategy)
            with zm.traffic_report(model, micro_batches=MICRO_BATCHES) as traffic:
                assert train(model, steps=3) == expected, strategy
            for param, other in zip(model.parameters(), on_host.parameters(), strict=True):
                assert torch.equal(param.local.cpu(), other.local), (strategy, param.full_name)
            report = zm.memory_report(model)
        # Where no parameters are sharded, the words of all steps but the first are not waited for.
        require_documented(checker, strategy, reads=2 + (3 if "=3" in strategy else 1))
        for line in report:
            assert line.predicted_bytes == line.allocated_bytes, strategy
        assert sum(engine_of(model).schedule.memory.workspace.values()) > 0
        for line in traffic.lines(steps=3):  # the first refresh has nothing to do
            assert 0.7 * line.predicted_bytes <= line.sent_bytes <= line.predicted_bytes


@on_devices(4)
def test_gradients_are_within_the_bound_of_their_axes():
    for strategy in WITHIN_BOUNDS:
        with simdev.Checker() as checker:
            worst, zeros = off(strategy, 2, 2, device="simdev")
        assert worst <= 1 < zeros, (strategy, worst)
        require_documented(checker, strategy, reads=2 + 1)
