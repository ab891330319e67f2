"""Runs that go on: meshes for other numbers of ranks, and remedies for steps that are not finite."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.errors import MeshError, NonFiniteError
from zeromesh.integrations.elastic import NonFinite, resize_mesh


def test_so_many_in_a_row_or_in_all_and_no_more() -> None:
    counts = NonFinite(remedy="skip", most_in_a_row=2)
    for _ in range(3):
        assert [counts.judge(""), counts.judge("")] == ["skip", "skip"]
        counts.finite()
    counts.judge("")
    counts.judge("")
    with pytest.raises(NonFiniteError, match=r"step 9: x: number 3 in a row, and nonfinite_in_a_row = 2"):
        counts.judge("step 9: x")
    counts = NonFinite(remedy="rollback", most_in_all=2)
    for step in (4, 9):
        assert counts.judge("") == "rollback"
        counts.rolled_back(step, to=step - 1)
        counts.finite()
    with pytest.raises(NonFiniteError, match=r"number 3 of this run, and nonfinite_in_all = 2"):
        counts.judge("")
    # The error of a stop says how to go on.
    with pytest.raises(NonFiniteError, match=r"step 3: x\. The optimizer has not stepped.*nonfinite = \"skip\""):
        NonFinite().judge("step 3: x")


def test_what_is_left_out_comes_back_from_a_checkpoint() -> None:
    counts = NonFinite()
    assert [counts.batch(step) for step in (0, 7)] == [0, 7]
    counts.rolled_back(7, to=5)  # batches 5, 6 and 7
    assert counts.batch(5) == 8
    counts.rolled_back(6, to=5)  # of those that followed, 8 and 9
    assert counts.batch(5) == 10
    # Counts come back from a checkpoint.
    counts, other = NonFinite(skipped=1, rollbacks=2, in_a_row=3, left_out=4), NonFinite(skipped=9)
    other.restore(counts.state())
    assert other == counts
    other.restore({})
    assert other == NonFinite()


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
