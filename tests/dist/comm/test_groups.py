"""Groups: which ranks an axis joins, on split axes, sub-meshes and meshes that are not in rank order."""

from __future__ import annotations

import gc
import os
import types
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeromesh as zm
from tests.dist.parity import mesh_of
from tests.dist.pool import Pool, kept, on_ranks
from zeromesh.comm import groups
from zeromesh.comm.collectives import all_gather
from zeromesh.comm.exchange import AxisGroup, Exchange
from zeromesh.comm.groups import borrow_channel, make_groups
from zeromesh.errors import CommunicationError, MeshError
from zeromesh.strategy import Layout

TWO = ("node=3,cluster=1", ("node", 2), ("cluster", 2))


def axes(strategy: str, *sizes: tuple[str, int]):
    return Layout.of(strategy, sizes).axes


def ranks_by_axis(strategy, sizes):
    """Each axis's ranks, checked by a gather of the ranks themselves."""
    names, shape = zip(*reversed(sizes), strict=True)
    mesh = kept(init_device_mesh, "cpu", shape, mesh_dim_names=names)
    made = make_groups(mesh, axes(strategy, *sizes))
    for group in made.values():
        region = torch.full((group.size,), -1)
        region[group.rank] = dist.get_rank()
        all_gather(region, group)
        assert tuple(region.tolist()) == group.ranks
    return {name: group.ranks for name, group in made.items()}


@pytest.mark.parametrize(
    ("strategy", "sizes", "rank", "expected"),
    [
        ("node=3,cluster=1", (("node", 2), ("cluster", 3)), 3, {"node": (2, 3), "cluster": (1, 3, 5)}),
        ("node=3,cluster=0", (("node", 1), ("cluster", 2)), 1, {"cluster": (0, 1)}),
        (
            "node[2]=3,node[2]=2,cluster=1",
            (("node", 4), ("cluster", 2)),
            6,
            {"node[2]": (6, 7), "node[2]#2": (4, 6), "cluster": (2, 6)},
        ),
    ],
)
def test_ranks_of_each_axis(pool: Pool, strategy, sizes, rank, expected):
    world = 1
    for _, size in sizes:
        world *= size
    assert pool.run(world, ranks_by_axis, strategy, sizes)[rank] == expected


@on_ranks(4)
def test_a_part_of_a_larger_mesh():
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outside", "node"))
    group = make_groups(whole["node"], axes("node=3", ("node", 2)))["node"]
    first = dist.get_rank() // 2 * 2
    assert group.ranks == (first, first + 1)
    assert group.rank == dist.get_rank() % 2


@on_ranks(3)
def test_a_mesh_in_another_order_than_the_ranks():
    mesh = DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("line",))
    group = make_groups(mesh, axes("line=3", ("line", 3)))["line"]
    assert group.ranks == (2, 0, 1)
    region = torch.full((3,), -1)
    region[group.rank] = dist.get_rank()
    all_gather(region, group)
    assert region.tolist() == [2, 0, 1]


@on_ranks(2)
def test_an_axis_must_fit_its_dimension():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("line",))
    with pytest.raises(MeshError, match="axis line has 4 ranks 1 apart; line has 2"):
        make_groups(mesh, axes("line=3", ("line", 4)))
    with pytest.raises(MeshError, match="axis node needs mesh dimension 'node'; the mesh has line"):
        make_groups(mesh, axes("node=3", ("node", 2)))


# ---- names


