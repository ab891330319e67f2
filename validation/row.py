"""One published figure with its prediction."""

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
    group: str  # rows with one winner (strategies for one model on one machine)
    unit: str
    measured: float
    predicted: float | None = None  # with the assumed values; None if the row is out of scope
    low: float | None = None  # `low` to `high`: over the alternatives for all points that the source leaves open
    high: float | None = None
    excluded: str = ""  # why the row is out of scope; "" if it is not
    fitted: bool = False  # whether a constant was fitted to it, so that it does not count

    @property
    def in_scope(self) -> bool:
        return not self.excluded

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        assert self.predicted is not None
        return self.predicted / self.measured - 1


def predicted_row(row: Row, predictions: Sequence[float]) -> Row:
    """Returns `row` with its prediction: the first of `predictions`; the others span its range. Without any, the row
    itself."""
    if not predictions:
        return row
    return replace(row, predicted=predictions[0], low=min(predictions), high=max(predictions))


def published(name: str, folder: str = "published") -> list[dict[str, str]]:
    """Returns the rows of a table, as strings. In the folder "calibration", constants were fitted to them, at least in
    part."""
    text = (DATA / folder / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
