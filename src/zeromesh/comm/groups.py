"""Process groups: for each axis of a layout, one communicator for gathers and one for reductions.

Two communicators, because the operations of one run in the order of issue even when they come from two threads or
streams: a gather that is needed now would wait behind a reduction that is not.

[Note: Reuse] A communicator is expensive to make and to have: threads that wake up all the time, or memory
of the device. So when the last user of a communicator is gone it is kept for the next one, whose ranks first agree on
which of them are free everywhere, and have been through the same collectives everywhere: a message that nobody received
can then not be waiting in one. One that has failed is not used again. And all ranks of the mesh use as many again, and
make as many: where the default group is bound to a device, NCCL splits the new ones off it, and all ranks take part. A
mesh that is a part of the ranks cannot have that of the others: its communicators are not split off.

[Note: Warm] A device's backend connects the ranks of a communicator in its first collective, which keeps the host
waiting for all of them. So each new one does a collective of one word as it is made. All ranks make those of their axes
in the same order, gathers before reductions, so whoever waits in one waits for ranks that come to it. They have the
device's backend alone: where the default group has one for the host too, no second mesh of connections is made.

[Note: Names] The ranks of a new group meet in the store under its name. `new_group` makes that of a number which grows
with the groups that a process has, and ranks that have not the same number (a model on a part of the ranks, a group
that the user has made for some of them) would wait for each other for ever. So ours are named after their ranks, and
after how many we have made between just these, which all of them know. `new_group` takes no name, but the function that
it calls does.

[Note: Dimensions] An axis that is a whole dimension of a device's mesh has a communicator already. The mesh's own is
one of the two, unless they need options, or it is the one on which all ranks exchange words. Not on a CPU: there our
collectives come from other threads than the user's, and ranks would not agree on the order.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeromesh.comm.exchange import AxisGroup, Channel
from zeromesh.comm.transport import transport_of
from zeromesh.errors import MeshError
from zeromesh.files import machine_id
from zeromesh.strategy import Axis

if TYPE_CHECKING:
    from zeromesh.comm.nccl import Options


def make_groups(
    mesh: DeviceMesh,
    axes: Sequence[Axis],
    *,
    timeout_s: float | None = None,
    registered: bool = False,
    beside: AbstractSet[str] = frozenset(),
) -> dict[str, AxisGroup]:
    """The groups, by name, of all axes with more than one rank: nothing is ever sent over others. All ranks of the mesh
    call this at the same point.

    Args:
        mesh: with named dimensions; may be a part of a larger mesh.
        axes: each a dimension of the mesh or a part of one.
        timeout_s: after which a collective fails; None for that of the default process group.
        registered: whether they will send registered memory.
        beside: names of axes whose communicators gather beside reductions, though they do not shard parameters.

    Raises:
        MeshError: this rank is not in the mesh, or an axis does not fit its dimension.
    """
    axes = [axis for axis in axes if axis.size > 1]
    if not axes:
        return {}
    kind, split = mesh.device_type, mesh.size() == dist.get_world_size()
    keys = {axis.name: Key.of(axis_ranks(mesh, axis), kind, split=split, timeout_s=timeout_s) for axis in axes}
    pool, everyone = _Pool.current(), mesh_group(mesh)
    if backend_of(_world(), kind) == dist.Backend.NCCL:
        from zeromesh.comm import nccl  # on its devices alone

        machines = _machines(everyone)
        for axis in axes:
            lines = [[machines[rank] for rank in line] for line in _lines(mesh, axis).tolist()]
            # Replicated parameters are gathered after a step alone, when nothing is reduced.
            in_turn = not axis.stage.shards_params and axis.name not in beside
            options = nccl.options_of(lines, registered=registered, in_turn=in_turn)
            keys[axis.name] = keys[axis.name]._replace(options=options)
    for axis in axes if timeout_s is None else ():
        if axis.size == mesh.size((mesh.mesh_dim_names or ()).index(axis.mesh_axis)):
            pool.adopt(keys[axis.name], mesh.get_group(axis.mesh_axis), everyone)
    free = pool.agree(everyone, keys)
    # Each rank makes only the groups it belongs to, so set-up does not grow with the world.
    return {name: _make_group(name, key, pool, free[name]) for name, key in keys.items()}


def make_line(name: str, ranks: dist.ProcessGroup, device_type: str) -> AxisGroup:
    """The group of an axis that is no dimension of a mesh of ours. All of its ranks call this at the same point, and
    agree over `ranks`, their process group."""
    key = Key.of(dist.get_process_group_ranks(ranks), device_type, split=ranks.size() == dist.get_world_size())
    pool = _Pool.current()
    return _make_group(name, key, pool, pool.agree(ranks, {name: key})[name])


def borrow_channel(everyone: dist.ProcessGroup, timeout_s: float) -> tuple[Channel, Callable[[], None]]:
    """A communicator between the hosts of all ranks of a group, for one user, who keeps its `started` and `failed`; and
    a function that gives it back: [Note: Reuse]. All ranks call this at the same point, and agree over `everyone`."""
    split = everyone.size() == dist.get_world_size()
    key, pool = Key(tuple(dist.get_process_group_ranks(everyone)), timeout_s, "gloo", "cpu", split), _Pool.current()
    (channel,) = pool.channels(key, pool.agree(everyone, {"": key})[""], "checkpoints")
    return channel, functools.partial(pool.put, key, (channel,))


def mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """All ranks of the mesh, which call this at the same point."""
    if mesh.device_type != "cpu" and mesh.ndim == 1 and mesh.size() < dist.get_world_size():
        return mesh.get_group()
    # Not torch's own, by flattening the mesh: that must be done on all ranks of the mesh which this one is a part of.
    return group_of(sorted(mesh.mesh.flatten().tolist()), mesh.device_type)


def group_of(ranks: Sequence[int], device_type: str) -> dist.ProcessGroup:
    """A group of these global ranks, which all call this at the same point. On a device it is the default one if they
    are all of it. On the host threads of the user's may use that (`dcp.async_save`), in no order that ranks share."""
    if device_type != "cpu" and len(ranks) == dist.get_world_size():
        return _world()
    return _Pool.current().everyone(Key.of(ranks, device_type, split=False))


