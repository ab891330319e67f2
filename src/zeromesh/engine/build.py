"""Builds an engine: values to shards, slots, hooks. Runs once, at `zm.shard`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeromesh.comm.groups import make_groups, mesh_group
from zeromesh.comm.lane import Lane
from zeromesh.engine.backend import DeviceBackend, UnitShards
from zeromesh.engine.chain import Scratch
from zeromesh.engine.control import Control, broadcast_bytes
from zeromesh.engine.elements import Agree, Home
from zeromesh.engine.engine import Engine
from zeromesh.engine.flat import FlatShards
from zeromesh.engine.hooks import install, watch_reads
from zeromesh.engine.leaf import Retired, local_of
from zeromesh.engine.units import DTYPES, ModuleUnit, Precision, parts_of_root
from zeromesh.errors import MeshError, ModelError
from zeromesh.modules import clean_name, lacks_values, tensors_of
from zeromesh.schedule.buffer_layout import SlotPart, slot_bytes
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.transfer import COPIES
from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.strategy import Layout
from zeromesh.strategy.stage import HOST
from zeromesh.wires import has_triton

if TYPE_CHECKING:
    from zeromesh.comm.host import HostLink
    from zeromesh.engine.materialise import Init


def mesh_axes(mesh: DeviceMesh | None, names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """(name, size) of the mesh's axes, innermost first; without a mesh, one rank on every axis of `names`.

    Raises:
        MeshError: the mesh has no names for its dimensions, or the process group is not there.
    """
    if mesh is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise MeshError(
                f"{dist.get_world_size()} ranks need a mesh, got None: make one with torch's init_device_mesh and names"
            )
        return tuple((name, 1) for name in names)
    if mesh.mesh_dim_names is None:
        raise MeshError("the mesh's dimensions need names: init_device_mesh(..., mesh_dim_names=('cluster', 'node'))")
    return tuple(zip(reversed(mesh.mesh_dim_names), reversed(mesh.shape), strict=True))


def make_control(mesh: DeviceMesh | None) -> Control:
    if mesh is None or mesh.size() == 1:
        return Control(group=None, size=1, rank=0, source=0, device=torch.device("cpu"))
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(f"rank {dist.get_rank()} is not in the mesh {mesh}: call zm.shard on the mesh's ranks only")
    rank = 0
    for index, size in zip(coordinate, mesh.shape, strict=True):
        rank = rank * size + index
    source = int(mesh.mesh.flatten()[0])
    return Control(group=mesh_group(mesh), size=mesh.size(), rank=rank, source=source, device=mesh_device(mesh))


def mesh_device(mesh: DeviceMesh | None, model: nn.Module | None = None) -> torch.device:
    """The device of this rank; without a mesh, the model's."""
    if mesh is None:
        found = next((p.device for p in model.parameters() if not lacks_values(p)), None) if model else None
        return found or torch.device("cpu")
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def make_homes(
    layouts: Mapping[str, Layout],
    mesh: DeviceMesh | None,
    meshes: Mapping[str, DeviceMesh],  # of parts that have one of their own
    beyond: Mapping[str, tuple[dist.ProcessGroup, ...]],  # of the model's mesh, and of those
    control: Control,
) -> dict[str, Home]:
    """Where each layout is: on the model's mesh, or that of its part. All ranks call this together.

    Raises:
        MismatchError: the ranks have meshes that do not divide the model's.
    """
    if meshes:
        from zeromesh.engine.parts import require_divided  # of parts=

        for part, divided in meshes.items():
            require_divided(part, divided, control)
    whole = replace(control, beyond=beyond[""]).met()
    own = {part: replace(make_control(divided), beyond=beyond[part]) for part, divided in meshes.items()}
    return {
        part: Home(layout=layout, mesh=meshes.get(part, mesh), control=own.get(part, whole))
        for part, layout in layouts.items()
    }


