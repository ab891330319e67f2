"""Order of launch over several communicators: the device orders collectives by it, and ranks may hang."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from tests.simdev.clean import require_clean
from tests.simdev.deadlocks import Launch, may_hang
from tests.simdev.ranks import alone
from zeromesh import simdev
from zeromesh.engine.api import engine_of
from zeromesh.simdev.device import LaunchOrder

ORDERS: tuple[LaunchOrder, ...] = ("none", "implicit")


@pytest.mark.parametrize("order", ORDERS)
@alone()
def test_a_collective_begins_after_those_launched_before_it_have_begun(order):
    """So it comes after the work of their streams before them, but not after these collectives themselves."""
    simdev.counting_group(0, 2)
    values, words = torch.zeros(8, device="simdev"), torch.zeros(8, device="simdev")
    torch.accelerator.synchronize()
    first, second = torch.Stream("simdev"), torch.Stream("simdev")
    with simdev.Checker() as checker, simdev.launch_order(order):
        with first:
            values.add_(1)
            dist.all_reduce(words)
        with second:
            dist.all_reduce(values)
            found = len(checker.races)
            dist.all_reduce(words)
    assert bool(found) == (order == "none")
    assert len(checker.races) > found


def launches(rank: int, order: LaunchOrder) -> list[Launch]:
    """Launches of two steps on this rank of a plane of four, whose lines have names of their own."""
    simdev.counting_group(rank, 4)
    mesh = init_device_mesh("simdev", (2, 2), mesh_dim_names=("cluster", "node"))
    line = {"node": rank // 2, "cluster": rank % 2}
    heard = list[simdev.recorder.Entry]()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    with simdev.Checker() as checker, simdev.launch_order(order):
        model = zm.shard(model, mesh, "node=3,cluster=1")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with simdev.Recorder(heard.append):
            for _ in range(2):
                model(torch.ones(2, 8, device="simdev")).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            engine_of(model).at_rest()
    require_clean(checker, order)
    dist.destroy_process_group()
    found = [entry for entry in heard if isinstance(entry, simdev.Collective)]
    axis = {name: next((axis for axis in line if axis in name), "") for name in {entry.group for entry in found}}
    return [(f"{entry.group} {line.get(axis[entry.group], '')}", entry.stream) for entry in found]


@pytest.mark.parametrize("order", ORDERS)
@alone()
def test_ranks_that_step_do_not_wait_for_each_other_for_ever(order):
    """In the order of launch a device may have room for one collective; without, for one of each lane."""
    programs = [launches(rank, order) for rank in range(4)]
    streams = {stream for _, stream in programs[0]}
    assert len(streams) > 3 and len({name for program in programs for name, _ in program}) > 6
    assert not may_hang(programs, order, room=1 if order == "implicit" else len(streams))


def test_where_ranks_hang() -> None:
    alike = partial(may_hang, [[("gather", 1), ("reduce", 2)]] * 2)
    assert not alike("implicit", room=1) and not alike("none", room=2)
    assert alike("none", room=1)  # each rank may have given its place to another collective
    # Ranks that launch in different orders: one keeps the last of its three behind the second, which waits in its
    # stream for the first; the other begins with the last.
    crossed = partial(may_hang, [[("a", 1), ("b", 1), ("c", 2)], [("c", 1), ("a", 1), ("b", 1)]])
    assert crossed("implicit", room=3) and not crossed("none", room=3)
