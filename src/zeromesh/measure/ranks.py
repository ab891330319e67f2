"""What a process that takes part in a measurement knows of itself and the others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from zeromesh.comm.device import CPU, agree_on_device, backend_for, identity, local_device
from zeromesh.measure.places import machine_id, require_places
from zeromesh.train.environment import Launched
from zeromesh.train.meeting import meet

TIMEOUT_S = 120.0
"""Of each collective: long enough for ranks that start late, short enough that a dead one is noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others.

    Args:
        rank, world: over all.
        device: where this rank computes.
        mesh: of all ranks, outermost axis first.
        kept: what a task has raised on this rank, and returned as a part of its result.
    """

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh
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
def join(mesh: Mapping[str, int], store_file: Path | None) -> Iterator[Ranks]:
    """Makes the process group and the mesh of the ranks that the environment names, as torchrun does.

    Args:
        mesh: sizes by axis name, outermost first.
        store_file: where local processes meet; None takes torchrun's address from the environment.

    Raises:
        InputError: some ranks have a device and others have none.
        MeshError: ranks have other meshes in mind, or an inner axis joins machines that an outer one does not.
    """
    launched = Launched.of(os.environ)
    assert launched is not None
    rank, world = launched.rank, launched.world
    timeout = timedelta(seconds=TIMEOUT_S)
    if store_file is None:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
    else:
        store = FileStore(str(store_file), world)
    found = local_device(launched.local_rank, launched.local_world)
    name = identity(found)
    store = meet(store, rank, world, wait_s=TIMEOUT_S)
    require_places(mesh, machine_id(), store, rank, world)
    device = agree_on_device(found, name, store, rank, world)
    if device != CPU:
        torch.cuda.set_device(device)
    dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=world, timeout=timeout)
    made = init_device_mesh(device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    ranks = Ranks(rank=rank, world=world, device=device, mesh=made)
    yield ranks
    # Only on success: after an error other ranks may never arrive, and the process ends anyway.
    if not ranks.kept:
        dist.destroy_process_group()
