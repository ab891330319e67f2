"""Process groups: for each axis of a layout, one communicator for gathers and one for reductions.

Two communicators, because the operations of one run in the order of issue even when they come from two threads or
streams: a gather that is needed now would wait behind a reduction that is not.

[Note: Reuse] A communicator is expensive to make and to have: threads that wake up all the time on gloo, memory of the
device on NCCL. Nor can it be destroyed alone, since torch names the next group after the number of those that the
process has. So when the last user of an axis's communicators is gone they are kept for the next model, whose ranks
first agree on which of them are free everywhere, and have been through the same collectives everywhere: a message that
nobody received can then not be waiting in one. One that has failed is not used again. And all ranks of the mesh use as
many again, and make as many: with other numbers of groups they would name the next one differently, and wait for ever.
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

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
        serial: counts the channels between these ranks; the same on each of them.
        started: counts its collectives, so that messages of different ones cannot be taken for each other.
        failed: whether one of them has.
    """

    process_group: dist.ProcessGroup
    serial: int
    started: int = 0
    failed: bool = False


def _unobserved(sent: Sent) -> None:
    pass


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
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
    """The groups of every axis with more than one rank. All ranks of the mesh call this at the same point.

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
    axes = [axis for axis in axes if axis.size > 1]
    if not axes:
        return {}
    timeout_s = default_timeout_s(mesh.device_type) if timeout_s is None else timeout_s
    keys = {axis.name: Key(axis_ranks(mesh, axis), timeout_s, backend) for axis in axes}
    pool = _Pool.current()
    free = pool.agree(mesh_group(mesh), keys)
    # Each rank makes only the groups it belongs to, so set-up does not grow with the world.
    return {axis.name: _make_group(mesh, axis.name, keys[axis.name], pool, free[axis.name]) for axis in axes}


def mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """All ranks of the mesh."""
    group = dist.group.WORLD if mesh.size() == dist.get_world_size() else mesh._flatten().get_group()
    assert group is not None
    return group


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


def _make_group(mesh: DeviceMesh, name: str, key: Key, pool: _Pool, free: Sequence[int]) -> AxisGroup:
    gather, reduce = (
        pool.take(key, free[index]) if index < len(free) else _make_channel(key, pool, f"{name} {kind}")
        for index, kind in enumerate(("gather", "reduce"))
    )
    group = AxisGroup(
        name=name,
        ranks=key.ranks,
        rank=key.ranks.index(dist.get_rank()),
        backend=backend_of(gather.process_group, mesh.device_type),
        device_type=mesh.device_type,
        gather=gather,
        reduce=reduce,
        timeout_s=key.timeout_s,
    )
    # Jobs on their way hold the group too, so it is not gone before they have run.
    weakref.finalize(group, pool.put, key, (gather, reduce)).atexit = False
    return group


def _make_channel(key: Key, pool: _Pool, description: str) -> Channel:
    ranks = list(key.ranks)
    unsorted: dict[str, Any] = {} if sorted(ranks) == ranks else {"sort_ranks": False}
    if unsorted and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise MeshError(
            f"ranks {', '.join(map(str, ranks))} of {description} are not in rising order, which torch "
            f"{torch.__version__} cannot have in one group: order the mesh's ranks, or use torch 2.13"
        )
    group = dist.new_group(
        ranks,
        timeout=timedelta(seconds=key.timeout_s),
        backend=key.backend,
        use_local_synchronization=True,
        group_desc=description,
        **unsorted,
    )
    assert isinstance(group, dist.ProcessGroup)
    return Channel(process_group=group, serial=pool.next_serial(key))


class Key(NamedTuple):
    """What a communicator must be like to be used."""

    ranks: tuple[int, ...]
    timeout_s: float
    backend: str | None


class _Pool:
    """Communicators that nobody uses: [Note: Reuse]."""

    _latest: _Pool | None = None

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._world = weakref.ref(world)
        self._free: dict[Key, dict[int, Channel]] = defaultdict(dict)
        self._made: dict[Key, int] = defaultdict(int)

    @classmethod
    def current(cls) -> _Pool:
        """That of the default process group: without it, nothing made beside it is of use."""
        world = dist.group.WORLD
        assert world is not None
        if cls._latest is None or cls._latest._world() is not world:
            cls._latest = cls(world)
        return cls._latest

    def agree(self, everyone: dist.ProcessGroup, keys: Mapping[str, Key]) -> dict[str, list[int]]:
        """For each axis the serials of channels that are free, and equally far, on all ranks of the axis; as many on
        every rank of the mesh."""
        own = {name: (k.ranks, {s: c.started for s, c in list(self._free[k].items())}) for name, k in keys.items()}
        offers: list[tuple[int, dict[str, _Offer]]] = [(0, {})] * everyone.size()
        dist.all_gather_object(offers, (dist.get_rank(), own), group=everyone)
        by_rank = dict(offers)
        found = {}
        for name, key in keys.items():
            lines = {offer[name][0] for offer in by_rank.values()}
            common = {ranks: _common([by_rank[rank][name][1] for rank in ranks]) for ranks in lines}
            found[name] = common[key.ranks][: min(map(len, common.values()))]
        return found

    def take(self, key: Key, serial: int) -> Channel:
        return self._free[key].pop(serial)

    def next_serial(self, key: Key) -> int:
        self._made[key] += 1
        return self._made[key]

    def put(self, key: Key, channels: Iterable[Channel]) -> None:
        self._free[key] |= {channel.serial: channel for channel in channels if not channel.failed}


_Offer = tuple[tuple[int, ...], dict[int, int]]
"""A rank's group along an axis, and by serial how far its free channels are."""


def _common(offers: Sequence[Mapping[int, int]]) -> list[int]:
    """Serials that all offer, equally far."""
    first, *others = offers
    return sorted(s for s, started in first.items() if all(other.get(s) == started for other in others))


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that serves tensors on this type of device: `gloo` or `nccl`."""
    config = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return config.get(device_type, dist.get_backend(group))
