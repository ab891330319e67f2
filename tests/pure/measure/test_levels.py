"""Levels from divisions of the ranks and from measured distances."""

from __future__ import annotations

from itertools import combinations

import pytest

from zeromesh.measure.levels import Partition, close_parts, levels_of


def test_divisions_of_ranks_are_levels():
    hosts, leaves = (
        Partition(source=by, parts=tuple(text)) for by, text in (("hosts", "aabbccdd"), ("pairs", "aaaabbbb"))
    )
    found = levels_of(8, [hosts, leaves], node=2)
    assert found.mesh == {"cluster": 2, "switch": 2, "node": 2} and list(found.mesh) == ["cluster", "switch", "node"]
    assert found.sources == {"node": "hosts", "switch": "pairs", "cluster": "all ranks"} and not found.missing


def test_what_is_no_level_is_said():
    odd = Partition(source="leaf switches", parts=tuple("aaab"))
    pairs, threes = (Partition(source=f"by {n}", parts=tuple(rank // n for rank in range(12))) for n in (2, 3))
    assert levels_of(4, [odd], node=4).missing == (
        "leaf switches: 2 parts that are no equal blocks of neighbouring ranks: no level",
    )
    found = levels_of(12, [pairs, threes], node=12)
    assert found.mesh == {"node": 6, "package": 2} and "do not fit into those of 2" in found.missing[0]
    assert levels_of(4, [Partition(source="hosts", parts=tuple("abcd"))], node=1).mesh == {"cluster": 4}


def tree_distances(*sizes: int) -> dict[tuple[int, int], float]:
    """Of a tree's leaves, innermost size first: each level is four times as far, give or take a seventh."""
    world, found = 1, {}
    for size in sizes:
        world *= size
    for one, other in combinations(range(world), 2):
        inside, level = 1, 0
        while one // inside != other // inside:
            inside *= sizes[level]
            level += 1
        found[one, other] = 4.0**level * (1 + ((one * 7 + other) % 5 - 2) / 15)
    return found


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4), (2, 2, 2), (8,)])
def test_measured_distances_make_the_tree_that_they_come_from(sizes):
    distances, world = tree_distances(*sizes), len(set(sum(tree_distances(*sizes), ())))
    parts = close_parts(range(world), distances)
    blocks = sorted(len(each[0]) for each in parts)
    assert blocks == ([] if len(sizes) == 1 else [sizes[0]] if len(sizes) == 2 else [2, 4])
