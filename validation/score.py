"""How good the predictions for a table are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation, median

import numpy as np

from validation.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Largest acceptable median, 90th percentile and worst absolute relative error; None: no goal of this kind."""

    median: float | None = None
    p90: float
    worst: float | None = None


GOALS = {
    "AMSP Table V": Goal(median=0.04, p90=0.08),
    "AMSP Fig. 12": Goal(median=0.04, p90=0.08),
    "AMSP layouts, one engine": Goal(p90=0.10, worst=0.10),
    "AMSP MFU": Goal(p90=0.10),
    "LLM Foundry, one node": Goal(median=0.05, p90=0.10),
    "LLM Foundry, several nodes": Goal(median=0.05, p90=0.10),
    "torchtitan": Goal(median=0.05, p90=0.10),
    "torchtitan memory": Goal(median=0.05, p90=0.10),
    "InternEvo memory": Goal(median=0.05, p90=0.10),
    "Galvatron memory": Goal(median=0.05, p90=0.10),
    "torchtitan, cp over none": Goal(median=0.10, p90=0.10),
    "Collectives of tp and ep": Goal(median=0.10, p90=0.10),
    "InternEvo memory, tp and pp": Goal(median=0.05, p90=0.10),
    "Galvatron memory, tp and pp": Goal(median=0.05, p90=0.10),
    "Megatron Bridge": Goal(median=0.05, p90=0.10),
    "Megatron Bridge, tp and pp": Goal(median=0.05, p90=0.10),
    "Collectives of 8 H100": Goal(median=0.10, p90=0.10),
    "ZeRO++ over ZeRO-3": Goal(median=0.15, p90=0.15),
    "PaRO": Goal(median=0.20, p90=0.40),
    "Frontier": Goal(median=0.15, p90=0.15),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The absolute relative errors of one table's rows that are in scope and not fitted."""

    table: str
    count: int  # rows that count
    fitted: int
    excluded: int
    median: float
    p90: float
    worst: float
    rank: float | None  # Spearman's correlation of measured and predicted; None for fewer than three rows
    winners: tuple[int, int]  # (groups whose measured best is the predicted best, groups with several rows)
    in_range: int  # rows whose measured value lies in the range over the assumptions

    @property
    def meets_goal(self) -> bool | None:
        """Whether the table's goal is met; None if it has none."""
        goal = GOALS.get(self.table)
        if goal is None:
            return None
        bounds = ((self.median, goal.median), (self.p90, goal.p90), (self.worst, goal.worst))
        return all(bound is None or value <= bound for value, bound in bounds)


def score(table: str, rows: Sequence[Row]) -> Score:
    counted = [row for row in rows if row.in_scope and not row.fitted]
    errors = [abs(row.error) for row in counted]
    return Score(
        table=table,
        count=len(counted),
        fitted=sum(row.fitted for row in rows),
        excluded=sum(not row.in_scope for row in rows),
        median=median(errors),
        p90=float(np.quantile(errors, 0.9)),
        worst=max(errors),
        rank=spearman([r.measured for r in counted], [r.predicted or 0.0 for r in counted]),
        winners=_winners(counted),
        in_range=sum((r.low or 0) <= r.measured <= (r.high or 0) for r in counted),
    )


def score_tables(rows: Sequence[Row]) -> list[Score]:
    """Returns the score of each table among `rows`, in their order."""
    return [score(table, [row for row in rows if row.table == table]) for table in dict.fromkeys(r.table for r in rows)]


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Pearson's correlation of the ranks; ties share theirs. None for fewer than three values, or without spread.

    >>> spearman([1, 2, 3], [10, 20, 40])
    1.0
    """
    if len(one) < 3 or 1 in (len({*one}), len({*other})):
        return None
    return correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def _winners(rows: Sequence[Row]) -> tuple[int, int]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    several = [group for group in groups.values() if len(group) > 1]
    right = sum(
        max(group, key=lambda r: r.measured) is max(group, key=lambda r: r.predicted or 0.0) for group in several
    )
    return right, len(several)
