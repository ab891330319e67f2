"""`zeromesh bench`: training steps, measured and predicted, over a matrix of settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.errors import InputError

if TYPE_CHECKING:
    from zeromesh.measure.bench import Bench
    from zeromesh.measure.matrix import Cell

_TOPOLOGY = (
    'An emulated cluster, "2@200mbit,2" (needs root), or processes on this machine, "cluster=2,node=2". '
    "Default: five emulated clusters."
)


def bench(
    topologies: Annotated[list[str] | None, typer.Argument(metavar="[TOPOLOGY]...", help=_TOPOLOGY)] = None,
    strategy: Annotated[list[str] | None, typer.Option(help="May be repeated; default: the common ones.")] = None,
    accumulation: Annotated[list[int] | None, typer.Option(help="Micro-batches of a step; default: 1 and 4.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, bf16; default: both.")] = None,
    overlap: Annotated[str, typer.Option(help="Replaces every strategy's: none, gather or all.")] = "",
    model: Annotated[str, typer.Option(help="Parameters of the Llama: tiny, 1M, 7M, 30M, 60M.")] = "7M",
    sequences: Annotated[int, typer.Option(help="Of a micro-batch.")] = 2,
    tokens: Annotated[int, typer.Option(help="Of a sequence.")] = 64,
    rounds: Annotated[int, typer.Option(help="Of the layouts of a setting, in turn, until the fastest is known.")] = 8,
    all_rounds: Annotated[bool, typer.Option("--all-rounds", help="Of every layout, whatever is known.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of a cell in a round that are timed, at the most.")] = 4,
    warmup: Annotated[int, typer.Option(help="Steps before the first round.")] = 1,
    only: Annotated[str, typer.Option(help="Cells whose name contains this: topology strategy xN dtype.")] = "",
    probe_seconds: Annotated[float, typer.Option(help="Of a topology's probe, for each level, about.")] = 12.0,
    probe_rounds: Annotated[int, typer.Option(help="Of a topology's probe: timings of each size.")] = 16,
    directory: Annotated[Path, typer.Option("--directory", "-d", help="For results; cells there are kept.")] = Path(
        "zeromesh-bench"
    ),
    estimate: Annotated[bool, typer.Option("--estimate", help="Print how long it may take, and stop.")] = False,
    accept_noise: Annotated[bool, typer.Option("--accept-noise", help="Use a probe that cannot be trusted.")] = False,
) -> None:
    """Measure training steps on each topology and print what the simulator predicts of them from a probe.

    The probe measures links, and what the model's units compute while nothing is sent; never a step of the matrix.
    What has been measured stays in the directory: the same command goes on where it was ended.
    """
    from zeromesh.cli.measuring import emulated
    from zeromesh.cli.workload import check_choice
    from zeromesh.measure.bench import Bench
    from zeromesh.measure.launch import under_torchrun
    from zeromesh.measure.matrix import make_cells
    from zeromesh.measure.steps import DTYPES, Batch
    from zeromesh.strategy.strategy import OVERLAPS

    if overlap:
        check_choice("--overlap", overlap, tuple(OVERLAPS))
    batches = [
        Batch(model=model, dtype=each, sequences=sequences, tokens=tokens, micro_batches=count)
        for count in accumulation or (1, 4)
        for each in dtype or DTYPES
    ]
    cells = make_cells(topologies or (), strategy or (), batches, overlap=overlap, only=only)
    run = Bench(
        directory,
        steps=steps,
        warmup=warmup,
        rounds=rounds,
        all_rounds=all_rounds,
        accept_noise=accept_noise,
        probe_s=probe_seconds,
        probe_rounds=probe_rounds,
    )
    with emulated(""):
        if under_torchrun():
            raise InputError("bench starts the ranks of its topologies itself: leave torchrun out")
        _announce(cells, run)
        if estimate:
            return
        run.run(cells)
    _print(run, cells)


def _announce(cells: list[Cell], run: Bench) -> None:
    from zeromesh.measure.matrix import estimate_rounds_s, estimate_start_s

    pending = run.pending(cells)
    if not pending:
        print(f"all {len(cells)} cells are done")
        return
    start = estimate_start_s(pending, run.probe_s)
    held = {cell: len(run.records.cell(cell)) for cell in pending}
    options = {"rounds": run.rounds, "steps": run.steps, "warmup": run.warmup, "cores": os.cpu_count() or 1}
    least, most = (max(1, round((start + seconds) / 60)) for seconds in estimate_rounds_s(held, **options))
    span = f"{most}" if run.all_rounds or least == most else f"{least} to {most}"
    print(f"{len(pending)} of {len(cells)} cells to measure, about {span} min", flush=True)


def _print(run: Bench, cells: list[Cell]) -> None:
    from rich.console import Console
    from rich.table import Table

    from zeromesh.measure.bench import shown, verdicts

    rows = run.rows(cells)
    result = run.write_result(rows)
    header = ("topology", "strategy", "micro", "dtype", "step", "spread", "predicted", "error", "waits", "predicted")
    table = Table(*header, "one rank sends", "out of a link (kernel)", box=None)
    for row in shown(rows):
        table.add_row(*row)
    Console(width=200).print(table)
    for line in verdicts(run.summarise(rows).settings):
        print(line)
    summary = result["summary"]
    print(
        f"median error of {summary['cells']} step times: {summary['median_error']:.1%} (from the probe alone "
        f"{summary['planned_median_error']:.1%}); the best predicted strategy is the best measured one, or within 3 % "
        f"of it, in {summary['right']} of {summary['choices']} settings; the rounds suffice to say so, with "
        f"{summary['confidence']:.0%} confidence, in {summary['told']}"
    )
    print(f"all figures: {run.directory / 'result.json'}; timelines for Perfetto: {run.directory / 'traces'}")
