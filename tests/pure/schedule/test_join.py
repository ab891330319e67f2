"""Which units are joined where no parameters are sharded, and what a joined unit is."""

from __future__ import annotations

import pytest

from zeromesh.schedule import FlatBuffer, Role, Unit, join_units, neighbours
from zeromesh.schedule.unit import join

FROZEN = FlatBuffer(numel=7, param_dtype="bf16", master_dtype=None)


def unit(name: str, numel: int = 10, role: Role = Role.BLOCK, *more: FlatBuffer) -> Unit:
    """20 bytes, unless told otherwise."""
    return Unit(name=name, role=role, buffers=(FlatBuffer(numel=numel, param_dtype="bf16", master_dtype="fp32"), *more))


@pytest.mark.parametrize(
    ("bucket_bytes", "groups"),
    [
        (0, [[0], [1], [2], [3], [4]]),
        (20, [[0], [1], [2], [3], [4]]),
        (21, [[0, 1], [2, 3], [4]]),
        (41, [[0, 1, 2], [3, 4]]),
        (1000, [[0, 1, 2, 3, 4]]),
    ],
)
def test_neighbours_are_joined_until_the_bucket_is_full(bucket_bytes: int, groups: list[list[int]]) -> None:
    units = [unit(""), *(unit(f"layers.{index}") for index in range(4))]
    assert neighbours(units, bucket_bytes) == groups


def test_units_inside_others_stay_as_they_are() -> None:
    units = [unit(""), unit("a"), unit("b"), unit("b.inner"), unit("c"), unit("d")]
    assert neighbours(units, 1000) == [[0, 1], [2], [3], [4, 5]]


def test_a_joined_unit_has_one_buffer_of_a_kind() -> None:
    joined = join([unit("embed", 3, Role.RESIDENT), unit("layers.0", 10, Role.BLOCK, FROZEN), unit("layers.1", 10)])
    assert joined.name == "embed to layers.1"
    assert joined.role is Role.RESIDENT
    assert [(buffer.numel, buffer.trainable) for buffer in joined.buffers] == [(23, True), (7, False)]
    assert join([joined]) == joined


def test_a_small_root_goes_with_the_first_units_and_a_large_one_stays() -> None:
    units = [unit("", 5), *(unit(f"layers.{index}") for index in range(4))]
    joined, groups = join_units(units, 41)
    assert groups == [[0, 1, 2], [3, 4]]
    assert [(one.name, one.buffers[0].numel) for one in joined] == [("", 25), ("layers.2 to layers.3", 20)]
    assert join_units([unit("", 21), *units[1:]], 42)[1][0] == [0]
