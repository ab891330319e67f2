"""What a process knows of itself and the other ranks, and how they come together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from zeromesh.launch.device import CPU, agree_on_device, backend_for, find_device, set_variables
from zeromesh.launch.environment import Launched
from zeromesh.launch.failure import is_communication
from zeromesh.launch.meeting import meet
from zeromesh.launch.roll_call import RollCall

T = TypeVar("T")

WORK_S = 2 * 3600.0
"""What rank 0 gets for work of its own: drawing 70 billion parameters on a host takes half an hour."""

START_S = 120.0
"""What ranks get to start in, at least: interpreters and imports take long where many share a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others.

    Args:
        rank, world: over all.
        device: where this rank computes.
        mesh: of all ranks, outermost axis first.
        again, job: as `Launched` has them.
        kept: what a task has raised on this rank, and returned as a part of its result.
    """

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh
    again: bool = False
    job: str = ""
    kept: list[Exception] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def settle(self) -> None:
        """Waits for the device, where it is not the host."""
        if not self.on_cpu:
            torch.accelerator.synchronize()

    def settle_stream(self) -> None:
        """Waits for the computation; what a step leaves under way for the next goes on."""
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
    """Make the process group and the mesh of the ranks that the environment names, and leave them in order.

    An error inside is told to the other ranks; one that says that others could not be reached is raised again with the
    names of those that are missing.

    Args:
        mesh: sizes by axis name, outermost first.
        store_file: where local processes meet, or a process that nobody has launched meets itself; None takes
            torchrun's address from the environment.
        device: as `find_device` takes it.
        threads: of torch on the host; None divides this machine's cores among its ranks.
        timeout_s: of each collective.
        agree: called with the ranks' store, this rank and their number before there is a process group.

    Raises:
        InputError: some ranks have a device of their own and others have none, or not the one that is asked for; what
            `agree` raises.
        CommunicationError: the ranks do not meet within the timeout.
    """
    launched = Launched.of(os.environ) or Launched.alone(os.environ)
    rank, world = launched.rank, launched.world
    _set_threads(threads, launched.local_world)
    set_variables(rank)
    # Before the others wait: a device that does not answer is no failure to meet.
    found, claim = find_device(device, launched.local_rank, launched.local_world)
    with _reaching_all(launched, store_file):
        store = _meet(store_file, launched, max(timeout_s, START_S))
        if agree is not None:
            agree(store, rank, world)
        agree_on_device(claim, store, rank, world)
    own = None if found == CPU else found
    if own is not None:
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
    ranks: Ranks | None = None
    try:
        with _naming_the_missing(store, rank, world):
            made = init_device_mesh(found.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
            ranks = Ranks(rank=rank, world=world, device=found, mesh=made, again=launched.again, job=launched.job)
            yield ranks
    except BaseException:
        if world == 1:
            dist.destroy_process_group()
        raise
    # Of several ranks only on success: after an error others may never arrive, and the process ends anyway.
    if not ranks.kept or world == 1:
        dist.destroy_process_group()


@contextmanager
def _naming_the_missing(store: Store, rank: int, world: int) -> Iterator[None]:
    with RollCall(store, rank, world) as roll_call:
        try:
            yield
        except Exception as error:
            explained = roll_call.explain(error)
            if explained is error:
                raise
            raise explained from error


def _meet(store_file: Path | None, launched: Launched, start_s: float) -> Store:
    """The store of this start, once all ranks are there.

    Processes begin at different times, and import for longer than a collective should take: `start_s` is theirs.
    """
    rank, world = launched.rank, launched.world
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


def on_every(make: Callable[[], T], operation: str) -> T:
    """What `make` returns on this rank; collective.

    Raises:
        InputError: on every rank, where `make` raises it or an OSError on any.
    """
    made: list[T] = []
    own: str | None = None
    try:
        made.append(make())
    except (InputError, OSError) as error:
        own = f"{error}"
    told: list[str | None] = [None] * dist.get_world_size()
    with collective(operation):
        dist.all_gather_object(told, own)
    for rank, why in enumerate(told):
        if why is not None:
            raise ConfigError(f"rank {rank}: {why}")
    return made[0]


def on_any(here: bool, operation: str) -> bool:
    """Whether it is so on any rank; collective."""
    flag = torch.tensor(float(here))
    with collective(operation):
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _set_threads(threads: int | None, local_world: int) -> None:
    """More threads than cores slow every rank down, and each waits for the slowest; the host's work is any device's."""
    if threads is not None:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
