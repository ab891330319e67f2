"""Curves of a run: where their points lie, and what becomes of long ones and of values that are not numbers."""

from __future__ import annotations

import math

import pytest

from zeromesh.report.curves import MOST, Series, curve_chart
from zeromesh.report.page import CurveChart


def chart(places: list[int], *values: list[float], from_zero: bool = True) -> CurveChart | None:
    series = [Series(name=f"s{i}", colour="compute", values=some) for i, some in enumerate(values)]
    return curve_chart("key", "title", places, series, "{:.3g}".format, x_name="step", from_zero=from_zero)


def test_points_lie_on_the_axes_that_are_drawn() -> None:
    found = chart([10, 20, 30], [2.0, 4.0, 1.0], [math.nan, 3.0, math.nan])
    assert found is not None
    first, second = found.curves
    zero, four = (tick.at for tick in found.y_ticks if tick.label in ("0", "4"))
    assert zero == 100.0 and first.line[1] == (50.0, pytest.approx(four))
    assert [x for x, _ in first.line] == [0.0, 50.0, 100.0]
    assert second.line == ((50.0, pytest.approx((zero + 3 * four) / 4)),)
    assert [span.label for span in found.spans] == ["step 10: s0 2", "step 20: s0 4, s1 3", "step 30: s0 1"]
    assert sum(span.width for span in found.spans) == pytest.approx(100)
    assert not found.caption and not first.band


def test_a_long_run_is_shown_by_means_and_what_they_lie_between() -> None:
    count = 7 * MOST + 3
    found = chart(list(range(1, count + 1)), [float(i % 7) for i in range(count)], from_zero=False)
    assert found is not None
    (curve,) = found.curves
    assert len(curve.line) <= MOST and len(found.spans) == len(curve.line) and len(curve.band) == 2 * len(curve.line)
    assert found.caption.startswith("Each point is the mean of 8 steps")
    assert found.spans[0].label == "steps 1 to 8: s0 2.62 (0 to 6)"


def test_what_is_no_finite_number_is_left_out() -> None:
    assert chart([1, 2], [math.nan, math.inf]) is None
    found = chart([1], [math.inf], [5.0])
    assert found is not None and [curve.name for curve in found.curves] == ["s1"]
    assert found.curves[0].line[0][0] == 0.0
