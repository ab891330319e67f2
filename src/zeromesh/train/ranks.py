"""What a process of a run knows of itself and the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from zeromesh.comm.device import CPU, agree_on_device, backend_for, identity, local_device, visible_devices
from zeromesh.errors import CommunicationError, ConfigError, InputError, ZeromeshError
from zeromesh.train.config import RunConfig
from zeromesh.train.environment import Launched
from zeromesh.train.meeting import meet
from zeromesh.train.roll_call import RollCall, is_communication

T = TypeVar("T")

WORK_S = 2 * 3600.0
"""What rank 0 gets for work of its own: drawing 70 billion parameters on a host takes half an hour."""

START_S = 120.0
"""What ranks get to start in, at least: interpreters and imports take long where many share a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others.

    Args:
        rank, world: over the whole run.
        local_rank, local_world: on this machine.
        device: where this rank computes.
        mesh: of all ranks, outermost axis first.
        again, job: as `Launched` has them.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    mesh: DeviceMesh
    again: bool = False
    job: str = ""


@contextmanager
def join_ranks(
    run: RunConfig, mesh: dict[str, int], store_file: Path | None, launched: Launched | None
) -> Iterator[Ranks]:
    """Make the process group and the mesh, and leave them in order.

    An error inside is told to the other ranks; one that says that others could not be reached is raised again with the
    names of those that are missing.

    Args:
        run: device, threads and timeout.
        mesh: sizes by axis name, outermost first.
        store_file: where local processes meet; None takes torchrun's address from the environment.
        launched: what the launcher said; None for a process that runs alone.

    Raises:
        ConfigError: CUDA is asked for and there are not enough devices, or this rank's cannot be told.
        InputError: some ranks have a device and others have none.
        CommunicationError: the ranks do not meet within the timeout.
    """
    launched = launched or Launched.alone(os.environ)
    rank, world = launched.rank, launched.world
    _set_threads(run, launched.local_world)
    found = _device(run, launched)
    name = identity(found)  # before the others wait: a device that does not answer is no failure to meet
    with _reaching_all(launched, store_file):
        store = _meet(run, store_file, launched)
        device = agree_on_device(found, name, store, rank, world)
    _require_device(run, found, device, launched)
    if device != CPU:
        torch.cuda.set_device(device)
    with _reaching_all(launched, store_file):
        timeout = timedelta(seconds=run.timeout_s)
        dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        with RollCall(store, rank, world) as roll_call:
            try:
                device_mesh = init_device_mesh(device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
                yield Ranks(
                    rank=rank,
                    world=world,
                    local_rank=launched.local_rank,
                    local_world=launched.local_world,
                    device=device,
                    mesh=device_mesh,
                    again=launched.again,
                    job=launched.job,
                )
            except Exception as error:
                explained = roll_call.explain(error)
                if explained is error:
                    raise
                raise explained from error
    except BaseException:
        if world == 1:
            dist.destroy_process_group()
        raise
    # Of several ranks only on success: after an error others may never arrive, and the process ends anyway.
    dist.destroy_process_group()


def _meet(run: RunConfig, store_file: Path | None, launched: Launched) -> Store:
    """The store of this start, once all ranks are there.

    Processes begin at different times, and import for longer than a collective should take: `START_S` is theirs.
    """
    rank, world = launched.rank, launched.world
    start_s = max(run.timeout_s, START_S)
    if store_file is None:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=timedelta(seconds=start_s)))
    else:
        store = FileStore(str(store_file), world)
    return meet(store, rank, world, wait_s=start_s)


@contextmanager
def _reaching_all(launched: Launched, store_file: Path | None) -> Iterator[None]:
    """Says where the ranks were to meet, when they do not."""
    where = "in a file" if store_file else f"at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {launched.rank} could not meet the other {launched.world - 1} ranks {where}: one was not started, "
            f"has died, or cannot be reached; {error}"
        ) from error


@contextmanager
def first_at_work(operation: str) -> Iterator[None]:
    """Rank 0 may take longer over what is inside than a collective may take: the others wait for it at the end.

    Raises:
        CommunicationError: it has not come to the end within `WORK_S`.
    """
    store = PrefixStore("zeromesh/first", dist.distributed_c10d._get_default_store())  # torch has no public way to it
    try:
        yield
    finally:
        if dist.get_rank() == 0:  # also where it failed: its error is told by what comes next
            store.set(operation, "")
    with collective(operation):
        store.wait([operation], timedelta(seconds=WORK_S))


@contextmanager
def collective(operation: str) -> Iterator[None]:
    """Names the operation where ranks cannot be reached.

    Raises:
        CommunicationError: torch said so.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ZeromeshError) or not is_communication(error):
            raise
        raise CommunicationError(
            f"{operation} failed on rank {dist.get_rank()}: another rank has died, has stalled or has raised an error. "
            f"{error}"
        ) from error


def from_first(make: Callable[[], T], operation: str, *, at_work: bool = False) -> T:
    """What `make` returns on rank 0, on every rank; collective.

    Args:
        make: called on rank 0.
        operation: for messages.
        at_work: `make` may take longer than a collective: see `first_at_work`.

    Raises:
        InputError: on every rank, where `make` raises it or an OSError.
    """
    answer: list[Any] = [None, None]
    with first_at_work(operation) if at_work else nullcontext():
        if dist.get_rank() == 0:
            try:
                answer[0] = make()
            except (InputError, OSError) as error:
                answer[1] = f"{error}"
    with collective(operation):
        dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise ConfigError(answer[1])
    return answer[0]  # type: ignore[no-any-return]  # make's


def on_any(here: bool, operation: str) -> bool:
    """Whether it is so on any rank; collective."""
    flag = torch.tensor(float(here))
    with collective(operation):
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _device(run: RunConfig, launched: Launched) -> torch.device:
    """What this rank finds for itself."""
    if run.device == "cpu":
        return CPU
    return local_device(launched.local_rank, launched.local_world, in_lab=run.device == "cuda")


def _require_device(run: RunConfig, found: torch.device, device: torch.device, launched: Launched) -> None:
    """After ranks that have taken the same device have gone back to the CPU."""
    visible = visible_devices()
    if device == CPU != found and visible > 1 and "LOCAL_RANK" not in os.environ:
        raise ConfigError(
            f"the environment has RANK and WORLD_SIZE but not LOCAL_RANK, and this machine has {visible} devices: all "
            f"its ranks have taken the first. Set LOCAL_RANK and LOCAL_WORLD_SIZE (under srun to SLURM_LOCALID and "
            f"SLURM_NTASKS_PER_NODE), or start with torchrun, which does"
        )
    if run.device == "cuda" and device == CPU:
        raise ConfigError(
            f'run.device = "cuda" needs a device of its own for each rank; this machine shows {visible} to its '
            f"{launched.local_world} ranks{', and other ranks take the same' if found != CPU else ''}"
        )


def _set_threads(run: RunConfig, local_world: int) -> None:
    """More threads than cores slow every rank down, and each waits for the slowest; the host's work is any device's."""
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
