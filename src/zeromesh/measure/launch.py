"""Runs a task on all ranks: those of torchrun, processes that this module starts, or those that a caller starts.

A task is a function of a module, named as text, since new processes must find it. It gets `Ranks` and the options, and
returns a JSON value. The result is rank 0's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from zeromesh.errors import InputError, MeshError
from zeromesh.launch.environment import Launched, check_address
from zeromesh.launch.failure import report
from zeromesh.launch.job import make_job
from zeromesh.launch.processes import RankResult, local_launches, raise_failed, run_ranks

Mesh = Mapping[str, int]
"""Sizes by axis name, outermost first, as in torch's DeviceMesh."""

_TIMEOUT_S = 24 * 3600.0


def under_torchrun() -> bool:
    """Whether torchrun, or a launcher that sets its variables, started this process as one of several. Raises
    ConfigError if its variables are incomplete, or another launcher started several processes without them."""
    return Launched.of(os.environ) is not None


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def parse_mesh(text: str) -> dict[str, int]:
    """Parses a mesh.

    >>> parse_mesh("cluster=2,node=4")
    {'cluster': 2, 'node': 4}

    Raises:
        MeshError: the text is not sizes by name.
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name.isidentifier() or not size.isdecimal() or len(size) > 9 or int(size) < 1 or name in mesh:
            raise MeshError(f'expected sizes by axis name, outermost first, such as "cluster=2,node=4"; got {text!r}')
        mesh[name] = int(size)
    return mesh


def mesh_text(mesh: Mesh) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def default_mesh(ranks: int) -> dict[str, int]:
    """Returns the levels of the launched ranks: under torchrun, nodes of its local ranks; else one node of `ranks`."""
    launched = Launched.of(os.environ)
    if launched is None:
        return {"node": ranks}
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise MeshError("the environment does not say LOCAL_WORLD_SIZE, the ranks of a machine: set it, or give --mesh")
    world, local = launched.world, launched.local_world
    if world % local:
        raise MeshError(f"{world} ranks are not nodes of {local}: give --mesh, outermost axis first")
    return {"cluster": world // local, "node": local} if world > local else {"node": world}


def on_all_ranks(
    task: str,
    options: Mapping[str, Any],
    mesh: Mesh,
    *,
    start: Callable[[tuple[str, ...]], Sequence[RankResult]] | None = None,
) -> Any:
    """Runs `task`, a "module:function", on every rank of `mesh`, with options that are JSON values.

    `start` runs a command on ranks that know where to meet; without it, ranks are processes on this machine. Returns
    rank 0's result, and None on the other ranks of a torchrun. Raises InputError if the first rank that failed reports
    wrong input; MeshError if the mesh has another number of ranks than there are; RanksFailedError if a rank failed
    otherwise.
    """
    launched = Launched.of(os.environ)
    if launched is not None:
        if (ranks := prod(mesh.values())) != launched.world:
            raise MeshError(f"the mesh {mesh_text(mesh)} has {ranks} ranks; {launched.world} are there")
        check_address(os.environ)
        result = run_task(None, task=task, mesh=mesh, options=options)
        return result if is_first() else None
    whole = {"task": task, "mesh": dict(mesh), "options": dict(options)}
    with make_job(f"{__name__}:{run_task.__name__}", whole, local=start is None) as job:
        if start is None:
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # torchrun's default
            results: Sequence[RankResult] = run_ranks(
                local_launches(job.command, prod(mesh.values()), threads), timeout_s=_TIMEOUT_S
            )
        else:
            results = start(job.command)
        failures = job.failures()
        if failures and failures[0].is_input:
            raise InputError(report(failures, len(results)).removeprefix("zeromesh: "))
        raise_failed(results)
        return job.result()


def run_task(store_file: Path | None, *, task: str, mesh: Mesh, options: Mapping[str, Any]) -> Any:
    """Runs `task` as the rank in the environment's variables; for `store_file` see `join_ranks`."""
    from functools import partial

    from zeromesh.launch.job import find_task
    from zeromesh.launch.ranks import join_ranks
    from zeromesh.measure.places import require_places

    with join_ranks(mesh, store_file, agree=partial(require_places, mesh)) as ranks:
        return find_task(task)(ranks, **options)