def train_a_little(mesh: DeviceMesh, strategy: str) -> None:
    model = zm.shard(torch.nn.Linear(8, 8), mesh, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    model(torch.ones(2, 8))


@on_ranks(4, timeout_s=100)
def test_ranks_need_not_have_made_as_many_groups():
    dist.new_group([0])  # which one rank has
    train_a_little(init_device_mesh("cpu", (2, 2), mesh_dim_names=("cluster", "node")), "node=3,cluster=1")
    channel, give_back = borrow_channel(dist.group.WORLD, timeout_s=100)
    found = [None] * 4
    dist.all_gather_object(found, dist.get_rank(), group=channel.process_group)
    assert found == [0, 1, 2, 3]
    give_back()


@pytest.mark.parametrize("sizes", [(("node", 2),), (("cluster", 1), ("node", 2))], ids=["line", "plane"])
@on_ranks(4, timeout_s=100)
def test_a_model_on_a_part_of_the_ranks_and_then_one_on_all(sizes):
    names, shape = zip(*sizes, strict=True)
    whole = init_device_mesh("cpu", (2, *shape), mesh_dim_names=("outside", *names))
    if dist.get_rank() < 2:
        train_a_little(whole[names], ",".join(f"{name}=3" for name in reversed(names)))
    train_a_little(init_device_mesh("cpu", (2, 2), mesh_dim_names=("cluster", "node")), "node=3,cluster=1")


@on_ranks(4)
def test_only_meshes_of_all_ranks_split_a_world_that_is_bound_to_a_device():
    """NCCL splits a communicator on all of its ranks or hangs; those outside a smaller mesh make none."""
    world, bound = dist.group.WORLD, []
    make = dist.distributed_c10d._new_process_group_helper

    def watched(*args, **kwargs):
        bound.append((world.bound_device_id, kwargs.get("device_id")))
        world.bound_device_id = None  # gloo has no device to be bound to
        kwargs["device_id"] = None
        return make(*args, **kwargs)

    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cluster", "node"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("line",))
    device = torch.device("cuda", 0)
    with patch.object(dist.distributed_c10d, "_new_process_group_helper", watched):
        try:
            for mesh, split in ((line, True), (whole["node"], False)):
                world.bound_device_id = device
                groups.mesh_group(mesh)
                bound.clear()
                (name,) = mesh.mesh_dim_names or ()
                held = make_groups(mesh, axes(f"{name}=3", (name, mesh.size())), timeout_s=17.0 + split)
                assert held and bound[0] == ((device, device) if split else (None, None))
        finally:
            world.bound_device_id = None


# ---- reuse


def processes(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Those of an axis's groups that nobody holds any more on return."""
    group = make_groups(mesh, axes("line=3", ("line", mesh.size())))["line"]
    region = torch.full((group.size,), 1.0)
    all_gather(region, group)
    return group.gather.process_group, group.reduce.process_group


def freed(group: AxisGroup) -> None:
    """Asserts that only the caller holds the group: else it would not be offered."""
    holders = [holder for holder in gc.get_referrers(group) if not isinstance(holder, types.FrameType)]
    assert not holders, holders


@on_ranks(2)
def test_groups_that_nobody_uses_are_used_again():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("line",))
    first = processes(mesh)
    assert processes(mesh) == first
    held = make_groups(mesh, axes("line=3", ("line", 2)))["line"]
    assert (held.gather.process_group, held.reduce.process_group) == first
    assert not set(processes(mesh)) & set(first), "two users at once"


@on_ranks(2)
def test_ranks_that_do_not_free_theirs_at_once_make_new_ones():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("line",))
    held = [make_groups(mesh, axes("line=3", ("line", 2)))["line"] for _ in range(2)]
    before = [{group.gather.process_group, group.reduce.process_group} for group in held]
    del held[dist.get_rank()]
    found = make_groups(mesh, axes("line=3", ("line", 2)))["line"]
    assert not {found.gather.process_group, found.reduce.process_group} & (before[0] | before[1])
    region = torch.full((2,), float(dist.get_rank()))
    all_gather(region, found)
    assert region.tolist() == [0, 1]


@on_ranks(4)
def test_a_rank_that_frees_late_keeps_the_others_in_step():
    """A rank that used old ones again while others made new ones would wait for them for ever."""
    mesh, two = mesh_of(2, 2), axes(*TWO)
    make_groups(mesh, two)
    held = []
    for late in (1, 2, 3, 0):
        line = make_groups(mesh, two)
        if dist.get_rank() == late:
            held.append(line)
        for group in line.values():
            region = torch.full((group.size,), -1)
            region[group.rank] = dist.get_rank()
            all_gather(region, group)
            assert tuple(region.tolist()) == group.ranks
        del line, group


