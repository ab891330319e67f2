"""One published figure beside its prediction."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure of a published table."""

    table: str
    label: str  # the configuration, for people
    group: str  # rows among which a winner is looked for (one model on one machine, strategies against each other)
    unit: str
    measured: float
    predicted: float | None = None  # with the assumed values; None where the row is out of scope
    low: float | None = None  # to `high`: over the alternatives of all that the source leaves open
    high: float | None = None
    excluded: str = ""  # why the row is out of scope, "" if it is in
    fitted: bool = False  # a constant was fitted on it, so it counts for nothing

    @property
    def in_scope(self) -> bool:
        return not self.excluded

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        assert self.predicted is not None
        return self.predicted / self.measured - 1


def predicted_row(row: Row, predictions: Sequence[float]) -> Row:
    """`row` with its prediction: the first of `predictions`, the others spanning its range. None: a row without."""
    if not predictions:
        return row
    return replace(row, predicted=predictions[0], low=min(predictions), high=max(predictions))


def published(name: str, folder: str = "published") -> list[dict[str, str]]:
    """The rows of a table, as strings; in the folder "calibration" those that constants were fitted on, in part at
    least."""
    text = (DATA / folder / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
