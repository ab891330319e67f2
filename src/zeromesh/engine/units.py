"""Cuts a module into units: which parameters are gathered together, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeromesh import modules
from zeromesh.engine.shardable import can_shard, require_apart
from zeromesh.errors import ModelError, nearest
from zeromesh.modules import UnitClasses, clean_name, find_blocks, find_edges, unwrapped
from zeromesh.pieces.region import Region
from zeromesh.schedule.unit import FlatBuffer, HostShare, Role, Unit, joined_name, neighbours

if TYPE_CHECKING:
    from zeromesh.engine.spread import Spread

DTYPES = modules.DTYPES | modules.FROZEN_DTYPES
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a sharded model."""

    param: torch.dtype | None = None  # of compute and of parameters on the wire; None is each parameter's own
    reduce: torch.dtype | None = None  # of gradients on the wire; None is `param`
    grad: torch.dtype = torch.float32  # of the accumulated gradient shard; fp64 where the master is
    master: torch.dtype = torch.float32  # of the optimizer's copy; fp64 for fp64 parameters

    def alike(self, dtype: torch.dtype) -> torch.dtype:
        """A key that is equal for dtypes that share a flat buffer once parameters are sharded."""
        return dtype if dtype == torch.float64 else self.computed(dtype)

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in a forward of parameters that had `dtype` before sharding."""
        return dtype if self.param is None or dtype not in modules.DTYPE_NAMES else self.param

    def buffer(
        self, numel: int, dtype: torch.dtype, trainable: bool, part: str = "", on_device: bool = False
    ) -> FlatBuffer:
        """The flat buffer of `numel` elements whose parameters had `dtype` before sharding, of a part of the model."""
        compute = self.computed(dtype)
        wide = torch.float64 in (dtype, compute)
        master, grad = (torch.float64, torch.float64) if wide else (self.master, self.grad)
        return FlatBuffer(
            numel=numel,
            param_dtype=_NAMES[compute],
            master_dtype=_NAMES[master] if trainable else None,
            grad_dtype=_NAMES[grad],
            reduce_dtype=_NAMES[self.reduce or compute],
            part=part,
            on_device=on_device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """One original parameter."""

    names: tuple[str, ...]  # qualified, without wrappers' parts, one for each place
    param: nn.Parameter
    # Every place that holds it: the `_parameters` of a module, and the key there. Dicts, not modules, so that the
    # engine does not keep the model alive.
    sites: tuple[tuple[dict[str, nn.Parameter | None], str], ...]
    rewritten: bool = False  # by each forward, alike on all ranks: frozen rows that an embedding renormalises
    spread: Spread | None = None  # of a DTensor, how it lies on its mesh

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def region(self) -> Region:
        return Region.whole(self.param.shape) if self.spread is None else self.spread.region

    def divided(self, group: dist.ProcessGroup) -> bool:
        """Whether ranks of `group` have different parts of it."""
        ranks = dist.get_process_group_ranks(group)
        spans = () if self.spread is None else self.spread.spans
        return any(dist.get_process_group_ranks(span.group) == ranks for span in spans)

    @property
    def most(self) -> int:
        """Elements of the largest region on any rank, for which all of them make room: they cut buffers alike then,
        join the same units, and sum parameters that all of them have in the same order, to the bit."""
        return self.param.numel() if self.spread is None else self.spread.most


@dataclass(slots=True, kw_only=True)
class ModuleUnit:
    """A unit with its modules."""

    names: list[str]  # of its modules, without wrappers' parts; one, unless units were joined; "" for the root
    modules: list[nn.Module]  # where hooks go: the outermost wrapper of each
    role: Role
    # Its parameters, by (dtype, trainable, part, whether they are outside of the host's share). Each list is the
    # content of one flat buffer, in order.
    groups: dict[tuple[torch.dtype, bool, str, bool], list[ParamInfo]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return joined_name(self.names)

    def join(self, other: ModuleUnit) -> None:
        """Takes the modules and parameters of `other`, which follows in the forward."""
        self.names += other.names
        self.modules += other.modules
        for key, infos in other.groups.items():
            self.groups.setdefault(key, []).extend(infos)

    def describe(self, precision: Precision) -> Unit:
        buffers = tuple(  # parameters without elements have a buffer too, and a buffer has at least one element
            precision.buffer(max(1, sum(info.most for info in infos)), *kind) for kind, infos in self.groups.items()
        )
        return Unit(name=self.name, role=self.role, buffers=buffers)


def find_units(
    model: nn.Module,
    classes: UnitClasses | None = None,
    resident: Sequence[str] = (),  # qualified names of units that get a gather slot of their own
    precision: Precision = Precision(),  # frozen; parameters that are alike under it share a flat buffer
    parts: Iterable[str] = (),  # those that have layouts of their own
    # By part, the model's under "": the share of the tensors to which the host's stage applies, in percent.
    shares: Mapping[str, int] = MappingProxyType({}),
) -> list[ModuleUnit]:
    """Cuts `model` into units, root first, then in order of registration.

    Each module of `classes` (or of classes of these names) is gathered as one. Default: those that a Hugging Face model
    names in `_no_split_modules`, else the members of its repeated `nn.ModuleList`; then also the input embedding and
    the output head.

    Raises:
        ModelError: a class or name is not in the model, or a parameter in two parts.
        NotationError: no module belongs to a part.
    """
    names = {module: clean_name(name) for name, module in model.named_modules()}
    blocks = _named_classes(model, classes) if classes is not None else find_blocks(model)
    edges = [] if classes is not None else [edge for edge in find_edges(model, blocks) if edge is not None]
    for name in resident:
        if name not in (known := [names[module] for module in blocks]):
            raise ModelError(f"resident unit {name!r} is not a unit of the model: {nearest(name, known)}")
    chosen = {module for module in (*blocks, *edges) if names[module]}  # the root's wrappers wrap no unit
    units = {model: ModuleUnit(names=[""], modules=[model], role=Role.RESIDENT)}
    for module in (module for module in names if module in chosen):
        nested = any(names[module].startswith(f"{names[other]}.") for other in chosen)
        own_slot = nested or module in edges or names[module] in resident
        role = Role.RESIDENT if own_slot else Role.BLOCK
        units[module] = ModuleUnit(names=[names[module]], modules=[_outermost(model, module)], role=role)
    part_of = None
    if parts := tuple(parts):
        from zeromesh.engine.parts import part_of_places, parts_by_module  # of parts=

        part_of = partial(part_of_places, parts=parts_by_module(model, parts))
    _assign(model, units, precision, part_of, shares)
    return [unit for unit in units.values() if unit.groups or unit is units[model]]


def join_modules(units: Sequence[ModuleUnit], precision: Precision, bucket_bytes: int) -> list[ModuleUnit]:
    """Joins the modules as `zeromesh.simulator.units.join_units` joins the units."""
    joined: list[ModuleUnit] = []
    for first, *others in neighbours([unit.describe(precision) for unit in units], bucket_bytes):
        for other in others:
            units[first].join(units[other])
        joined.append(units[first])
    return joined


def spreads_of(units: Sequence[ModuleUnit]) -> dict[str, list[tuple[str, Spread | None]]]:
    """By part: its parameters' names, and how each lies as a DTensor."""
    found: dict[str, list[tuple[str, Spread | None]]] = {}
    for unit in units:
        for (_, _, part, _), infos in unit.groups.items():
            found.setdefault(part, []).extend((info.name, info.spread) for info in infos)
    return found


