"""`zeromesh train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a key of the file; may be repeated."),
    ] = None,
) -> None:
    """Train a language model: alone, on local processes that it starts, or as one of torchrun's processes.

    The exit code is 0 when the run is done, 2 when the configuration is wrong, 75 when the run was preempted and has
    saved its state (run the same command again), and 1 for anything else.
    """
    from zeromesh.launch.failure import end_process
    from zeromesh.train import train as run

    code = run(config, overrides or ())
    if code == 1:
        end_process(code)
    if code:
        raise typer.Exit(code)
