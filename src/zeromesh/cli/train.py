"""`zeromesh train`."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Annotated

import typer

from zeromesh.errors import InputError, ZeromeshError


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

    code = run(config, overrides or [])
    if code == 1:
        end_process(code)
    if code:
        raise typer.Exit(code)


def run(path: Path, overrides: list[str]) -> int:
    """Runs what a configuration describes; the exit code.

    Raises:
        InputError: the configuration or the environment is wrong; raised before any process starts if that can be
            known.
    """
    from contextlib import nullcontext

    from zeromesh.cli.app import EXIT_INPUT
    from zeromesh.integrations.elastic import noticing_sigterm
    from zeromesh.launch.environment import Launched, check_address
    from zeromesh.launch.job import RENDEZVOUS, make_folder, run_restarted
    from zeromesh.train import load_config

    launched = Launched.of(os.environ)
    try:
        config = load_config(path, overrides)
        if launched:
            config = config.on_world(launched.world)
    except InputError:
        if launched and launched.rank:
            return EXIT_INPUT  # all ranks read the same file: rank 0 says it once
        raise
    if launched:
        check_address(os.environ)
    elif config.world > 1:
        task, options, saves = (
            "zeromesh.train.loop:run_local_rank",
            config.model_dump_json(),
            config.checkpoint.every > 0,
        )
        restarts = config.faults.restarts
        return run_restarted(task, {"config": options}, config.world, restarts=restarts, saves=saves)
    # From here on, since torch is imported for seconds.
    with noticing_sigterm(), nullcontext() if launched else make_folder() as directory:
        from zeromesh.train.loop import run_rank

        try:
            return run_rank(config, directory and directory / RENDEZVOUS)
        except ZeromeshError:
            raise
        except Exception:
            traceback.print_exc()
            return 1
