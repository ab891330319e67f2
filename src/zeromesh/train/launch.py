"""Starts a run: as one of torchrun's processes, alone, or as the parent of local processes.

Local processes meet in a file, so no port is guessed; gloo binds its own. Each is a fresh interpreter, and ends when
its parent does.

Exit codes: 0 done; 2 wrong input; 75 preempted and saved; 1 anything else.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path

from zeromesh.errors import InputError, InternalError, ZeromeshError
from zeromesh.train.config import TrainConfig, load_config
from zeromesh.train.environment import NO_NAME, Launched, check_address
from zeromesh.train.preemption import noticing_sigterm
from zeromesh.train.processes import EXIT_INPUT, EXIT_PREEMPTED, Ending, Failure, Forwarder, LocalProcesses, verdict


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
    with noticing_sigterm(), tempfile.TemporaryDirectory(prefix="zeromesh-") as directory:
        from zeromesh.train.loop import run_training
        from zeromesh.train.ranks import join_ranks

        store_file = None if launched else Path(directory) / "rendezvous"
        try:
            with join_ranks(config.run, config.mesh, store_file, launched) as ranks:
                finished = run_training(config, ranks)
        except (InputError, InternalError):
            raise
        except ZeromeshError as error:
            print(f"zeromesh: rank {launched.rank if launched else 0} failed: {error}", file=sys.stderr)
            return 1
        except Exception:
            traceback.print_exc()
            return 1
    return 0 if finished else EXIT_PREEMPTED


def _run_local(config: TrainConfig) -> int:
    """Start local processes, and start them again where that may help, `faults.restarts` times."""
    # SLURM has a name that outlives this process, and is the same when the job comes back from the queue.
    job = NO_NAME if "SLURM_JOB_ID" in os.environ else uuid.uuid4().hex
    with Forwarder() as sigterm:
        for restarts in range(config.faults.restarts + 1):
            ending = _attempt(config, sigterm, restarts, job)
            if ending.reason:
                print(ending.reason, file=sys.stderr, flush=True)
            last = restarts == config.faults.restarts or sigterm.asked
            if ending.code != 1 or not ending.again or last:
                break
            print(f"zeromesh: restart {restarts + 1} of {config.faults.restarts}", file=sys.stderr, flush=True)
        return ending.code


def _attempt(config: TrainConfig, sigterm: Forwarder, restarts: int, job: str) -> Ending:
    environment = {"TORCHELASTIC_RESTART_COUNT": str(restarts), "TORCHELASTIC_RUN_ID": job}
    with tempfile.TemporaryDirectory(prefix="zeromesh-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(config.model_dump_json())
        command = [sys.executable, "-m", "zeromesh.train.worker", name]
        with LocalProcesses(command, config.world, environment=environment) as processes:
            sigterm.to(processes)
            codes = processes.wait()
        preempted = sigterm.asked and config.checkpoint.every > 0
        return verdict(codes, Failure.read_all(directory), processes.ended_by_us, preempted=preempted)
