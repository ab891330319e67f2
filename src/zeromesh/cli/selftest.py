"""`zeromesh selftest`: checks that everything works here, and writes one result file."""

from __future__ import annotations

import os
import platform
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.cli.probe import MeshText, Ranks

if TYPE_CHECKING:
    from zeromesh.measure.selftest import Result


def selftest(
    ranks: Ranks = 0,
    mesh: MeshText = "",
    steps: Annotated[int, typer.Option(help="Number of timed steps per strategy.")] = 6,
    share_devices: Annotated[
        bool, typer.Option("--share-devices", help="Let ranks share devices; measures no times.")
    ] = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="The result file.")] = Path("zeromesh-selftest.json"),
) -> None:
    """Check numbers, bytes, memory, links and times of these ranks.

    It takes a minute or two. Under torchrun it checks all ranks, otherwise it starts processes on this machine. The
    exit code is 0 if no check has failed, else 1. Attach the result file to a bug report.
    """
    from zeromesh.cli.measuring import mesh_of, starting_ranks
    from zeromesh.errors import InputError
    from zeromesh.launch.failure import end_process
    from zeromesh.measure.launch import under_torchrun
    from zeromesh.measure.selftest import selftest as run

    if steps < 1:
        raise InputError(f"--steps must be at least 1, got {steps}")
    if share_devices:
        os.environ["ZEROMESH_SHARE_DEVICES"] = "1"  # ranks that are started here inherit it
    with starting_ranks():
        joined = under_torchrun()
        try:
            result = run(mesh_of(mesh, ranks), output, steps=steps)
        except InputError:
            raise
        except Exception:
            if joined:
                traceback.print_exc()
                end_process(1)
            raise
    code = 0 if result is None or result.passed else 1
    if result is not None:
        _print(result, output)
    if joined:
        end_process(code)
    raise typer.Exit(code)


def _print(result: Result, output: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    env = result.environment
    table = Table("", "check", "found", box=None)
    for check in result.checks:
        table.add_row(check.status, Text(check.name), Text(check.detail))  # errors may contain brackets
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(
        f"zeromesh {env['zeromesh']}, torch {env['torch']}, {env['device']}, {env['backend']}; mesh {env['mesh']} on "
        f"{len(env['hosts'])} host(s)"
    )
    console.print(table)
    verdict = "passed" if result.passed else "FAILED"
    console.print(f"{verdict} in {result.seconds:.0f} s; all figures are in {output.absolute()} on {platform.node()}")