def default_timeout_s(device_type: str) -> float:
    """Timeout of the default process group for tensors on this type of device."""
    # Torch has no public way to ask; without an answer its default for the backend is as good.
    options = getattr(_world()._get_backend(torch.device(device_type)), "options", None)
    timeout = getattr(options, "_timeout", timedelta(minutes=30))
    assert isinstance(timeout, timedelta)
    return timeout.total_seconds()


def axis_ranks(mesh: DeviceMesh, axis: Axis) -> tuple[int, ...]:
    """Global ranks that differ from this rank in their index on `axis` alone, by that index.

    Raises:
        MeshError: this rank is not in the mesh, or the axis does not fit its dimension.
    """
    if mesh.get_coordinate() is None:
        raise MeshError(f"rank {dist.get_rank()} is not in the mesh {mesh}: only its ranks can make groups on it")
    names = mesh.mesh_dim_names or ()
    if axis.mesh_axis not in names:
        raise MeshError(f"axis {axis.name} needs mesh dimension {axis.mesh_axis!r}; the mesh has {', '.join(names)}")
    length = mesh.size(names.index(axis.mesh_axis))
    if length % (axis.size * axis.stride):
        raise MeshError(f"axis {axis.name} has {axis.size} ranks {axis.stride} apart; {axis.mesh_axis} has {length}")
    lines = _lines(mesh, axis)
    (own,) = lines[(lines == dist.get_rank()).any(dim=1)].tolist()
    return tuple(own)


def _lines(mesh: DeviceMesh, axis: Axis) -> torch.Tensor:
    """Global ranks of the mesh, [lines, size of the axis]: those of a line differ in their index on `axis` alone."""
    dim = (mesh.mesh_dim_names or ()).index(axis.mesh_axis)
    return mesh.mesh.movedim(dim, -1).reshape(-1, axis.size, axis.stride).movedim(1, -1).reshape(-1, axis.size)


def _machines(everyone: dist.ProcessGroup) -> dict[int, str]:
    """The machine of each rank; all of them call this at the same point."""
    ranks = dist.get_process_group_ranks(everyone)
    found = [machine_id()] * len(ranks)
    dist.all_gather_object(found, found[0], group=everyone)
    return dict(zip(ranks, found, strict=True))


def _make_group(name: str, key: Key, pool: _Pool, free: Sequence[int]) -> AxisGroup:
    gather, reduce = pool.channels(key, free, f"{name} gather", f"{name} reduce")
    group = AxisGroup(
        name=name,
        ranks=key.ranks,
        rank=key.ranks.index(dist.get_rank()),
        transport=transport_of(key.backend, key.device_type),
        gather=gather,
        reduce=reduce,
        timeout_s=key.timeout_s,
    )
    # Jobs on their way hold the group too, so it is not gone before they have run.
    weakref.finalize(group, pool.put, key, (gather, reduce)).atexit = False
    return group