def parts_of_root(model: nn.Module, units: Sequence[ModuleUnit]) -> list[nn.Module]:
    """Modules below the model itself that hold units and are inside none."""
    names = {name for unit in units for name in unit.names if name}
    around = {name: [*accumulate(name.split("."), "{}.{}".format)] for name in names}  # outermost first, itself too
    outside = {each for name, own in around.items() for each in takewhile(lambda outer: outer not in names, own)}
    return [module for name, module in model.named_modules() if clean_name(name) in outside]


def _named_classes(model: nn.Module, classes: UnitClasses) -> list[nn.Module]:
    found: list[nn.Module] = []
    for wanted in classes:
        name = wanted if isinstance(wanted, str) else wanted.__name__
        modules = [
            m for m in model.modules() if (type(m).__name__ == name if isinstance(wanted, str) else type(m) is wanted)
        ]
        if not modules:
            known = {type(module).__name__ for module in model.modules()}
            raise ModelError(f"the model has no module of class {name} for units=: {nearest(name, known)}")
        found += modules
    return found


def _assign(
    model: nn.Module,
    units: dict[nn.Module, ModuleUnit],
    precision: Precision,
    part_of: Callable[[Sequence[str]], str] | None,
    shares: Mapping[str, int],
) -> None:
    """Gives each parameter to the innermost unit that holds it; one that is tied across units goes to the root."""
    homes: dict[nn.Parameter, list[tuple[nn.Module, str, nn.Module, str]]] = {}
    for owner, name, home in walk(model, model, units):
        for key, param in owner._parameters.items():
            full_name = clean_name(f"{name}.{key}" if name else key)
            if param is not None and can_shard(owner, param, full_name):
                homes.setdefault(param, []).append((owner, key, home, full_name))
    require_apart({param: places[0][3] for param, places in homes.items()})
    for param, places in homes.items():
        home = places[0][2] if len({place[2] for place in places}) == 1 else model
        # A module that is registered twice has two names and one site.
        sites = tuple({(id(owner), key): (owner._parameters, key) for owner, key, _, _ in places}.values())
        rewritten = any(getattr(owner, "max_norm", None) is not None for owner, *_ in places)
        spread = None
        if isinstance(param, DTensor):
            from zeromesh.engine.spread import spread_of  # of DTensors

            spread = spread_of(param, places[0][3])
        names = tuple(place[3] for place in places)
        info = ParamInfo(names=names, param=param, sites=sites, rewritten=rewritten, spread=spread)
        kind = precision.alike(param.dtype), param.requires_grad, part_of(info.names) if part_of else "", False
        units[home].groups.setdefault(kind, []).append(info)
    for part, percent in shares.items():
        _keep_on_device(list(units.values()), part, percent)
    for unit in units.values():
        for infos in unit.groups.values():
            # Odd sizes last, so that all others stay aligned for vector loads and matrix units, in two bytes too.
            infos.sort(key=lambda info: info.most % 8 != 0)


