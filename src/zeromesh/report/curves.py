"""Quantities over the course of a run, as curves for a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from zeromesh.report.page import Curve, CurveChart, Span, Tick

MOST = 300
"""Most points of a curve: a screen shows no more, and the page of a long run stays small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    colour: str  # a class of the page's style
    values: Sequence[float]  # one per place; NaN or infinite if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """The finite values of neighbouring places: position, mean, smallest and largest."""

    x: float
    mean: float
    low: float
    high: float


def curve_chart(
    key: str,
    title: str,
    places: Sequence[int],
    series: Sequence[Series],
    write: Callable[[float], str],
    *,
    from_zero: bool = False,
) -> CurveChart | None:
    """Makes a chart of series over the same steps. Returns None if no value is finite.

    Args:
        key: id on the page.
        places: the values' steps, rising.
        write: formats a value for people.
        from_zero: True if the axis of values begins at 0.
    """
    size = -(-len(places) // MOST) or 1
    groups = [range(start, min(start + size, len(places))) for start in range(0, len(places), size)]
    found = [[_point(places, one.values, group) for group in groups] for one in series]
    known = [point for points in found for point in points if point]
    if not known:
        return None
    low, high = _range(known, from_zero=from_zero)
    first, last = places[0], max(places[-1], places[0] + 1)

    def x(place: float) -> float:
        return 100 * (place - first) / (last - first)

    def y(value: float) -> float:
        return 100 * (high - value) / (high - low)

    def curve(one: Series, points: Sequence[_Point | None]) -> Curve:
        there = [point for point in points if point]
        band = [(x(p.x), y(p.high)) for p in there] + [(x(p.x), y(p.low)) for p in reversed(there)]
        return Curve(
            name=one.name,
            colour=one.colour,
            line=tuple((x(p.x), y(p.mean)) for p in there),
            band=tuple(band) if size > 1 else (),
        )

    middles = [x((places[group[0]] + places[group[-1]]) / 2) for group in groups]
    edges = [0.0, *((one + other) / 2 for one, other in pairwise(middles)), 100.0]
    return CurveChart(
        key=key,
        title=title,
        curves=tuple(curve(one, points) for one, points in zip(series, found, strict=True) if any(points)),
        spans=tuple(
            Span(
                kind="spot",
                left=left,
                width=right - left,
                label=_label([places[i] for i in group], series, [points[n] for points in found], write),
            )
            for n, (group, (left, right)) in enumerate(zip(groups, pairwise(edges), strict=True))
        ),
        x_ticks=tuple(Tick(at=x(n), label=f"{n:,.0f}") for n in round_values(first, last) if n == round(n)),
        y_ticks=tuple(Tick(at=y(n), label=write(n)) for n in round_values(low, high)),
        caption=f"Each point is the mean of {size} steps; they lie in the band." if size > 1 else "",
    )


def round_values(low: float, high: float) -> list[float]:
    """Returns four to nine round values between two values."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 8)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


def _point(places: Sequence[int], values: Sequence[float], group: range) -> _Point | None:
    there = [i for i in group if math.isfinite(values[i])]
    if not there:
        return None
    found = [values[i] for i in there]
    return _Point(x=fmean(places[i] for i in there), mean=fmean(found), low=min(found), high=max(found))


def _range(points: Sequence[_Point], *, from_zero: bool) -> tuple[float, float]:
    low, high = min(point.low for point in points), max(point.high for point in points)
    if from_zero and low >= 0:
        return 0.0, 1.05 * high or 1.0
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _label(
    places: Sequence[int], series: Sequence[Series], points: Sequence[_Point | None], write: Callable[[float], str]
) -> str:
    where = f"step {places[0]:,}" if len(places) == 1 else f"steps {places[0]:,} to {places[-1]:,}"
    values = [
        f"{one.name} {write(p.mean)}" + (f" ({write(p.low)} to {write(p.high)})" if p.low < p.high else "")
        for one, p in zip(series, points, strict=True)
        if p
    ]
    return f"{where}: {', '.join(values) or 'not a finite number'}"