def build_engine(
    model: nn.Module,
    homes: Mapping[str, Home],
    modules: Sequence[ModuleUnit],
    precision: Precision,
    init: Init | None,
    *,
    lazy: AbstractSet[str] = frozenset(),
    debug: bool = False,
    register: bool = False,
) -> Engine:
    """Shards `model` in place; see `zm.shard`."""
    control, device = homes[""].control, mesh_device(homes[""].mesh, model)
    units = [module.describe(precision) for module in modules]
    for home in homes.values():
        home.control.require_aligned()
    chosen = "; ".join(f"{part} {home.layout.strategy} on {home.layout.mesh}".lstrip() for part, home in homes.items())
    control.require_same("strategy", f"{chosen}{' registered' * register}")
    control.require_same("model", _digest(model, modules, precision, lazy))
    if len(homes) > 1:
        from zeromesh.engine.parts import groups_of  # of parts=

        groups, lent = groups_of(homes, register=register)
    else:
        mesh, axes = homes[""].mesh, homes[""].layout.axes
        beside = {axis.name for axis in homes[""].layout.scattered_replicas}
        groups, lent = {}, {}
        if mesh is not None:
            groups = make_groups(mesh, axes, registered=register, beside=beside)
    schedule = Schedule.of(
        homes[""].layout,
        units,
        parts={part: home.layout for part, home in homes.items() if part},
        messages=next((group.transport.messages for group in groups.values()), None),
        triton=has_triton(device.type),
        lent=lent,
    )
    watch_reads(modules, model.modules())
    host, cores = None, 0
    if schedule.memory.host is not None:  # a plan is the same on all ranks
        from zeromesh.engine.hosted import take_host_memory  # of host=

        less = f"give the host a lower stage than {HOST}={schedule.layout.strategy.host.value}, or use more machines"
        host, cores = take_host_memory(schedule.memory.host.total_bytes, control, device, call="zm.shard", less=less)
    shards = _fill_shards(model, modules, schedule, homes, device, init, lazy, host)
    inline, memory = schedule.layout.strategy.overlap == "none", schedule.memory

    def allocate() -> tuple[dict[str, Scratch], Callable[[], None] | None]:
        pool: AbstractContextManager[Callable[[], None] | None] = nullcontext()
        if register:
            from zeromesh.comm.nccl import registered  # of register=

            pool = registered(groups.values(), device)
        with pool as release:
            _bind_slots(schedule, shards, device)
        each = {lane: (own, memory.workspace.get(lane, 0)) for lane, own in memory.staging.items()}
        return {lane: Scratch(*(_bytes(count, device) for count in own)) for lane, own in each.items()}, release

    scratch, release = control.together(allocate, left="The model has lost its parameters")
    names = (*schedule.lanes.names, *(COPIES if memory.host else ()))
    lanes = {name: Lane(name, device=device, inline=inline) for name in names}
    if host is not None:
        lanes["step"] = Lane("step", device=torch.device("cpu"), inline=inline)
        if device.type != "cpu":  # launchers give a rank one thread, and no device computes with the others
            lanes["step"].submit(partial(host.enter_thread, max(torch.get_num_threads(), cores)))
    if any(buffer.streamed for unit in schedule.placed for buffer in unit):
        from zeromesh.engine.hosted import STREAMED  # of ;step=device

        lanes |= {name: Lane(name, device=device, inline=inline) for name in STREAMED}
    backend = DeviceBackend(
        units=shards,
        layouts=schedule.layouts,
        groups=groups,
        names=schedule.lanes,
        lanes=lanes,
        scratch=scratch,
        host=host,
        device=device,
        registered=release is not None,
    )
    if release is not None:
        weakref.finalize(backend, release).atexit = False
    engine = Engine(schedule, backend, homes, precision, model=weakref.ref(model), debug=debug)
    _make_optimizer_params(engine)
    for index, module in enumerate(modules):
        install(engine, index, module.modules, precision.param)
        backend.unuse(index)
    install(engine, 0, parts_of_root(model, modules), precision.param, alone=True)
    return engine