def _keep_on_device(units: Sequence[ModuleUnit], part: str, percent: int) -> None:
    """Moves parameters of a part that are not of the host's share to groups of their own."""
    own = [(unit, kind) for unit in units for kind in unit.groups if kind[2] == part]
    trained = sum(info.most for unit, kind in own for info in unit.groups[kind] if kind[1])
    share = HostShare(percent, trained)
    for unit, kind in own:
        infos = unit.groups.pop(kind)
        stays = [share.stays(info.most * kind[1]) for info in infos]
        for on_device in dict.fromkeys(stays):
            moved = [info for info, each in zip(infos, stays, strict=True) if each == on_device]
            unit.groups[(*kind[:3], on_device)] = moved


def walk(
    module: nn.Module, home: nn.Module, units: dict[nn.Module, ModuleUnit], name: str = ""
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every module with its name and unit; one that is registered in several places, once for each."""
    home = module if module in units else home
    yield module, name, home
    for key, child in module._modules.items():
        if child is not None:
            yield from walk(child, home, units, f"{name}.{key}" if name else key)


def _outermost(model: nn.Module, module: nn.Module) -> nn.Module:
    """The outermost compile or checkpoint wrapper around `module`, where its hooks run outside the compiled graph."""
    for candidate in model.modules():
        if candidate is not model and unwrapped(candidate) is module:
            return candidate
    return module
