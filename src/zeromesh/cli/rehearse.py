"""`zeromesh rehearse`: a run's own step, as any rank of any number, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zeromesh.cli import workload as shared
from zeromesh.cli.train import Config, Overrides
from zeromesh.errors import InputError

EXIT_FAILS = 1


def rehearse(
    config: Config,
    world: Annotated[int, typer.Option(help="Number of ranks that the mesh must have; 0: any.")] = 0,
    rank: Annotated[
        list[int] | None, typer.Option(help="The rank to rehearse (default 0). Repeat it to compare ranks.")
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="A preset or a TOML file, for the time of a step and the memory limit.")
    ] = "",
    overrides: Overrides = None,
    as_json: shared.Json = False,
    report: Annotated[Path | None, shared.in_output(help="Write a self-contained HTML page.")] = None,
    trace: Annotated[Path | None, shared.in_output(help="Write the timeline to a file for Perfetto.")] = None,
) -> None:
    """Run a configuration's step on a virtual device, as any rank.

    Model, optimizer and engine are the real ones. Memory is reserved but not touched, kernels only compute shapes, and
    collectives are counted. The exit code is 0, 1 if the run would fail, or 2 for wrong input.
    """
    from zeromesh.rehearsal.launch import rehearse_config
    from zeromesh.rehearsal.result import failures_of
    from zeromesh.rehearsal.show import print_rehearsal, rehearsal_page

    if world < 0:
        raise InputError(f"--world must be at least 1 (0: as many ranks as the mesh has), got {world}")
    settings = [*(overrides or ()), *([f"cluster={cluster}"] if cluster else ())]
    found = rehearse_config(config, settings, world=world, ranks=rank or (0,), traced=trace is not None)
    failures = failures_of(found)
    first = found[0]
    if report is not None:
        shared.write(report, rehearsal_page(found, failures))
    if trace is not None and first.trace is not None:
        shared.write(trace, first.trace.to_json())
    if as_json:
        others = [other.to_json() for other in found[1:]]
        print(json.dumps(first.to_json() | {"failures": list(failures), "others": others}, indent=2))
    else:
        print_rehearsal(found, failures)
    if failures:
        raise typer.Exit(EXIT_FAILS)
