"""How far predictions were from published measurements, to be shown with plans.

A checkout's `make validate` predicts the published tables and writes `errors.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from zeromesh.parallel import Parallel

TIMED = ("tp", "cp", "pp")
"""Degrees for which whole steps have been published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Absolute relative errors of one predicted quantity."""

    of: str  # the quantity, in words
    degrees: tuple[str, ...]  # parallelisms in use besides data; empty: only data parallelism
    rows: int  # number of published figures
    median: float
    p90: float

    def __str__(self) -> str:
        return (
            f"predicted {self.of}: {self.median:.1%} off at the median, {self.p90:.1%} at the 90th percentile of "
            f"{self.rows} published figures"
        )


@cache
def published_errors() -> tuple[Errors, ...]:
    text = (files("zeromesh.report") / "errors.json").read_text(encoding="utf-8")
    return tuple(Errors(**entry | {"degrees": tuple(entry["degrees"])}) for entry in json.loads(text))


def error_of_steps(parallel: Parallel) -> Errors | None:
    """The error of published whole steps with these degrees, possibly with others; None if there are none."""
    cut = tuple(name for name in ("tp", "cp", "pp", "ep") if getattr(parallel, name) > 1)
    near = [each for each in published_errors() if set(cut) <= set(each.degrees) and "step times" in each.of]
    return min(near, key=lambda each: len(each.degrees), default=None)


def uncertainty_lines(parallel: Parallel) -> Iterator[str]:
    """Yields lines on how far a prediction with these degrees can be trusted, for people."""
    cut = [name for name in ("tp", "cp", "pp", "ep") if getattr(parallel, name) > 1]
    untimed = [name for name in cut if name not in TIMED]
    if untimed:
        yield f"{', '.join(untimed)}: no published step is at hand, so the error of these seconds is not known"
    for entry in published_errors():
        degrees = [name for name in entry.degrees if name in cut]
        if degrees:
            yield f"{', '.join(degrees)}: {entry}"
        elif not cut and not entry.degrees:
            yield str(entry)
