"""What a process of a run knows of itself and the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeromesh.errors import ConfigError
from zeromesh.train.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others.

    Args:
        rank, world: over the whole run.
        local_rank, local_world: on this machine.
        device: where this rank computes.
        mesh: of all ranks, outermost axis first.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    mesh: DeviceMesh


@contextmanager
def join_ranks(run: RunConfig, mesh: dict[str, int], store_file: Path | None) -> Iterator[Ranks]:
    """Make the process group and the mesh, and leave them in order.

    Args:
        run: device, threads and timeout.
        mesh: sizes by axis name, outermost first.
        store_file: where local processes meet; None takes torchrun's address from the environment.

    Raises:
        ConfigError: CUDA is asked for and there are not enough devices.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _device(run, local_rank, local_world)
    _set_threads(run, device, local_world)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=run.timeout_s)
    if store_file is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = FileStore(str(store_file), world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    device_mesh = init_device_mesh(device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    yield Ranks(rank=rank, world=world, local_rank=local_rank, local_world=local_world, device=device, mesh=device_mesh)
    # Only on success: after an error other ranks may never arrive, and the process ends anyway.
    dist.destroy_process_group()


def _device(run: RunConfig, local_rank: int, local_world: int) -> torch.device:
    devices = torch.cuda.device_count() if run.device != "cpu" and torch.cuda.is_available() else 0
    if devices >= local_world:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    if run.device == "cuda":
        raise ConfigError(
            f'run.device = "cuda" needs a device for each of the {local_world} ranks of this machine; found {devices}'
        )
    return torch.device("cpu")


def _set_threads(run: RunConfig, device: torch.device, local_world: int) -> None:
    """More threads than cores slow every rank down, and each waits for the slowest."""
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    elif device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
