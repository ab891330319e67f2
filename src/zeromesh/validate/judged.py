"""By what published figures the predictions of models that are cut have been judged, degree by degree.

Predicting the tables takes seconds and a plan must not, so their scores stand here; a test holds them against the
tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zeromesh.parallel import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Of one table.

    Args:
        table: its name.
        degrees: of which parallelisms it says something.
        what: was measured.
        rows: that count.
        median, p90: of the absolute relative error.
    """

    table: str
    degrees: tuple[str, ...]
    what: str
    rows: int
    median: float
    p90: float

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.median:.1%} at the median, {self.p90:.1%} at the 90th percentile of {self.rows} rows"
        )


JUDGED = (
    Judged(
        table="torchtitan, cp over none",
        degrees=("cp",),
        what="seconds with cp relative to none, in fp8 where predicted in bf16",
        rows=3,
        median=0.403,
        p90=0.488,
    ),
    Judged(
        table="Collectives of tp and ep",
        degrees=("ep",),
        what="an all-to-all inside a node, alone",
        rows=33,
        median=0.138,
        p90=0.359,
    ),
    Judged(
        table="InternEvo memory, tp and pp",
        degrees=("tp", "pp"),
        what="memory of 7B and 20B on 3 to 16 A800",
        rows=7,
        median=0.025,
        p90=0.139,
    ),
    Judged(
        table="Galvatron memory, tp and pp",
        degrees=("tp", "pp"),
        what="memory of one to four layers on 8 A100",
        rows=59,
        median=0.037,
        p90=0.157,
    ),
)

TIMED = ("cp",)
"""Degrees under which whole steps have been timed in a table at hand."""


def judged_lines(parallel: Parallel) -> Iterator[str]:
    """How far predictions of a model cut so may be trusted, for people."""
    cut = [name for name in ("tp", "cp", "pp", "ep") if getattr(parallel, name) > 1]
    untimed = [name for name in cut if name not in TIMED]
    if untimed:
        yield f"{', '.join(untimed)}: no published step is at hand, so the error of these seconds is not known"
    for judged in JUDGED:
        of = [name for name in judged.degrees if name in cut]
        if of:
            yield f"{', '.join(of)}: error of {judged}"