def _digest(model: nn.Module, modules: Sequence[ModuleUnit], precision: Precision, lazy: AbstractSet[str]) -> str:
    """All that decides the messages and their order: one line for each unit, parameter and buffer.

    Not here, since ranks may differ in it: values, devices, `init` (the first rank's counts) and `debug`.
    """
    lines = [str(precision)]
    sharded = set()
    for unit in modules:
        lines.append(f"{unit.role.name.lower()} unit {unit.name!r} of {len(unit.names)} module(s)")
        for (_, trainable, part, on_device), infos in unit.groups.items():
            kind = ("trained" if trainable else "frozen") + f" as part {part}" * bool(part) + " here" * on_device
            for info in infos:
                sharded.add(info.param)
                names = " = ".join(info.names)
                spread = f" {info.spread}" if info.spread is not None else ""
                lines.append(f"{names} {tuple(info.param.shape)} {info.param.dtype} {kind} in {unit.name!r}{spread}")
    whole = {name: param for name, param in model.named_parameters() if param not in sharded}
    for name, tensor in (*whole.items(), *model.named_buffers()):
        kind = "unsharded" if name in whole else "buffer"
        lines.append(f"{kind} {clean_name(name)} {tuple(tensor.shape)} {tensor.dtype}")
    # A rank that asked for them before has read them.
    lines += [f"values of {name} unread, which all ranks read before or none" for name in sorted(lazy)]
    return "\n".join(lines)


def _bytes(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)


def _fill_shards(
    model: nn.Module,
    modules: Sequence[ModuleUnit],
    schedule: Schedule,
    homes: Mapping[str, Home],
    device: torch.device,
    init: Init | None,
    lazy: AbstractSet[str],
    host: HostLink | None,
) -> list[UnitShards]:
    """Unit by unit, so that at most one unit is whole on any rank beside the tensors that the model already held."""
    control = homes[""].control
    coordinates = {part: home.layout.coordinates(home.control.rank) for part, home in homes.items()}
    first = any(home.control.rank == 0 for home in homes.values())
    materialiser = None
    if any(lacks_values(tensor) for _, tensor in tensors_of(model)):
        from zeromesh.engine.materialise import Materialiser  # of tensors without values

        materialiser = Materialiser(model, modules, device, init, first, lazy)
    shards = list[UnitShards]()
    for module, unit, placed in zip(modules, schedule.units, schedule.placed, strict=True):
        buffers = []
        if materialiser:
            materialiser.unit(module)
        for each, infos in zip(placed, module.groups.values(), strict=True):
            part = each.buffer.part
            buffer = FlatShards.allocate(each, infos, coordinates[part], device, host)
            if not all(lacks_values(local_of(place.original)) for place in buffer.places):  # not all are lazy
                buffer.fill(_values(buffer, homes[part].control))
            buffers.append(buffer)
            _retire(buffer, unit.name)
        if device.type != "cpu":
            # A device's collectives are timed from when they are issued: the last unit's would have to wait for all.
            torch.accelerator.current_stream(device).synchronize()
        shares = schedule.shares_slot(len(shards))
        shards.append(UnitShards(name=unit.name, buffers=buffers, shares_slot=shares))
    message = next(filter(None, control.gather(materialiser.error if materialiser else "")), "")
    if message:
        raise ModelError(message) from (materialiser.cause if materialiser else None)
    _sync_buffers(model, device, homes)
    return shards


def _values(buffer: FlatShards, control: Control) -> Tensor:
    values = torch.zeros(buffer.padded, dtype=buffer.optimizer_shard[0].dtype, device=buffer.device)
    for place in buffer.places:
        param = place.original
        if lacks_values(local_of(param)):
            continue  # lazy
        # Tensors of the meta device have come from there whole.
        own = local_of(param) if isinstance(param, DTensor) else param[place.region.index]
        values[place.start : place.stop].copy_(own.detach().flatten())
    control.broadcast(values)
    _repeat(values, buffer, control)
    return values


