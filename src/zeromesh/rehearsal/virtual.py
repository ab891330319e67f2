"""Makes this process one rank of any number, on the virtual device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from zeromesh import simdev
from zeromesh.errors import InputError, MeshError
from zeromesh.rehearsal.attention import fuse_attention


@contextmanager
def virtual_rank(mesh: Mapping[str, int], rank: int) -> Iterator[DeviceMesh]:
    """The mesh, of sizes by axis name, outermost first, whose other ranks are taken to hold, and to say, the same as
    this one. Raises MeshError if there is no such rank; InputError if the process has a process group already, or the
    device cannot be had: there is no compiler, or torch is not the one that it was written for."""
    world = prod(mesh.values())
    if not 0 <= rank < world:
        raise MeshError(f"ranks of this mesh are 0 to {world - 1}, got {rank}")
    if dist.is_initialized():
        raise InputError(
            "a rehearsal makes its own process group, and this process has one: rehearse before init_process_group, or "
            "in a process of its own"
        )
    device = simdev.start(virtual=True)
    fuse_attention()
    simdev.module.empty_cache()  # of an earlier rehearsal
    simdev.counting_group(rank, world)
    try:
        with (
            patch.object(dist, "broadcast_object_list", _said_by_the_first),
            patch.object(dist, "all_gather_object", _said_by_all),
        ):
            yield init_device_mesh(device.torch.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    finally:
        dist.destroy_process_group()
        # It holds meshes of these groups, equal to those of the next.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch leaves it so


def _said_by_the_first(object_list: list[Any], *_: Any, **__: Any) -> None:
    """Replaces torch's broadcast by this rank's own value. Torch's sends the object's length first, which only the
    first rank has."""


def _said_by_all(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    object_list[:] = [obj] * len(object_list)
