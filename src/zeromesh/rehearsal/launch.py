"""Rehearses ranks of a run one after another, each in its own process. Torch-free.

They need processes, since a virtual device becomes a process's only accelerator. They run one after another, since each
uses all cores.
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
    """Rehearses a step of a configured run, as in `zeromesh train`, on each of `ranks`, at least one. The mesh must
    have `world` ranks; 0 allows any number. `traced` asks for a timeline, which needs a cluster. Raises InputError if
    the configuration is wrong, the mesh has another number of ranks or not these ranks, or the virtual device is not
    available; RanksFailedError if a process has failed."""
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
