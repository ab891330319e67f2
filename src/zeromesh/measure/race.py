"""Which layouts of a setting are still in question after some rounds, and how sure that is. Torch-free.

[Note: Paired rounds] The layouts of one setting (topology and batch) are measured in turn, so a slow minute of the
machine is a slow round of all of them. Two layouts are compared by the logarithms of their ratios, round by round. How
far a ratio strays from its mean, pooled over all layouts, is the noise, and Student's t says what it leaves open. A
layout is out when even the lower end of its ratio to the fastest lies above 1. The error is shared out between all
comparisons that may be looked at, so that with the stated confidence no layout is out that should not be.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import atan, cos, exp, inf, log, pi, sin, sqrt
from statistics import fmean
from typing import TypeVar

CLOSE = 0.03
"""A layout within 3 % of the fastest is as good as that."""

CONFIDENCE = 0.95

FAR = 2.0
"""Beyond this ratio a layout is out after a single round, which tells of no noise. Under a load of 20 on 2 cores ratios
stray by 6 to 21 % (standard deviation by setting, paired rounds of eight ranks on two cores)."""

K = TypeVar("K", bound=Hashable)

Rounds = Mapping[int, float]
"""Seconds of a step by the number of the round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Seconds of one layout over another's; `low` and `high` hold with `CONFIDENCE`, all comparisons together."""

    value: float
    low: float
    high: float


def fastest(times: Mapping[K, Rounds]) -> K:
    """By the geometric mean of the rounds that a layout has in common with the one that has most."""
    longest = max(times, key=lambda name: len(times[name]))
    return min(times, key=lambda name: fmean(_differences(times[name], times[longest]) or [inf]))


def compare(times: Mapping[K, Rounds], reference: K, *, looks: int = 1) -> dict[K, Ratio]:
    """Every other layout's ratio to `reference`.

    Args:
        times: of each layout.
        reference: one of them.
        looks: how often the rounds are looked at, at the most.
    """
    found = {name: _differences(own, times[reference]) for name, own in times.items() if name != reference}
    found = {name: each for name, each in found.items() if each}
    freedom = sum(len(each) - 1 for each in found.values())
    squares = sum((one - fmean(each)) ** 2 for each in found.values() for one in each)
    strays = inf if freedom == 0 else sqrt(squares / freedom)
    if found and freedom:
        strays *= student((1 - CONFIDENCE) / (len(found) * looks), freedom)
    ratios = {}
    for name, each in found.items():
        middle, open_ = fmean(each), strays / sqrt(len(each))
        ratios[name] = Ratio(value=exp(middle), low=exp(middle - open_), high=exp(min(middle + open_, 700.0)))
    return ratios


def in_question(times: Mapping[K, Rounds], *, looks: int) -> set[K]:
    """The layouts whose further rounds may still tell which is fastest; none where that is known, or does not matter:
    all that are left are as good. One layout alone is always in question.

    Args:
        times: of all layouts; of those without a round nothing is known.
        looks: rounds, at the most.
    """
    begun = {name: rounds for name, rounds in times.items() if rounds}
    if len(times) < 2 or not begun:
        return set(times)
    best = fastest(begun)
    ratios = compare(begun, best, looks=looks)
    left = {name for name in times if name not in ratios or not _out(ratios[name])}
    known = all(name == best or (name in ratios and ratios[name].high <= 1 + CLOSE) for name in left)
    return set() if known else left


def as_good(times: Mapping[K, Rounds], chosen: K, *, looks: int) -> tuple[bool, bool]:
    """Whether `chosen` is as good as the fastest, and whether the rounds suffice to say so."""
    ratios = compare(times, chosen, looks=looks).values()
    if all(ratio.value * (1 + CLOSE) >= 1 for ratio in ratios):
        return True, all(ratio.low * (1 + CLOSE) >= 1 for ratio in ratios)
    return False, any(ratio.high * (1 + CLOSE) < 1 for ratio in ratios)


def _out(ratio: Ratio) -> bool:
    return ratio.low > 1 or (ratio.low == 0 and ratio.value > FAR)


def _differences(one: Rounds, other: Rounds) -> Sequence[float]:
    return [log(one[number] / other[number]) for number in one if number in other]


def student(error: float, freedom: int) -> float:
    """What Student's t with `freedom` degrees exceeds with a probability of `error`, by bisection."""
    low, high = 0.0, 1.0
    while _exceeds(high, freedom) > error:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _exceeds(middle, freedom) > error else (low, middle)
    return high


def _exceeds(t: float, freedom: int) -> float:
    """Probability of more than `t` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    theta = atan(t / sqrt(freedom))
    term = total = cos(theta) if freedom % 2 else 1.0
    for index in range(2 + freedom % 2, freedom - 1, 2):
        term *= (index - 1) / index * cos(theta) ** 2
        total += term
    total = sin(theta) * total if freedom > 1 else 0.0
    inside = total if freedom % 2 == 0 else 2 / pi * (theta + total)
    return (1 - inside) / 2
