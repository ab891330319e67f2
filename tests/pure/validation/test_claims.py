"""The span of a claim's range, and the scoring of tables."""

from __future__ import annotations

from math import prod

import pytest

from validation.assumptions import Point, assumptions, open_points
from validation.claims import Claim, _claim
from validation.row import Row, predicted_row
from validation.score import score, spearman


def claim(low: float, high: float, **goal: float | bool) -> Claim:
    return Claim(paper="P", text="t", claimed=2.0, predicted=2.0, low=low, high=high, **goal)


@pytest.mark.parametrize("table", ["amsp", "paro", "frontier"])
def test_a_claim_is_predicted_at_every_combination_of_its_tables_open_points(table):
    asked: list[dict[str, str]] = []

    def predict(point: Point) -> float:
        asked.append(dict(point))
        return 1.0

    _claim("P", "t", 1.0, table, predict, "")
    of_table = [a for a in assumptions() if a.table == table]
    assert len({tuple(point.items()) for point in asked}) == len(asked) == prod(len(a.choices) for a in of_table)
    assert asked[0] == {a.name: a.value for a in of_table}


def test_the_range_and_what_moves_it_most():
    def predict(point: Point) -> float:
        return (
            1.0
            + 0.5 * (point["kernels"] == "eager")
            + {"deepspeed's": 0, "no overlap": 2, "all overlap": -0.2, "deepspeed's of 2021": 1}[point["peer_engine"]]
        )

    found = _claim("P", "t", 1.0, "amsp", predict, "")
    assert (found.predicted, found.low, found.high) == pytest.approx((1.0, 0.8, 3.5))
    assert [name for name, _, _ in found.moved_by] == ["peer_engine", "kernels"]
    assert found.moved_by[0][1:] == pytest.approx((0.8, 3.0))


def test_a_claim_is_met_by_its_whole_range_alone():
    assert claim(1.9, 2.1, tolerance=0.1).holds
    half = claim(0.98, 2.1, tolerance=0.1)
    assert half.in_range and not half.holds
    outside = claim(0.5, 1.7, tolerance=0.1)
    assert not outside.in_range and not outside.holds
    assert claim(1.96, 2.04, tolerance=0.05, absolute=True).holds
    assert not claim(1.94, 2.0, tolerance=0.05, absolute=True).holds
    # A range that is too wide meets nothing.
    assert claim(1.7, 2.5, spread=1.5).holds
    assert claim(1.6, 2.5, spread=1.5).holds is False
    assert claim(2.1, 2.5, spread=1.5).holds is False  # narrow, and elsewhere
    assert claim(0.1, 9.0).holds is None and claim(0.1, 9.0).in_range
    # Open points begin with assumptions.
    first, *others = open_points("frontier")
    assert first["micro_batch"] == "2" and first["overlap"] == "no"
    assert all(point != first for point in others)


def row(measured: float, predicted: float, group: str = "g", **fields) -> Row:
    return predicted_row(Row(table="t", label="l", group=group, unit="u", measured=measured, **fields), [predicted])


def test_scores():
    rows = [row(100, 110), row(100, 100), row(100, 500, fitted=True), row(100, 900, excluded="tensor parallelism")]
    result = score("t", rows)
    assert (result.count, result.fitted, result.excluded) == (2, 1, 1)
    assert result.worst == pytest.approx(0.1)
    assert result.median == pytest.approx(0.05)
    # Winners are counted among groups of several.
    rows = [row(1, 1, "a"), row(2, 3, "a"), row(1, 5, "b"), row(2, 3, "b"), row(9, 9, "alone")]
    assert score("t", rows).winners == (1, 2)
    # The range holds its ends and all between.
    spread = predicted_row(Row(table="t", label="l", group="g", unit="u", measured=5.0), [4.0, 6.0, 3.0])
    assert (spread.predicted, spread.low, spread.high) == (4.0, 3.0, 6.0)
    assert score("t", [spread]).in_range == 1
    # Rank correlation.
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None


TOKENS, WORLD = 4096, 8
HIDDEN, FFN, VOCAB = 4096, 11008, 32000
