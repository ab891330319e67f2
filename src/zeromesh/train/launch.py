"""Starts a run: as one of torchrun's processes, alone, or as the parent of local processes.

Local processes meet in a file, so no port is guessed; gloo binds its own. Each is a fresh interpreter, and ends when
its parent does.

Exit codes: 0 done; 2 wrong input; 75 preempted and saved; 1 anything else.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zeromesh.errors import InputError
from zeromesh.train.config import TrainConfig, load_config
from zeromesh.train.processes import (
    EXIT_INPUT,
    EXIT_PREEMPTED,
    Failure,
    LocalProcesses,
    forward_sigterm,
    verdict,
)


def train(config_path: Path, overrides: Sequence[str] = ()) -> int:
    """Run what a configuration describes; returns the exit code.

    Raises:
        InputError: the configuration is wrong; raised before any process starts where that can be known.
    """
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    try:
        config = load_config(config_path, overrides)
        if under_torchrun:
            config.check_world(int(os.environ["WORLD_SIZE"]))
    except InputError:
        if under_torchrun and os.environ["RANK"] != "0":
            return EXIT_INPUT  # all ranks read the same file: rank 0 says it once
        raise
    if under_torchrun or config.world == 1:
        return _run_here(config, under_torchrun=under_torchrun)
    return _run_local(config)


def _run_here(config: TrainConfig, *, under_torchrun: bool) -> int:
    from zeromesh.train.loop import run_training
    from zeromesh.train.ranks import join_ranks

    with tempfile.TemporaryDirectory(prefix="zeromesh-") as directory:
        store_file = None if under_torchrun else Path(directory) / "rendezvous"
        with join_ranks(config.run, config.mesh, store_file) as ranks:
            finished = run_training(config, ranks)
    return 0 if finished else EXIT_PREEMPTED


def _run_local(config: TrainConfig) -> int:
    with tempfile.TemporaryDirectory(prefix="zeromesh-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(config.model_dump_json())
        command = [sys.executable, "-m", "zeromesh.train.worker", name]
        with LocalProcesses(command, config.world) as processes, forward_sigterm(processes):
            codes = processes.wait()
        return verdict(codes, Failure.read_all(directory), processes.ended_by_us)
