"""How far predictions were from published measurements, for plans.

`errors.json` is written by a checkout's `make validate`, which predicts the published tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from zeromesh.parallel import Parallel

TIMED = ("tp", "cp", "pp")
"""Degrees under which whole steps have been published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Absolute relative errors of one predicted quantity."""

    of: str  # the quantity, in words
    degrees: tuple[str, ...]  # the parallelisms beside data that were in use; none: data alone
    rows: int  # how many published figures
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
    """The error of whole steps with these degrees, or with others beside them; None where no such step is published."""
    cut = tuple(name for name in ("tp", "cp", "pp", "ep") if getattr(parallel, name) > 1)
    near = [each for each in published_errors() if set(cut) <= set(each.degrees) and "step times" in each.of]
    return min(near, key=lambda each: len(each.degrees), default=None)


def uncertainty_lines(parallel: Parallel) -> Iterator[str]:
    """How far a prediction with these degrees may be trusted, for people."""
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