def _new_group(key: Key, serial: int, description: str, parent: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Makes group number `serial` between these ranks, in their order, which include this one: [Note: Names]. If the
    key shares buffers, `parent` is the group to share them with."""
    ranks, c10d = list(key.ranks), dist.distributed_c10d
    name = hashlib.sha256(f"{ranks} {serial}".encode()).hexdigest()
    with nullcontext() if key.split and parent is None else _unbound(_world()):
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(key.backend),
            c10d._get_default_store(),
            f"zeromesh-{name}",  # type: ignore[arg-type]  # a NewType of str
            timeout=timedelta(seconds=key.timeout_s),
            device_id=_world().bound_device_id,
            group_desc=description,
            backend_options=key.options and key.options.made(key.timeout_s, parent),
        )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


@contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[None]:
    """Torch splits new groups off one that is bound to a device, which needs all of its ranks."""
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


class Key(NamedTuple):
    """Groups with equal keys can share a communicator."""

    ranks: tuple[int, ...]  # global ones, in the group's order
    timeout_s: float  # after which a collective fails
    backend: str  # torch's
    device_type: str  # that of the tensors that are sent
    split: bool  # off the default process group, where that is bound to a device: all its ranks make groups now
    options: Options | None = None  # NCCL's, where any are set

    @classmethod
    def of(cls, ranks: Sequence[int], device_type: str, *, split: bool, timeout_s: float | None = None) -> Key:
        """With the backend of the default process group, and its timeout unless there is another."""
        timeout_s = default_timeout_s(device_type) if timeout_s is None else timeout_s
        return cls(tuple(ranks), timeout_s, backend_of(_world(), device_type), device_type, split)


class _Pool:
    """Communicators that nobody uses: [Note: Reuse]; and all that were made, by number: [Note: Names]."""

    _latest: _Pool | None = None

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._world = weakref.ref(world)
        self._free: dict[Key, dict[int, Channel]] = defaultdict(dict)
        self._made: dict[tuple[int, ...], int] = defaultdict(int)
        self._everyone: dict[Key, dist.ProcessGroup] = {}
        self._adopted = set[str]()

    @classmethod
    def current(cls) -> _Pool:
        """The pool of the default process group; communicators made beside an earlier one are of no use."""
        world = _world()
        if cls._latest is None or cls._latest._world() is not world:
            cls._latest = cls(world)
        return cls._latest

    def everyone(self, key: Key) -> dist.ProcessGroup:
        """All ranks of a mesh, for the words of all models on it. It is never given back: on it they agree."""
        if key not in self._everyone:
            self._everyone[key] = self._make(key, "mesh").process_group
        return self._everyone[key]

    def adopt(self, key: Key, group: dist.ProcessGroup, everyone: dist.ProcessGroup) -> None:
        """A group that a mesh has made, for one user at a time: [Note: Dimensions]. Its ranks call this together."""
        transport = transport_of(key.backend, key.device_type)
        fits = key.device_type != "cpu" and not transport.messages and key.options is None
        if fits and group.group_name not in (everyone.group_name, *self._adopted):
            self._adopted.add(group.group_name)
            self._made[key.ranks] += 1
            transport.connect(group)
            self.put(key, [Channel(process_group=group, serial=self._made[key.ranks])])

    def agree(self, everyone: dist.ProcessGroup, keys: Mapping[str, Key]) -> dict[str, list[int]]:
        """For each axis the serials of channels that are free, and equally far, on all ranks of the axis; as many on
        every rank of the mesh."""
        # Copies are made at once: a collection of garbage, at any allocation, may give communicators back meanwhile.
        free = {name: self._free[key].copy() for name, key in keys.items()}
        own = {name: (keys[name].ranks[0], {s: c.started for s, c in known.items()}) for name, known in free.items()}
        offers: list[dict[str, _Offer]] = [own] * everyone.size()
        dist.all_gather_object(offers, own, group=everyone)
        found = {}
        for name, key in keys.items():
            lines = defaultdict[int, list[Mapping[int, int]]](list)
            for offer in offers:
                first, started = offer[name]
                lines[first].append(started)
            common = {first: _common(line) for first, line in lines.items()}
            found[name] = common[key.ranks[0]][: min(map(len, common.values()))]
        return found

    def channels(self, key: Key, free: Sequence[int], *descriptions: str) -> tuple[Channel, ...]:
        """As many as there are descriptions: those of serials `free`, then new ones."""
        used = [self._free[key].pop(serial) for serial in free[: len(descriptions)]]
        for description in descriptions[len(used) :]:
            parent = used[0].process_group if used and key.options and key.options.shared else None
            used.append(self._make(key, description, parent))
        return tuple(used)

    def _make(self, key: Key, description: str, parent: dist.ProcessGroup | None = None) -> Channel:
        self._made[key.ranks] += 1
        serial = self._made[key.ranks]
        group = _new_group(key, serial, description, parent)
        transport_of(key.backend, key.device_type).connect(group)
        return Channel(process_group=group, serial=serial)

    def put(self, key: Key, channels: Iterable[Channel]) -> None:
        self._free[key] |= {channel.serial: channel for channel in channels if not channel.failed}


_Offer = tuple[int, dict[int, int]]
"""The first rank of a line along an axis, which identifies the line; and by serial how far its free channels are. It is
short, since each of thousands of ranks gets all offers."""


def _common(offers: Sequence[Mapping[int, int]]) -> list[int]:
    """Serials that all offer, equally far."""
    first, *others = offers
    return sorted(s for s, started in first.items() if all(other.get(s) == started for other in others))


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that serves tensors on this type of device."""
    config = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return config.get(device_type, dist.get_backend(group))
