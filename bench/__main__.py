"""`make bench`: training steps, measured and predicted, over a matrix of settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeromesh.cli.app import plain_app, run
from zeromesh.errors import InputError

if TYPE_CHECKING:
    from bench.matrix import Cell
    from bench.rows import Row

app = plain_app("bench")

ROUNDS = 8
"""On a quiet machine, ratios vary by 3 % from round to round, and means over eight rounds by 1 %."""

_TIMEOUT_S = 24 * 3600.0
_TOPOLOGY = (
    'An emulated cluster, "2@200mbit,2" (needs root), or processes on this machine, "cluster=2,node=2". '
    "Default: five emulated clusters."
)


@app.command()
def bench(
    topologies: Annotated[list[str] | None, typer.Argument(metavar="[TOPOLOGY]...", help=_TOPOLOGY)] = None,
    strategy: Annotated[list[str] | None, typer.Option(help="May be repeated; default: the common ones.")] = None,
    accumulation: Annotated[list[int] | None, typer.Option(help="Micro-batches of a step; default: 1 and 4.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, bf16; default: both.")] = None,
    model: Annotated[str, typer.Option(help="Parameters of the Llama: tiny, 1M, 7M, 30M, 60M.")] = "7M",
    sequences: Annotated[int, typer.Option(help="Sequences of a micro-batch.")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds over the layouts of a setting.")] = ROUNDS,
    steps: Annotated[int, typer.Option(help="Steps of a cell in a round that are timed, at the most.")] = 4,
    output: Annotated[Path, typer.Option("-o", "--output", help="The result file.")] = Path("bench.json"),
) -> None:
    """Measure training steps on each topology and print what the simulator predicts of them from a probe.

    The probe measures links and the devices at the model's shapes; never a step of the matrix. The result file is
    written whenever a topology is done.
    """
    from bench.matrix import make_cells
    from bench.rows import make_rows, noise_of
    from zeromesh.cli.measuring import exiting_on_signals
    from zeromesh.measure.launch import under_torchrun
    from zeromesh.measure.steps import Batch
    from zeromesh.measure.work import DTYPES
    from zeromesh.progress import progress

    if steps < 1 or rounds < 1:
        raise InputError(f"at least 1 step in at least 1 round; got {steps} and {rounds}")
    batches = [
        Batch(model=model, dtype=each, sequences=sequences, tokens=tokens, micro_batches=count)
        for count in accumulation or (1, 4)
        for each in dtype or DTYPES
    ]
    cells = make_cells(topologies or (), strategy or (), batches)
    if under_torchrun():
        raise InputError("bench starts the ranks of its topologies itself: leave torchrun out")
    if not output.absolute().parent.is_dir():
        raise InputError(f"the result file cannot be written: {output.absolute().parent} is no folder")
    rows: list[Row] = []
    noise: list[str] = []
    result: dict[str, Any] = {}
    with exiting_on_signals():
        for topology, group in groupby(cells, key=lambda cell: cell.topology):
            with progress(f"measuring {topology}, {len(rows)} of {len(cells)} settings done"):
                found = measure(topology, list(group), rounds=rounds, steps=steps)
            rows += make_rows(topology, found)
            noise += noise_of(topology, found)
            result = _write(output, rows, noise)
    _print(rows, result)
    print(f"all figures: {output}")


def measure(topology: str, cells: Sequence[Cell], *, rounds: int, steps: int, probes: bool = True) -> dict[str, Any]:
    """Starts the ranks of a topology, and returns the findings of `bench.cells.run_cells` there."""
    from bench.cells import answer_marks
    from bench.matrix import Topology
    from lab import Lab
    from zeromesh.launch.job import make_folder
    from zeromesh.measure.launch import on_all_ranks
    from zeromesh.measure.probe import ROUNDS as PROBE_ROUNDS
    from zeromesh.measure.probe import SECONDS_PER_LEVEL

    where = Topology(text=topology)
    works = [asdict(work) for work in dict.fromkeys(cell.batch.work for cell in cells)]
    probe = {"seconds": SECONDS_PER_LEVEL, "rounds": PROBE_ROUNDS, "works": works}
    options = {
        "cells": [cell.to_json() for cell in cells],
        "probe": probe if probes else None,
        "rounds": rounds,
        "steps": steps,
    }
    with ExitStack() as stack:
        marks, start = "", None
        if where.tree is not None:
            folder = stack.enter_context(make_folder())
            lab = stack.enter_context(Lab(where.tree))
            marks, start = str(folder), partial(lab.run, timeout_s=_TIMEOUT_S, on_line=answer_marks(lab, folder))
        found: dict[str, Any] = on_all_ranks(
            "bench.cells:run_cells", options | {"marks": marks}, where.mesh, start=start
        )
    return found


def _write(output: Path, rows: Sequence[Row], noise: Sequence[str]) -> dict[str, Any]:
    from bench.rows import choices_of, summarise
    from zeromesh.cli.workload import write
    from zeromesh.measure.setting import read_setting

    choices = choices_of(rows)
    result = {
        "environment": read_setting(),
        "noise": list(noise),
        "summary": summarise(rows, choices),
        "settings": [choice.to_json() for choice in choices],
        "rows": [row.to_json() for row in rows],
    }
    write(output, json.dumps(result, indent=1) + "\n")
    return result


def _print(rows: Sequence[Row], result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from bench.rows import HEADS, choices_of, shown

    table = Table(*HEADS, box=None)
    for row in shown(rows):
        table.add_row(*row)
    Console(width=200).print(table)
    for line in (*choices_of(rows), *result["noise"]):
        print(line)
    summary = result["summary"]
    print(
        f"median error of {summary['cells']} step times: {summary['median_error']:.1%}; the best predicted strategy is "
        f"the best measured one, or within 3 % of it, in {summary['right']} of {summary['choices']} settings"
    )


if __name__ == "__main__":
    run(app)
