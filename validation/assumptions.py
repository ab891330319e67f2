"""Assumptions about points that sources leave open, from `data/assumptions.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from validation.row import DATA

Point = Mapping[str, str]
"""Values for a table's open points, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One open point. Predictions use `value`; `alternatives` span their range.

    `revised` says what was changed after predictions were seen, and why.
    """

    table: str
    name: str
    value: str
    alternatives: tuple[str, ...]
    why: str
    revised: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The value, then the alternatives."""
        return (self.value, *self.alternatives)


@cache
def assumptions() -> tuple[Assumption, ...]:
    """All assumptions, in the file's order."""
    text = (DATA / "assumptions.toml").read_text(encoding="utf-8")
    return tuple(
        Assumption(table=table, name=name, **entry | {"alternatives": tuple(entry["alternatives"])})
        for table, entries in tomllib.loads(text).items()
        for name, entry in entries.items()
    )


def assumed(table: str, name: str) -> Assumption:
    return next(a for a in assumptions() if (a.table, a.name) == (table, name))


def open_points(table: str) -> Iterator[Point]:
    """Yields every combination of values for the open points of `table`, the assumed values first."""
    found = [a for a in assumptions() if a.table == table]
    for choices in product(*(a.choices for a in found)):
        yield dict(zip((a.name for a in found), choices, strict=True))
