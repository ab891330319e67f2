"""Groups: which ranks an axis joins, on split axes, sub-meshes and meshes that are not in rank order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.dist.pool import Pool, kept, on_ranks
from zeromesh.comm import all_gather, make_groups
from zeromesh.errors import MeshError
from zeromesh.strategy import Layout


def axes(strategy: str, *sizes: tuple[str, int]):
    return Layout.of(strategy, sizes).axes


def ranks_by_axis(strategy, sizes):
    """Each axis's ranks, checked by a gather of the ranks themselves."""
    names, shape = zip(*reversed(sizes), strict=True)
    mesh = kept(init_device_mesh, "cpu", shape, mesh_dim_names=names)
    groups = make_groups(mesh, axes(strategy, *sizes))
    for group in groups.values():
        region = torch.full((group.size,), -1)
        region[group.rank] = dist.get_rank()
        all_gather(region, group)
        assert tuple(region.tolist()) == group.ranks
    return {name: group.ranks for name, group in groups.items()}


@pytest.mark.parametrize(
    ("strategy", "sizes", "rank", "expected"),
    [
        ("node=3,cluster=1", (("node", 2), ("cluster", 2)), 1, {"node": (0, 1), "cluster": (1, 3)}),
        ("node=3,cluster=1", (("node", 2), ("cluster", 3)), 3, {"node": (2, 3), "cluster": (1, 3, 5)}),
        ("node[2]=3,node[*]=1", (("node", 6),), 3, {"node[0]": (2, 3), "node[1]": (1, 3, 5)}),
        ("node=3,cluster=0", (("node", 1), ("cluster", 2)), 1, {"cluster": (0, 1)}),
        (
            "node[2]=3,node[2]=2,cluster=1",
            (("node", 4), ("cluster", 2)),
            6,
            {"node[0]": (6, 7), "node[1]": (4, 6), "cluster": (2, 6)},
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
