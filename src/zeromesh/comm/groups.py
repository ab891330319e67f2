"""Process groups: for each axis of a layout, one communicator for gathers and one for reductions.

Two communicators, because the operations of one run in the order of issue even when they come from two threads or
streams: a gather that is needed now would wait behind a reduction that is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeromesh.errors import MeshError
from zeromesh.strategy import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one rank handed to the transport for one collective.

    Args:
        operation: `all_gather`, `reduce_scatter` or `all_reduce`.
        axis: name of the axis.
        sent_bytes: payload to other ranks.
        messages: number of sends, or of native collectives.
    """

    operation: str
    axis: str
    sent_bytes: int
    messages: int


@dataclass(slots=True, kw_only=True, eq=False)
class Channel:
    """One communicator of an axis.

    Args:
        process_group: torch's.
        numbers: counts its collectives, so that messages of different ones cannot be taken for each other.
    """

    process_group: dist.ProcessGroup
    numbers: Iterator[int] = field(default_factory=itertools.count)


def _unobserved(sent: Sent) -> None:
    pass


@dataclass(slots=True, kw_only=True, eq=False)
class AxisGroup:
    """The ranks along one axis that this rank exchanges with.

    Args:
        name: of the axis.
        ranks: their global ranks, in the order of their index on the axis.
        rank: this rank's own index.
        backend: of torch, `gloo` or `nccl`.
        device_type: of the tensors.
        gather, reduce: communicators; the same ranks in the same order.
        timeout_s: after which a collective fails.
        record: is told of every collective; an observer for tests and byte counters.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    backend: str
    device_type: str
    gather: Channel
    reduce: Channel
    timeout_s: float
    record: Callable[[Sent], None] = _unobserved

    @property
    def size(self) -> int:
        return len(self.ranks)


def make_groups(
    mesh: DeviceMesh, axes: Sequence[Axis], *, timeout_s: float | None = None, backend: str | None = None
) -> dict[str, AxisGroup]:
    """Makes the groups of every axis with more than one rank. All ranks of the mesh call this at the same point.

    Args:
        mesh: with named dimensions; may be a part of a larger mesh.
        axes: each a dimension of the mesh or a part of one.
        timeout_s: after which a collective fails; None for that of the default process group.
        backend: of torch; None for that of the default process group.

    Returns:
        By axis name; axes of size 1 have none, since nothing is ever sent over them.

    Raises:
        MeshError: this rank is not in the mesh, or an axis does not fit its dimension.
    """
    # Each rank makes only the groups it belongs to, so set-up does not grow with the world.
    return {axis.name: _make_group(mesh, axis, timeout_s, backend) for axis in axes if axis.size > 1}


def default_timeout_s(device_type: str) -> float:
    """Timeout of the default process group for tensors on this type of device."""
    world = dist.group.WORLD
    assert world is not None
    # Torch has no public way to ask; without an answer its default for the backend is as good.
    options = getattr(world._get_backend(torch.device(device_type)), "options", None)
    timeout = getattr(options, "_timeout", timedelta(minutes=30))
    assert isinstance(timeout, timedelta)
    return timeout.total_seconds()


def axis_ranks(mesh: DeviceMesh, axis: Axis) -> tuple[int, ...]:
    """Global ranks that differ from this rank in their index on `axis` alone, by that index.

    Raises:
        MeshError: this rank is not in the mesh, or the axis does not fit its dimension.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(f"rank {dist.get_rank()} is not in the mesh {mesh}: only its ranks can make groups on it")
    names = mesh.mesh_dim_names or ()
    if axis.mesh_axis not in names:
        raise MeshError(f"axis {axis.name} needs mesh dimension {axis.mesh_axis!r}; the mesh has {', '.join(names)}")
    dim = names.index(axis.mesh_axis)
    length = mesh.size(dim)
    if length % (axis.size * axis.stride):
        raise MeshError(f"axis {axis.name} has {axis.size} ranks {axis.stride} apart; {axis.mesh_axis} has {length}")
    own = coordinate[dim]
    first = own - own // axis.stride % axis.size * axis.stride
    line: torch.Tensor = mesh.mesh.movedim(dim, -1)[tuple(c for d, c in enumerate(coordinate) if d != dim)]
    return tuple(int(line[first + index * axis.stride]) for index in range(axis.size))


def _make_group(mesh: DeviceMesh, axis: Axis, timeout_s: float | None, backend: str | None) -> AxisGroup:
    ranks = axis_ranks(mesh, axis)
    timeout_s = default_timeout_s(mesh.device_type) if timeout_s is None else timeout_s
    gather, reduce = (_make_channel(ranks, timeout_s, backend, f"{axis.name} {kind}") for kind in ("gather", "reduce"))
    return AxisGroup(
        name=axis.name,
        ranks=ranks,
        rank=ranks.index(dist.get_rank()),
        backend=backend_of(gather.process_group, mesh.device_type),
        device_type=mesh.device_type,
        gather=gather,
        reduce=reduce,
        timeout_s=timeout_s,
    )


def _make_channel(ranks: tuple[int, ...], timeout_s: float, backend: str | None, description: str) -> Channel:
    unsorted: dict[str, Any] = (
        {} if sorted(ranks) == list(ranks) else {"sort_ranks": False}
    )  # an argument that torch 2.11 may not have
    group = dist.new_group(
        list(ranks),
        timeout=timedelta(seconds=timeout_s),
        backend=backend,
        use_local_synchronization=True,
        group_desc=description,
        **unsorted,
    )
    assert isinstance(group, dist.ProcessGroup)
    return Channel(process_group=group)


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that serves tensors on this type of device: `gloo` or `nccl`."""
    config = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return config.get(device_type, dist.get_backend(group))
