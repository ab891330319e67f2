"""`zeromesh validate`: the published tables beside their predictions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.cli import workload as shared

if TYPE_CHECKING:
    from zeromesh.validate.row import Row
    from zeromesh.validate.score import Score


def validate(
    tables: Annotated[list[str] | None, typer.Argument(help="Sources to predict; none: all, and the claims.")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Print every row.")] = False,
    as_json: shared.Json = False,
    write: Annotated[Path | None, typer.Option("--write", help="Write the whole page as Markdown.")] = None,
) -> None:
    """Hold the simulator against published measurements: measured, predicted, error."""
    from zeromesh.validate.claims import claims
    from zeromesh.validate.page import page
    from zeromesh.validate.score import score

    found = _rows(tables or [])
    names = list(dict.fromkeys(row.table for row in found))
    scores = [score(name, [row for row in found if row.table == name]) for name in names]
    made = [] if tables else list(claims())
    if write is not None:
        shared.write(write, page(found, made))
        print(f"wrote {write}")
    elif as_json:
        data = {
            "rows": [asdict(row) for row in found],
            "scores": [asdict(each) for each in scores],
            "claims": [asdict(claim) for claim in made],
        }
        print(json.dumps(data, indent=2))
    else:
        _print(found if rows else [], scores)


def _rows(tables: list[str]) -> list[Row]:
    from zeromesh.errors import InputError, nearest
    from zeromesh.validate.tables import SOURCES

    unknown = next((name for name in tables if name not in SOURCES), None)
    if unknown is not None:
        raise InputError(f"unknown table {unknown!r}; {nearest(unknown, SOURCES)}")
    return [row for name in tables or SOURCES for row in SOURCES[name]()]


def _print(rows: list[Row], scores: list[Score]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if rows:
        shown = Table("table", "configuration", "measured", "predicted", "error", "note", box=None)
        for row in rows:
            note = "fitted" if row.fitted else row.excluded
            predicted = "" if row.predicted is None else f"{row.predicted:.4g}"
            error = "" if row.predicted is None else f"{row.error:+.1%}"
            shown.add_row(row.table, row.label, f"{row.measured:.4g}", predicted, error, note)
        console.print(shown)
    summary = Table("table", "rows", "fitted", "median", "p90", "worst", "rank", "winners", "goal", box=None)
    for s in scores:
        met = {True: "met", False: "missed", None: ""}[s.meets_goal]
        rank = "" if s.rank is None else f"{s.rank:.3f}"
        winners = f"{s.winners[0]} of {s.winners[1]}" if s.winners[1] else ""
        cells = (f"{s.median:.1%}", f"{s.p90:.1%}", f"{s.worst:.1%}", rank, winners, met)
        summary.add_row(s.table, str(s.count), str(s.fitted), *cells)
    console.print(summary)
