"""Starts a run: as one of torchrun's processes, alone, or as the parent of local processes.

Each local process is a fresh interpreter, and ends when its parent does.

Exit codes: 0 done; 2 wrong input; 75 preempted and saved; 1 anything else.
"""

from __future__ import annotations

import os
import sys
import traceback
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from zeromesh.errors import InputError, ZeromeshError
from zeromesh.launch.environment import NO_NAME, Launched, check_address
from zeromesh.launch.job import RENDEZVOUS, make_folder, make_job
from zeromesh.launch.processes import EXIT_PREEMPTED, Sigterm, local_launches, run_ranks
from zeromesh.train.config import TrainConfig, load_config
from zeromesh.train.ending import Ending, verdict
from zeromesh.train.preemption import noticing_sigterm

EXIT_INPUT = 2
GRACE_S = 10.0
"""What the other ranks get to end by themselves once one has: to report their own error, or to finish saving."""


def train(config_path: Path, overrides: Sequence[str] = ()) -> int:
    """Run what a configuration describes; returns the exit code.

    Raises:
        InputError: the configuration or the environment is wrong; raised before any process starts where that can be
            known.
    """
    launched = Launched.of(os.environ)
    try:
        config = load_config(config_path, overrides)
        if launched:
            config = config.on_world(launched.world)
    except InputError:
        if launched and launched.rank:
            return EXIT_INPUT  # all ranks read the same file: rank 0 says it once
        raise
    if launched:
        check_address(os.environ)
    if launched or config.world == 1:
        return _run_here(config, launched)
    return _run_local(config)


def _run_here(config: TrainConfig, launched: Launched | None) -> int:
    with nullcontext() if launched else make_folder() as directory:
        try:
            finished = _run_rank(config, directory and directory / RENDEZVOUS)
        except ZeromeshError:
            raise
        except Exception:
            traceback.print_exc()
            return 1
    return 0 if finished else EXIT_PREEMPTED


def _run_rank(config: TrainConfig, store_file: Path | None) -> bool:
    with noticing_sigterm():
        from zeromesh.launch.ranks import join_ranks
        from zeromesh.train.loop import run_training

        run = config.run
        with join_ranks(
            config.mesh, store_file, device=run.device, threads=run.threads, timeout_s=run.timeout_s
        ) as ranks:
            return run_training(config, ranks)


def run_local_rank(store_file: Path | None, *, config: str) -> None:
    """The task of each local rank."""
    if not _run_rank(TrainConfig.model_validate_json(config), store_file):
        sys.exit(EXIT_PREEMPTED)


def _run_local(config: TrainConfig) -> int:
    """Start local processes, and start them again where that may help, `faults.restarts` times."""
    # SLURM has a name that outlives this process, and is the same when the job comes back from the queue.
    job = NO_NAME if "SLURM_JOB_ID" in os.environ else uuid.uuid4().hex
    with Sigterm() as sigterm:
        for restarts in range(config.faults.restarts + 1):
            ending = _attempt(config, sigterm, restarts, job)
            if ending.reason:
                print(ending.reason, file=sys.stderr, flush=True)
            last = restarts == config.faults.restarts or sigterm.asked
            if ending.code != 1 or not ending.again or last:
                break
            print(f"zeromesh: restart {restarts + 1} of {config.faults.restarts}", file=sys.stderr, flush=True)
        return ending.code


def _attempt(config: TrainConfig, sigterm: Sigterm, restarts: int, job: str) -> Ending:
    environment = {"TORCHELASTIC_RESTART_COUNT": str(restarts), "TORCHELASTIC_RUN_ID": job}
    task, options = f"{__name__}:{run_local_rank.__name__}", {"config": config.model_dump_json()}
    with make_job(task, options, prints=False) as made:
        launches = local_launches(made.command, config.world, environment)
        results = run_ranks(launches, grace_s=GRACE_S, sigterm=sigterm)
        return verdict(results, made.failures(), preempted=sigterm.asked and config.checkpoint.every > 0)
