"""Rehearses ranks of a run, one after another, each in a process of its own. Torch-free.

In processes of their own, since a virtual device is all of a process's accelerator; one after another, since each uses
the cores that there are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from zeromesh.errors import InputError, MeshError, RanksFailedError
from zeromesh.launch.job import Job, make_job
from zeromesh.launch.processes import local_launches, run_ranks
from zeromesh.progress import note, progress
from zeromesh.rehearsal.result import Rehearsal
from zeromesh.train.config import TrainConfig, load_config

_TASK = "zeromesh.rehearsal.training:rehearse_rank"


def rehearse_config(
    path: Path, overrides: Sequence[str] = (), *, world: int = 0, ranks: Sequence[int] = (0,), traced: bool = False
) -> list[Rehearsal]:
    """Rehearses a step of a configured run, as `zeromesh train` takes it, on each of `ranks`, at least one. The mesh
    must have `world` ranks, 0 for any number. If its timeline is asked for (`traced`), it needs a cluster. Raises
    InputError if the configuration is wrong, the mesh has another number of ranks or not those ranks, or the virtual
    device cannot be had; RanksFailedError if a process has failed."""
    config = load_config(path, overrides)
    if world:
        config = config.on_world(world, asker="--world asks for {world}")
    for rank in ranks:
        if not 0 <= rank < config.world:
            raise MeshError(f"--rank: ranks of this mesh are 0 to {config.world - 1}, got {rank}")
    if config.cluster:
        config.hardware()
    elif traced:
        raise InputError("--trace needs a cluster whose time is shown: give --cluster NAME")
    with progress("rehearsing"):
        return [_rehearse(config, rank) for rank in dict.fromkeys(ranks)]


def _rehearse(config: TrainConfig, rank: int) -> Rehearsal:
    note(f"rank {rank} of {config.world:,}")
    options = {"config": config.model_dump_json(), "rank": rank}
    with make_job(_TASK, options, prints=False) as job:
        results = run_ranks(local_launches(job.command, 1, {}))
        if any(result.failed for result in results):
            raise _failure(job, rank, results[0].stderr)
        return TypeAdapter(Rehearsal).validate_python(job.result())


def _failure(job: Job, rank: int, printed: str) -> Exception:
    for failure in job.failures():
        if failure.is_input:
            return InputError(failure.message)
        print(failure.traceback, file=sys.stderr, end="")
        return RanksFailedError(f"the process that rehearsed rank {rank} failed: {failure.message}")
    return RanksFailedError(f"the process that rehearsed rank {rank} failed and left no reason\n{printed}")
