"""Parts of a model that have a layout of their own: whose parameters they hold, and which ranks share them. Only a
model with parts loads this."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeromesh.comm.exchange import AxisGroup
from zeromesh.comm.groups import axis_ranks, make_groups
from zeromesh.engine.control import Control
from zeromesh.engine.elements import Home
from zeromesh.engine.spread import Spread, groups_beyond
from zeromesh.errors import MeshError, MismatchError, ModelError, NotationError
from zeromesh.modules import clean_name, is_sharded
from zeromesh.schedule.lanes import lent_axes
from zeromesh.strategy import Axis, Layout, Strategy
from zeromesh.strategy.parts import Parts, Sizes, belongs, layouts_of, part_name, require_known, with_given


def meshes_of(parts: Parts) -> dict[str, DeviceMesh]:
    """The meshes of the parts that have their own, by name."""
    return {part_name(key): part.mesh for key, part in parts.items() if part.mesh is not None}


def layouts_with_parts(
    strategy: Strategy, axes: Sequence[tuple[str, int]], parts: Parts, mesh: DeviceMesh | None
) -> dict[str, Layout]:
    """The layout of the model, which has these axes, under "", then those of its parts.

    Raises:
        NotationError, MeshError: the parts do not fit it, or each other.
    """
    named = {part_name(key): part for key, part in parts.items()}
    if len(named) < len(parts):
        raise NotationError(f"two of {', '.join(map(str, parts))} are the same part: give each class or pattern once")
    own = {name: require_inside(name, divided, mesh) for name, divided in meshes_of(parts).items()}
    whole = with_given(strategy, named, {name: [axis for axis, _ in own.get(name, axes)] for name in named})
    if mesh is None:  # one rank on every axis, under any name
        own = {name: tuple((axis, 1) for axis in each.names) for name, each in whole.parts}
    return layouts_of(whole, axes, own)


def parts_by_module(model: nn.Module, parts: Iterable[str]) -> dict[str, set[str]]:
    """By qualified name of each module: the parts that it, or a module around it, belongs to.

    Raises:
        NotationError: nothing belongs to one of them.
    """
    parts, found = tuple(parts), defaultdict[str, set[str]](set)
    modules = [(clean_name(name), type(each).__name__) for name, each in model.named_modules(remove_duplicate=False)]
    for name, kind in modules:  # outer ones first; a wrapper has its module's name
        inherited = found[name.rpartition(".")[0]] if name else set()
        found[name] |= inherited | {part for part in parts if belongs(part, name, kind)}
    unknown = [part for part in parts if not any(part in own for own in found.values())]
    require_known(unknown, dict(modules))
    return dict(found)


def part_of_places(places: Sequence[str], parts: Mapping[str, set[str]]) -> str:
    """The part of a parameter that stands in `places`; "" where it is in none.

    Raises:
        ModelError: it would be in two, or in one under one of its names only.
    """
    by_place = {place: parts.get(place.rpartition(".")[0], set()) for place in places}
    for place, own in by_place.items():
        if len(own) > 1:
            raise ModelError(
                f"{place} belongs to the parts {' and '.join(sorted(own))}, and has one layout: let their patterns or "
                f"classes name other modules"
            )
    if len({tuple(own) for own in by_place.values()}) > 1:
        shown = ", ".join(f"{place} ({', '.join(own) or 'in no part'})" for place, own in by_place.items())
        raise ModelError(
            f"{shown} are one tied parameter, which has one layout: name the modules of all its places in one part, or "
            f"of none"
        )
    return next(iter(by_place[places[0]]), "")


def require_inside(part: str, mesh: DeviceMesh, model: DeviceMesh | None) -> Sizes:
    """The axes of a part's mesh, innermost first.

    Raises:
        MeshError: it is not made of some of the model's ranks, this one among them. Faults that only all ranks together
            can see are left to `require_divided`.
    """
    if model is None:
        raise MeshError(f"part {part} has a mesh and the model has none: give zm.shard the mesh of all its ranks")
    if mesh.mesh_dim_names is None:
        raise MeshError(f"the dimensions of the mesh of part {part} need names, which its strategy gives stages to")
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"rank {dist.get_rank()} is not in the mesh of part {part}, {mesh}: give each rank the mesh of "
            f"those that hold the same parameters, as a slice of one mesh of all ranks does"
        )
    own, whole = set(mesh.mesh.flatten().tolist()), set(model.mesh.flatten().tolist())
    if not own <= whole:
        raise MeshError(
            f"the mesh of part {part} has ranks {sorted(own - whole)} that the model's has not: a part is shared by "
            f"ranks that the model is sharded over"
        )
    if mesh.device_type != model.device_type:
        raise MeshError(f"the mesh of part {part} is of {mesh.device_type} devices, the model's of {model.device_type}")
    return tuple(zip(reversed(mesh.mesh_dim_names), reversed(mesh.shape), strict=True))


Spreads = Mapping[str, Sequence[tuple[str, Spread | None]]]  # `spreads_of` the units


def beyond_of(
    spreads: Spreads, mesh: DeviceMesh | None, meshes: Mapping[str, DeviceMesh]
) -> dict[str, tuple[dist.ProcessGroup, ...]]:
    """The groups beyond the model's mesh, under "", and beyond those of parts: [Note: Beyond] of
    `zeromesh.engine.control`.

    Raises:
        MeshError: a DTensor lies on ranks of the mesh that it is sharded over.
        ModelError: a part's parameter is the same on ranks that do not share it.
    """
    shared = [each for part, own in spreads.items() if part not in meshes for each in own]
    found = {"": groups_beyond(mesh, shared)}
    for part, own in meshes.items():
        assert mesh is not None  # `require_inside`
        _require_divided_up(part, spreads.get(part, ()), own, mesh)
        found[part] = groups_beyond(own, spreads.get(part, ()))
    # Over a group that only the part's tensors are divided over, the model's tensors are copies; and the other way
    # round. Not so where other groups lead to the same ranks.
    for part in meshes:
        found[""] += tuple(group for group in found[part] if _crosses(group, mesh, found[""]))
    for part, own in meshes.items():
        _require_reached(part, found[part], mesh, found[""])
        found[part] += tuple(group for group in found[""] if _crosses(group, own, found[part]))
    return found


def _crosses(group: dist.ProcessGroup, mesh: DeviceMesh | None, others: Iterable[dist.ProcessGroup]) -> bool:
    """Whether it has no rank but this one in common with a mesh, and with other groups."""
    ranks = set(dist.get_process_group_ranks(group))
    lines = [dist.get_process_group_ranks(other) for other in others]
    return all(len(ranks.intersection(line)) == 1 for line in [mesh.mesh.flatten().tolist() if mesh else [], *lines])


def _require_reached(
    part: str, groups: Iterable[dist.ProcessGroup], mesh: DeviceMesh | None, beyond: Sequence[dist.ProcessGroup]
) -> None:
    """Refuses ranks that only a part has: the rest of the model would start and be stepped separately there."""
    assert mesh is not None  # `require_inside`
    lines = [mesh.mesh.flatten().tolist(), *(dist.get_process_group_ranks(group) for group in beyond)]
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        if prod(len(set(ranks).intersection(line)) for line in lines) != len(ranks):
            raise ModelError(
                f"part {part} is divided over ranks {ranks}, some of which are neither in the model's mesh, "
                f"{sorted(lines[0])}, nor on an axis that its other parameters are DTensors on: the rest of the model "
                f"would drift apart there. Divide the rest over that axis too, or replicate it as DTensors"
            )


def _require_divided_up(
    part: str, spreads: Sequence[tuple[str, Spread | None]], own: DeviceMesh, model: DeviceMesh
) -> None:
    """Refuses a part on some of the model's ranks whose tensors other meshes hold too: their gradients would come from
    some ranks only."""
    ranks, degree = set(model.mesh.flatten().tolist()), model.size() // own.size()
    for name, spread in spreads if any(spread for _, spread in spreads) else ():
        groups = [] if spread is None else [group for group, divided in spread.axes if divided]
        over = prod(len(ranks.intersection(dist.get_process_group_ranks(group))) for group in groups)
        if over != degree:
            raise ModelError(
                f"{name} is divided over {over} of the model's ranks, and the mesh of its part {part} has one in "
                f"{degree} of them: ranks would hold the same of it and not share it. Divide it over the axes that the "
                f"mesh of the part leaves out, or leave it out of the part"
            )


def require_divided(part: str, mesh: DeviceMesh, control: Control) -> None:
    """Raises MismatchError where the part's meshes of all ranks do not divide the model's ranks. Collective."""
    ranks = tuple(mesh.mesh.flatten().tolist())
    everyone = dict(control.gather((dist.get_rank(), ranks)))
    for rank, shared in sorted(everyone.items()):  # in a rehearsal this rank's alone
        other = next((other for other in shared if everyone.get(other, shared) != shared), None)
        if other is not None:
            raise MismatchError(
                f"part {part} is shared by ranks {list(shared)} as rank {rank} has it, and by {list(everyone[other])} "
                f"as rank {other} has it: make its mesh alike on all of them, as a slice of one mesh of all ranks, "
                f"with its dimensions in one order"
            )


def groups_of(homes: Mapping[str, Home], *, register: bool) -> tuple[dict[str, AxisGroup], dict[str, str]]:
    """The groups of every axis of every layout; and for axes that use another axis's communicators, on all ranks alike,
    that axis."""
    meshes = {home.layout.part: home.mesh for home in homes.values()}

    def line(layout: Layout, axis: Axis) -> tuple[int, ...]:
        mesh = meshes[layout.part]
        assert mesh is not None  # an axis has ranks
        return axis_ranks(mesh, axis)

    layouts = [home.layout for home in homes.values()]
    lent = _agreed(lent_axes(layouts, line), layouts, homes[""].control)
    sharded = {axis.name for layout in layouts for axis in layout.param_axes}
    beside = {lender for borrower, lender in lent.items() if borrower in sharded}
    beside |= {lent.get(axis.name, axis.name) for layout in layouts for axis in layout.scattered_replicas}
    found = dict[str, AxisGroup]()
    for home in homes.values():
        if home.mesh is not None:
            own = [axis for axis in home.layout.axes if axis.name not in lent]
            found |= make_groups(home.mesh, own, registered=register, beside=beside)
        borrowed = (axis.name for axis in home.layout.axes if axis.name in lent)
        found |= {name: found[lent[name]].lent(name) for name in borrowed}
    return found, lent


def _agreed(lent: Mapping[str, str], layouts: Sequence[Layout], control: Control) -> dict[str, str]:
    """The loans that are alike on all ranks, since ranks make communicators together."""
    names = [axis.name for layout in layouts for axis in layout.axes]
    places = [names.index(lent.get(name, name)) for name in names]
    words = torch.tensor([*places, *(-place for place in places)], device=control.device)
    highest, lowest = control.reduce_all(words, dist.ReduceOp.MAX).view(2, -1).tolist()
    same = (name for name, high, low in zip(names, highest, lowest, strict=True) if high == -low)
    return {name: lent[name] for name in same if name in lent}


def modules_apart(model: nn.Module, layouts: Mapping[str, Layout]) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and part of each module that only some of the model's ranks share."""
    apart = [part for part, layout in layouts.items() if layout.share < 1]
    found = parts_by_module(model, apart) if apart else {}
    for name, module in model.named_modules() if apart else ():
        if own := found[clean_name(name)]:
            yield clean_name(name), module, min(own)


