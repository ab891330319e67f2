"""The ranks of a job, as each process sees them: how they come together and talk."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from zeromesh.errors import CommunicationError, ConfigError, InputError, ZeromeshError
from zeromesh.files import usable_cores
from zeromesh.launch.device import CPU, agree_on_device, backend_for, find_device, set_variables
from zeromesh.launch.environment import Launched
from zeromesh.launch.failure import is_communication
from zeromesh.launch.processes import schedule_as_batch
from zeromesh.launch.roll_call import RollCall

T = TypeVar("T")

WORK_S = 2 * 3600.0
"""Time limit of rank 0's own work: drawing 70 billion parameters on a host takes half an hour."""

START_S = 120.0
"""Least time for all ranks to start: processes begin at different times, and imports take long on a shared disk."""

_KEY = "zeromesh/meeting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others: `device` is where it computes, `mesh` that of all ranks."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh
    kept: list[Exception] = field(default_factory=list)  # errors that a task has returned as part of its result

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def settle(self) -> None:
        """Waits for the device."""
        if not self.on_cpu:
            torch.accelerator.synchronize()

    def settle_stream(self) -> None:
        """Waits for the computation, and not for transfers that a step leaves under way."""
        if not self.on_cpu:
            torch.accelerator.current_stream().synchronize()


@contextmanager
def join_ranks(
    mesh: Mapping[str, int],
    store_file: Path | None,
    *,
    device: str = "auto",
    threads: int | None = None,
    timeout_s: float = START_S,
    agree: Callable[[Store, int, int], None] | None = None,
) -> Iterator[Ranks]:
    """Makes the process group and the mesh of the ranks that the environment names. An error inside is told to the
    other ranks; one that says that others could not be reached is raised with the names of those that are missing.

    Args:
        store_file: where local processes meet; None takes torchrun's address from the environment.
        device: as `find_device` takes it.
        threads: of torch on the host; None divides this machine's cores among its ranks.
        timeout_s: of each collective.
        agree: called with the ranks' store, this rank and their number before there is a process group.

    Raises:
        InputError: as `agree_on_device`, or raised by `agree`.
        CommunicationError: the ranks do not meet within the timeout.
    """
    launched = Launched.of(os.environ) or Launched(rank=0, world=1, local_rank=0, local_world=1)
    rank, world = launched.rank, launched.world
    _set_threads(threads, launched.local_world)
    set_variables(rank)
    # Before the others wait: a device that does not answer is no failure to meet.
    found, claim = find_device(device, launched.local_rank, launched.local_world)
    start_s = max(timeout_s, START_S)
    with _reaching_all(launched, store_file):
        if store_file is None:
            store, _, _ = next(rendezvous("env://", rank, world, timeout=timedelta(seconds=start_s)))
        else:
            store = FileStore(str(store_file), world)
        store = meet(store, rank, world, wait_s=start_s)
        if agree is not None:
            agree(store, rank, world)
        agree_on_device(claim, store, rank, world)
    own = None if found == CPU else found
    if own is None:
        schedule_as_batch()
    else:
        torch.accelerator.set_device_index(own)
    with _reaching_all(launched, store_file):
        dist.init_process_group(
            backend_for(found),
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=own,  # known, a group connects when it is made, and not within the first step
        )
    roll_call, ranks = RollCall(store, rank, world), None
    try:
        with roll_call:
            made = init_device_mesh(found.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
            ranks = Ranks(rank=rank, world=world, device=found, mesh=made)
            yield ranks
    except BaseException as error:
        if world == 1:
            dist.destroy_process_group()
        explained = roll_call.explain(error) if isinstance(error, Exception) else error
        if explained is error:
            raise
        raise explained from error
    # With several ranks only on success: after an error others may never arrive, and the process ends anyway.
    if not ranks.kept or world == 1:
        dist.destroy_process_group()


def meet(store: Store, rank: int, world: int, *, wait_s: float) -> Store:
    """Waits for the other processes of this start. Returns a store that only they use.

    A launcher's store outlives the processes. When torchrun starts them again, it holds the addresses of those before.
    So each start has a name that only its own processes know::

        rank 0     says the name, a new one                 every rank   says its own, also new, under rank 0's name
        rank 0     lists all names, once they are there     every rank   goes on when its own is in the list

    Entries of an earlier start name another rank 0, or a list without this process.

    Raises:
        CommunicationError: some have not come within `wait_s`; names them.
    """

    def read(key: str) -> str:
        text: bytes = store.get(key) if store.check([key]) else b""
        return text.decode()

    own, host, pause_s, end = uuid.uuid4().hex, "", 0.01, time.monotonic() + wait_s
    while True:
        name = own if rank == 0 else read(_KEY)
        if name and name != host:
            host = name
            store.set(f"{_KEY}/{host}/{rank}", own)
            if rank == 0:
                store.set(_KEY, own)
        keys, everyone = [f"{_KEY}/{host}/{other}" for other in range(world)], f"{_KEY}/{host}/all"
        if rank == 0 and store.check(keys):
            store.set(everyone, " ".join(map(read, keys)))
        if host and own in read(everyone).split():
            return PrefixStore(host, store)
        if time.monotonic() >= end:
            # Without rank 0 nobody knows of the others.
            absent = [str(other) for other, key in enumerate(keys) if not store.check([key])] if host else ["0"]
            who = f"rank{'s' * (len(absent) > 1)} {', '.join(absent) or '0'}"
            raise CommunicationError(f"{who} did not come within {wait_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


@contextmanager
def _reaching_all(launched: Launched, store_file: Path | None) -> Iterator[None]:
    """Raises CommunicationError, with the place where the ranks were to meet, if they do not."""
    where = "in a file" if store_file else f"at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {launched.rank} could not meet the other {launched.world - 1} ranks {where}: one was not started, "
            f"has died, or cannot be reached; {error}"
        ) from error


@contextmanager
def collective(operation: str) -> Iterator[None]:
    """Raises CommunicationError, with the operation's name, for torch's errors about ranks that cannot be reached."""
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
    """The result of `make` on rank 0, on every rank; collective. Raises InputError on every rank if `make` raises it or
    an OSError. With `at_work` it may take longer than a collective, up to `WORK_S`."""
    first, answer = dist.get_rank() == 0, [None, ""]
    store = PrefixStore("zeromesh/first", dist.distributed_c10d._get_default_store())  # torch has no public way to it
    try:
        if first:
            answer = _attempt(make)
    finally:
        if first and at_work:
            store.set(operation, "")
    with collective(operation):
        if at_work:
            store.wait([operation], timedelta(seconds=WORK_S))
        dist.broadcast_object_list(answer, src=0)
    if answer[1]:
        raise ConfigError(answer[1])
    return answer[0]  # type: ignore[return-value]  # make's


def on_every(make: Callable[[], T], operation: str) -> T:
    """The result of `make` on this rank; collective. If `make` raises InputError or OSError on one rank, InputError is
    raised on all."""
    made, own = _attempt(make)
    told = [""] * dist.get_world_size()
    with collective(operation):
        dist.all_gather_object(told, own)
    for rank, why in enumerate(told):
        if why:
            raise ConfigError(f"rank {rank}: {why}")
    return made  # type: ignore[no-any-return]  # make's


def _attempt(make: Callable[[], Any]) -> list[Any]:
    """The result of `make`, and the text of its error."""
    try:
        return [make(), ""]
    except (InputError, OSError) as error:
        return [None, f"{error}"]


def _set_threads(threads: int | None, local_world: int) -> None:
    """Sets torch's threads: more threads than cores slow every rank down, also where it only drives a device."""
    if threads is not None:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // local_world))
