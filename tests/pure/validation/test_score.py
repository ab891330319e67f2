import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.row import Row, predicted_row
from validation.score import percentile, score, spearman


def row(measured: float, predicted: float, group: str = "g", **fields) -> Row:
    return predicted_row(Row(table="t", label="l", group=group, unit="u", measured=measured, **fields), [predicted])


def test_fitted_and_excluded_rows_count_for_nothing():
    rows = [row(100, 110), row(100, 100), row(100, 500, fitted=True), row(100, 900, excluded="tensor parallelism")]
    result = score("t", rows)
    assert (result.count, result.fitted, result.excluded) == (2, 1, 1)
    assert result.worst == pytest.approx(0.1)
    assert result.median == pytest.approx(0.05)


def test_winners_are_counted_among_groups_of_several():
    rows = [row(1, 1, "a"), row(2, 3, "a"), row(1, 5, "b"), row(2, 3, "b"), row(9, 9, "alone")]
    assert score("t", rows).winners == (1, 2)


def test_the_range_holds_what_it_spans():
    spread = predicted_row(Row(table="t", label="l", group="g", unit="u", measured=5.0), [4.0, 6.0, 3.0])
    assert (spread.predicted, spread.low, spread.high) == (4.0, 3.0, 6.0)
    assert score("t", [spread]).in_range == 1


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_between_its_neighbours(values, share):
    ordered = sorted(values)
    assert ordered[0] <= percentile(ordered, share) <= ordered[-1]
    assert percentile(ordered, 0) == ordered[0]
    assert percentile(ordered, 1) == ordered[-1]
