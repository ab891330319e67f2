"""Which machine each rank is on, and meshes that fit it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from zeromesh.errors import MeshError
from zeromesh.measure.places import require_places, wrong_order

TWO_OF_FOUR = ["a"] * 4 + ["b"] * 4


@pytest.mark.parametrize(
    ("mesh", "machines"),
    [
        ({"cluster": 2, "node": 4}, TWO_OF_FOUR),
        ({"cluster": 2, "node": 2, "package": 2}, TWO_OF_FOUR),
        ({"node": 8}, TWO_OF_FOUR),
        ({"cluster": 4, "node": 2}, ["a"] * 8),
        ({"cluster": 2, "node": 4}, [*"aabbccdd"]),  # both join machines
        ({"cluster": 2, "spare": 1, "node": 4}, TWO_OF_FOUR),
        ({"node": 1}, ["a"]),
    ],
)
def test_machines_in_order(mesh, machines):
    assert wrong_order(mesh, machines) == ""


@pytest.mark.parametrize(
    ("mesh", "machines", "inner", "outer"),
    [
        ({"node": 4, "cluster": 2}, [*"abababab"], "cluster", "node"),  # numbered round robin
        ({"cluster": 2, "node": 4}, [*"abababab"], "node", "cluster"),
        ({"node": 2, "cluster": 4}, [*"abcdabcd"], "cluster", "node"),
        ({"cluster": 2, "node": 2, "package": 2}, [*"abababab"], "package", "node"),
    ],
)
def test_an_inner_axis_that_joins_machines(mesh, machines, inner, outer):
    assert f"axis {inner} joins machines, and axis {outer}, outside of it" in wrong_order(mesh, machines)


def verdicts(meshes: list[dict[str, int]], machines: str) -> list[str]:
    """The verdict that each of several ranks gets; they meet in a store."""
    store = dist.HashStore()

    def told(rank: int) -> str:
        try:
            require_places(meshes[rank], store, rank, len(meshes), machine=machines[rank])
        except MeshError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(meshes)) as threads:
        return list(threads.map(told, range(len(meshes))))


def test_all_ranks_are_told():
    mesh = {"cluster": 2, "node": 2}
    assert verdicts([mesh] * 4, "aabb") == [""] * 4
    wrong = verdicts([mesh] * 4, "abab")
    assert len(set(wrong)) == 1 and "in mesh cluster=2,node=2 axis node joins machines" in wrong[0]
    other = verdicts([mesh, mesh, {"node": 2, "cluster": 2}, mesh], "aabb")
    assert len(set(other)) == 1 and "rank 0 has cluster=2,node=2, rank 2 has node=2,cluster=2" in other[0]