def require_known_buffers(model: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Raises ModelError for a buffer that would be saved, in a part that other ranks have another of."""
    for name, module, part in modules_apart(model, layouts):
        saved = [key for key in module._buffers if key not in module._non_persistent_buffers_set]
        whole = [key for key, each in module._parameters.items() if each is not None and not is_sharded(each)]
        for key in (*saved, *whole):
            raise ModelError(
                f"{name}.{key} is in part {part}, which other ranks have others of, and would be saved under one "
                f"name: keep it in a module outside of the part where it is the same on all ranks, or else register it "
                f"with persistent=False"
            )


def require_one_of_a_name(homes: Mapping[str, Home]) -> None:
    """Raises ModelError where other ranks have other parameters under the same names: none of them is whole, or a known
    part of a whole one, to be saved or loaded."""
    for part, home in homes.items():
        if home.ambiguous(homes[""].control):
            raise ModelError(
                f"parameters of part {part} are other tensors on other ranks, since its mesh has {home.layout.world} "
                f"of the model's {home.layout.feeders} ranks and they are whole on each: a name that is saved "
                f"and loaded must mean one tensor. Make them DTensors over the axis that divides them, as with "
                f"distribute_tensor(param, mesh, [Shard(0)])"
            )


def require_own_tokens(homes: Mapping[str, Home]) -> None:
    """Raises ModelError where gradients on a rank come of other ranks' tokens too: [Note: Weights] of
    `zeromesh.engine.lifecycle`."""
    for part, home in homes.items():
        if home.layout.share < 1:
            raise ModelError(
                f"gradients of part {part} come of several ranks' tokens, which have weights of their own: let each "
                f"rank's loss carry its weight, as in: with zm.accumulate(model, last=..., weight=..., total=...) as "
                f"weigh: weigh(loss).backward()"
            )