@on_ranks(2)
def test_groups_are_not_used_again_after_a_collective_that_only_some_ranks_began():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("line",))
    group = make_groups(mesh, axes("line=3", ("line", 2)))["line"]
    before = group.gather.process_group, group.reduce.process_group
    if dist.get_rank() == 0:
        Exchange(group, group.gather, "all_gather", 2).post_send(torch.zeros(1), 1)  # which nobody receives
    freed(group)
    del group
    dist.barrier()
    again = processes(mesh)
    assert before[0] not in again, "the message that is on its way would be received"
    assert before[1] in again, "nothing was the matter with the other"


@on_ranks(2)
def test_groups_are_not_used_again_after_a_failure():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("line",))
    group = make_groups(mesh, axes("line=3", ("line", 2)), timeout_s=3.0)["line"]
    before = group.gather.process_group
    with pytest.raises(CommunicationError):
        Exchange(group, group.gather, "all_gather", 2).post_recv(torch.zeros(1), 1 - dist.get_rank())()
    gc.collect()  # the error holds its frames, and they the group
    freed(group)
    del group
    dist.barrier()
    found = make_groups(mesh, axes("line=3", ("line", 2)), timeout_s=3.0)["line"]
    assert before not in (found.gather.process_group, found.reduce.process_group)


@on_ranks(4)
def test_models_one_after_the_other_leave_no_groups_behind():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cluster", "node"))

    def train() -> int:
        model = zm.shard(torch.nn.Linear(8, 8), mesh, "node=3,cluster=1")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        return len(torch.distributed.distributed_c10d._world.pg_names)

    first = train()
    assert [train() for _ in range(3)] == [first] * 3


def threads_after_a_step() -> int:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("node",))
    model = zm.shard(torch.nn.Linear(8, 8), mesh, "node=3")
    model(torch.ones(2, 8)).sum().backward()
    model.weight.sum().item()
    return len(os.listdir("/proc/self/task"))


def test_a_process_group_that_is_gone_leaves_no_threads(pool):
    """Each of gloo's has three, which wake up a hundred times a second."""
    found = [pool.run(2, threads_after_a_step, timeout_s=100.0 + call) for call in range(3)]
    assert found[0] == found[1] == found[2]


# ---- on a device


@on_ranks(4)
def test_a_device_s_groups_have_its_backend_alone_and_are_connected_as_they_are_made():
    """In one order on all ranks, gathers before reductions; those that are used again are not connected again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cluster", "node"))
    made, sent = [], []
    make, all_reduce = groups._new_group, dist.all_reduce

    def on_gloo(key, serial, description, parent):
        made.append((description, key.backend, parent))
        return make(key._replace(backend="gloo", options=None), serial, description)

    def watched(tensor, *, group):
        sent.append((tensor.numel(), tuple(dist.get_process_group_ranks(group))))
        all_reduce(tensor, group=group)

    with (
        patch.object(groups, "backend_of", lambda group, device_type: "nccl"),
        patch.object(groups, "_new_group", on_gloo),
        patch.object(dist, "all_reduce", watched),
        patch.object(groups, "_machines", lambda everyone: dict(enumerate("aabb"))),
        patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA H200"),
    ):
        groups.mesh_group(mesh)
        made.clear()
        sent.clear()
        held = make_groups(mesh, axes(*TWO), timeout_s=23.0)
        expected = [(f"{axis} {use}", "nccl") for axis in ("node", "cluster") for use in ("gather", "reduce")]
        assert [(description, backend) for description, backend, _ in made] == expected
        # Between machines, and not inside one, the two share buffers.
        assert [parent for *_, parent in made] == [None, None, None, held["cluster"].gather.process_group]
        assert sent == [(1, held[name].ranks) for name in ("node", "node", "cluster", "cluster")]
        del held
        make_groups(mesh, axes(*TWO), timeout_s=23.0)
        assert len(made) == len(sent) == 4