def _repeat(values: Tensor, buffer: FlatShards, control: Control) -> None:
    """Sends the first rank's values along each axis beyond the mesh, for parameters that are not divided over it:
    [Note: Beyond]."""
    for group in control.beyond:
        same = [values[place.start : place.stop] for place in buffer.places if not place.info.divided(group)]
        if same:
            sent = torch.cat(same)
            broadcast_bytes(sent, group)
            received = torch.split(sent, [part.numel() for part in same])
            torch._foreach_copy_(same, list(received))


def _retire(buffer: FlatShards, unit: str) -> None:
    """Frees the originals; whoever still holds one is told so at its next use, or the optimizer's first step."""
    for place in buffer.places:
        for params, key in place.info.sites:
            param = params[key]
            assert param is not None
            place.info.param._zeromesh_retired = param._zeromesh_retired = place.info.name  # type: ignore[attr-defined]
            if not lacks_values(param) and type(param) is not Retired:  # a tied one
                local = local_of(param)
                local.data = torch.empty(0, dtype=local.dtype, device=local.device)
            if type(param) is nn.Parameter:
                param.__class__ = Retired


def _sync_buffers(model: nn.Module, device: torch.device, homes: Mapping[str, Home]) -> None:
    """The first rank's buffers, and frozen parameters of dtypes that are not sharded, to all that share them."""
    whole, apart = homes[""].control, dict[nn.Module, Control]()
    if len(homes) > 1:
        from zeromesh.engine.parts import modules_apart  # of parts=

        found = modules_apart(model, {part: home.layout for part, home in homes.items()})
        apart = {module: homes[part].control for _, module, part in found}
    for module in model.modules():
        control = apart.get(module, whole)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
        unsharded = [p for p in module.parameters(recurse=False) if not hasattr(p, "_zeromesh_retired")]
        for param in unsharded:
            param.data = param.data.to(device)
        for tensor in (*module.buffers(recurse=False), *(param.data for param in unsharded)):
            held = local_of(tensor)
            control.broadcast(held)
            for group in whole.beyond:
                if group in control.beyond:  # else a line of ranks that divide the part
                    broadcast_bytes(held, group)


def _bind_slots(schedule: Schedule, shards: Sequence[UnitShards], device: torch.device) -> None:
    plans = schedule.memory.gather, schedule.memory.reduce
    gather, reduce = ([_bytes(count, device) for count in plan.slot_bytes] for plan in plans)
    for unit, placed, own, waits in zip(shards, schedule.placed, *(plan.slot_of for plan in plans), strict=True):
        full = _in_slot(gather, own, (p.gather_part for p in placed))
        waiting = _in_slot(reduce, waits, (part for p in placed for part in p.reduce_parts))
        for buffer, whole, part, grads in zip(unit.buffers, full, waiting, waiting, strict=True):
            buffer.bind(whole, part, grads)


def _in_slot(slots: Sequence[Tensor], slot: int | None, parts: Iterable[SlotPart]) -> Iterator[Tensor | None]:
    """The parts of a unit's slot, one after the other."""
    start = 0
    for numel, dtype in parts:
        if slot is None or dtype is None:
            yield None
        else:
            yield slots[slot][start : start + numel * ITEM_BYTES[dtype]].view(DTYPES[dtype])
            start += slot_bytes((numel, dtype))


def _make_optimizer_params(engine: Engine) -> None:
    reference = weakref.ref(engine)

    def agree(values: Tensor) -> Agree | None:
        engine = reference()
        assert engine is not None  # else its gradients are gone too
        return engine.agree_max(values)

    for index, unit in enumerate(engine.units):
        for buffer in unit.buffers:
            home = engine.homes[buffer.spec.part]
            buffer.make_optimizer_params(home, engine.control, agree, unit=index, engine=reference)
