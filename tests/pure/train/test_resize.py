"""A mesh for other numbers of ranks: inner axes keep what divides, and the strategy still fits."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.errors import MeshError
from zeromesh.integrations.elastic import resize_mesh


@pytest.mark.parametrize(
    ("mesh", "world", "expected"),
    [
        ({"cluster": 4, "node": 8}, 24, {"cluster": 3, "node": 8}),  # a node is lost
        ({"cluster": 4, "node": 8}, 28, {"cluster": 4, "node": 7}),  # a device of each
        ({"cluster": 4, "node": 8}, 40, {"cluster": 5, "node": 8}),  # one came
        ({"cluster": 2, "node": 2}, 3, {"cluster": 3, "node": 1}),
        ({"cluster": 2, "node": 2}, 1, {"cluster": 1, "node": 1}),
        ({"node": 4}, 3, {"node": 3}),
        ({"site": 2, "cluster": 2, "node": 4}, 12, {"site": 3, "cluster": 1, "node": 4}),
    ],
)
def test_examples(mesh: dict[str, int], world: int, expected: dict[str, int]) -> None:
    resized = resize_mesh(mesh, world, "hsdp" if len(mesh) > 1 else "node=3")
    assert list(resized.items()) == list(expected.items())


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), world=st.integers(1, 64))
def test_every_world_has_a_mesh(sizes: list[int], world: int) -> None:
    mesh = {f"axis{number}": size for number, size in enumerate(sizes)}
    resized = resize_mesh(mesh, world, None)
    assert list(resized) == list(mesh)
    assert prod(resized.values()) == world
    assert all(resized[name] <= mesh[name] for name in list(mesh)[1:])
    assert prod(sizes) != world or resized == mesh or any(world % size for size in sizes)


def test_strategy_with_sizes_takes_the_next_that_it_fits() -> None:
    """6 = 3 x 2 would be preferred, but groups of 2 must divide the node."""
    assert resize_mesh({"cluster": 2, "node": 4}, 6, "node[2]=3,node[*]=1,cluster=0") == {"cluster": 3, "node": 2}
    with pytest.raises(MeshError, match=r"cluster=2 x node=4 cannot be re-sized to 3 ranks for .*: .*multiple of 2"):
        resize_mesh({"cluster": 2, "node": 4}, 3, "node[2]=3,node[*]=1,cluster=0")
