"""`make validate`: the published tables with their predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.cli.app import plain_app, run
from zeromesh.errors import InputError, nearest

if TYPE_CHECKING:
    from validation.row import Row
    from validation.score import Score

PAGE = Path(__file__).resolve().parents[1] / "docs" / "validation.md"

app = plain_app("validate")


@app.command()
def validate(
    tables: Annotated[list[str] | None, typer.Argument(help="Print the rows of these sources.")] = None,
) -> None:
    """Hold the simulator against published measurements: measured, predicted, error.

    Without sources this writes docs/validation.md, and the errors that `zeromesh plan` prints.
    """
    from validation.claims import claims
    from validation.errors import ERRORS, errors_json
    from validation.page import page
    from validation.score import score_tables
    from validation.tables import SOURCES
    from zeromesh.progress import note, progress

    unknown = next((name for name in tables or () if name not in SOURCES), None)
    if unknown is not None:
        raise InputError(f"unknown source {unknown!r}; {nearest(unknown, SOURCES)}")
    rows: list[Row] = []
    with progress("predicting published figures"):
        for name in tables or SOURCES:
            note(f"{name}, after {len(rows)} rows")
            rows += SOURCES[name]()
    _print(rows if tables else [], score_tables(rows))
    if not tables:
        PAGE.write_text(page(rows, list(claims())), encoding="utf-8")
        ERRORS.write_text(errors_json(rows), encoding="utf-8")
        print(f"wrote {PAGE} and {ERRORS}")


def _print(rows: list[Row], scores: list[Score]) -> None:
    from rich.console import Console
    from rich.table import Table

    from validation.page import ROW_HEADS, SCORE_HEADS, row_cells, score_cells

    console = Console(width=200)
    if rows:
        shown = Table("table", *ROW_HEADS, box=None)
        for row in rows:
            shown.add_row(row.table, *row_cells(row))
        console.print(shown)
    summary = Table(*SCORE_HEADS, box=None)
    for score in scores:
        summary.add_row(*score_cells(score))
    console.print(summary)


if __name__ == "__main__":
    run(app)
