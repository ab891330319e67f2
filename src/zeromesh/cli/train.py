"""`zeromesh train`: the processes of a run, and its exit code."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeromesh.errors import InputError, ZeromeshError
from zeromesh.integrations.elastic import EXIT_PREEMPTED, asked_by, noticing

if TYPE_CHECKING:
    from zeromesh.launch.failure import Failure
    from zeromesh.launch.processes import RankResult
    from zeromesh.train.config import TrainConfig

EXIT_INPUT = 2

SIGNALS = signal.SIGTERM, signal.SIGINT
"""Signals that end a run after its current step."""

GRACE_S = 10.0
"""Time for other ranks to end by themselves after one has: to report their own error, or to finish saving."""


Config = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a key of the file; may be repeated."),
]


def train(config: Config, overrides: Overrides = None) -> None:
    """Train a language model as a configuration describes it.

    Without torchrun, the command starts one local process per rank. Ctrl-C and SIGTERM end the run after the current
    step and save a checkpoint; a second signal ends it at once. The exit code is 0 if the run is done, 2 if the
    configuration is wrong, 130 after Ctrl-C, 75 after SIGTERM, and 1 otherwise. After 130 and 75, the same command
    resumes the run.
    """
    from zeromesh.launch.failure import end_process

    code = run(config, overrides or [])
    if code == EXIT_PREEMPTED:
        if "RANK" not in os.environ:  # a launcher's command is unknown
            given = [word for override in overrides or () for word in ("--set", override)]
            print(f"to go on: {shlex.join(['zeromesh', 'train', str(config), *given])}", flush=True)
        code = 128 + signal.SIGINT if asked_by() == signal.SIGINT else code
    if code == 1:
        end_process(code)
    if code:
        raise typer.Exit(code)


def run(path: Path, overrides: Sequence[str]) -> int:
    """Trains according to a configuration, and returns the exit code. Raises InputError if the configuration or the
    environment is wrong; if possible, before any process starts."""
    from zeromesh.launch.environment import Launched, check_address
    from zeromesh.launch.job import RENDEZVOUS, make_folder
    from zeromesh.train.config import load_config

    launched = Launched.of(os.environ)
    try:
        config = load_config(path, overrides)
        if launched:
            config = config.on_world(launched.world)
    except InputError:
        if launched and launched.rank:
            return EXIT_INPUT  # all ranks read the same file; rank 0 reports it
        raise
    if launched:
        check_address(os.environ)
    elif config.world > 1:
        return run_local(config)
    # From the beginning, since importing torch takes seconds.
    with noticing(*SIGNALS, twice=not launched), nullcontext() if launched else make_folder() as directory:
        try:
            return _run_rank(config, directory and directory / RENDEZVOUS)
        except ZeromeshError:
            raise
        except Exception:
            traceback.print_exc()
            return 1


def _run_rank(config: TrainConfig, store_file: Path | None) -> int:
    from zeromesh.launch.ranks import join_ranks
    from zeromesh.train.loop import run_training

    run = config.run
    with join_ranks(config.mesh, store_file, device=run.device, threads=run.threads, timeout_s=run.timeout_s) as ranks:
        return 0 if run_training(config, ranks) else EXIT_PREEMPTED


def run_local_rank(store_file: Path | None, *, config: str) -> None:
    from zeromesh.train.config import TrainConfig

    with noticing(signal.SIGTERM):
        code = _run_rank(TrainConfig.model_validate_json(config), store_file)
    if code:
        sys.exit(code)


def run_local(config: TrainConfig) -> int:
    """Runs local processes, and restarts them after a failure that a restart may fix. Returns the exit code. Raises
    InputError if the ranks report wrong input."""
    from zeromesh.launch.job import make_job
    from zeromesh.launch.processes import local_launches, run_ranks

    options, restarts = {"config": config.model_dump_json()}, config.faults.restarts
    with noticing(*SIGNALS, twice=True):
        for number in range(restarts + 1):
            with make_job(f"{__name__}:{run_local_rank.__name__}", options, prints=False) as job:
                launches = local_launches(job.command, config.world, {"TORCHELASTIC_RESTART_COUNT": str(number)})
                results = run_ranks(launches, grace_s=GRACE_S, asks=True)
                ending = verdict(results, job.failures(), preempted=asked_by() > 0)
            if ending.reason:
                print(ending.reason, file=sys.stderr, flush=True)
            if not ending.again or number == restarts or asked_by():
                break
            print(f"zeromesh: restart {number + 1} of {restarts}", file=sys.stderr, flush=True)
    return ending.code


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How local processes ended: exit code, a reason for people if the code is 1, and whether a restart may help."""

    code: int
    reason: str = ""
    again: bool = False


def verdict(results: Sequence[RankResult], failures: Sequence[Failure], *, preempted: bool = False) -> Ending:
    """Judges how the run ended, and why. It reports the first of `failures`, which is the cause; if that is an
    InputError, it is raised. `preempted`: the ranks were told to save and end."""
    from zeromesh.launch.failure import report

    by_themselves = [result for result in results if result.ended_because is None]
    killed = [(result.rank, -result.returncode) for result in by_themselves if result.returncode < 0]
    if killed:
        if preempted and all(number == signal.SIGTERM for _, number in killed):
            return Ending(code=EXIT_PREEMPTED)  # killed before it listened, so before its first step
        rank, number = min(killed)
        hints = {signal.SIGKILL: "; the machine may be out of memory", signal.SIGTERM: "; nothing was saved"}
        name = signal.Signals(number)
        reason = f"zeromesh: rank {rank} was ended by {name.name}{hints.get(name, '')}"
        return Ending(code=1, reason=reason, again=True)
    if failures:
        reason = report(failures, len(results))
        if failures[0].is_input:
            raise InputError(reason.removeprefix("zeromesh: "))
        return Ending(code=1, reason=reason, again=not failures[0].is_final)
    codes = {result.rank: result.returncode for result in results}
    if set(codes.values()) - {0, EXIT_PREEMPTED}:
        return Ending(code=1, reason=f"zeromesh: ranks ended with {codes} and left no reason", again=True)
    return Ending(code=max(codes.values()))
