"""Axes that tensors are divided over before they are sharded, if an optimizer needs the whole tensors: [Note: Planes]
of `zeromesh.pieces.owners`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from zeromesh.comm.groups import make_line
from zeromesh.engine.elements import Home
from zeromesh.engine.engine import Engine
from zeromesh.engine.flat import ParamRange
from zeromesh.engine.spread import Spread
from zeromesh.owners.stacks import Stacking
from zeromesh.pieces.dtensors import dtensor_region
from zeromesh.pieces.owners import across
from zeromesh.pieces.region import Region
from zeromesh.strategy import Axis, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """The ranks among which the tensors of one optimizer are owned."""

    layout: Layout
    axes: tuple[Axis, ...]  # axes of `layout` that the tensors are divided over before they are sharded
    groups: tuple[dist.ProcessGroup, ...]  # in the same order
    stacking: Stacking  # a tensor divided over dimensions that the class does not see counts as whole

    @classmethod
    def of(cls, engine: Engine, home: Home, places: Iterable[ParamRange], stacking: Stacking) -> Beyond:
        """Finds the ranks for tensors of one layout. All ranks call this alike: it makes communicators."""
        names: dict[tuple[int, ...], str] = {}
        for spread, dims in (_crossed(place, stacking) for place in places):
            for dim in dims:
                assert spread is not None  # it has dimensions
                labels = spread.mesh.mesh_dim_names or tuple(map("beyond{}".format, range(spread.mesh.ndim)))
                names.setdefault(_ranks(spread.mesh.get_group(dim)), labels[dim])
        groups = [group for group in home.control.beyond if _ranks(group) in names]
        sizes = [(_reach(engine, names[_ranks(group)], group), group.size()) for group in groups]
        layout = across(home.layout, sizes)
        return cls(layout=layout, axes=layout.axes[: len(sizes)], groups=tuple(groups), stacking=stacking)

    def rank(self, home: Home) -> int:
        """This rank's number among the ranks of `layout`."""
        layout, chunks = home.layout, home.layout.degree(home.layout.significant)
        plane = 0  # the first axis is the most significant, as in `across`
        for group in self.groups:
            plane = plane * group.size() + group.rank()
        own = layout.shard(chunks, layout.significant, layout.coordinates(home.control.rank))
        return plane * chunks + int(own.start)

    def joined(self, place: ParamRange) -> Region:
        """Returns the region of a tensor that all planes hold together. It is the whole tensor if the tensor is divided
        only in dimensions that the class sees."""
        spread, dims = _crossed(place, self.stacking)
        return place.region if spread is None else _joined(spread, dims)

    def held(self, place: ParamRange) -> tuple[tuple[int, Region], ...] | None:
        """Returns, by plane, which copy of the joined region it has, and which part of it."""
        return tuple(self._held(place)) if self.groups else None

    def _held(self, place: ParamRange) -> Iterator[tuple[int, Region]]:
        spread, dims = _crossed(place, self.stacking)
        dim_of = {_ranks(spread.mesh.get_group(dim)): dim for dim in dims} if spread is not None else {}
        along = [dim_of.get(_ranks(group)) for group in self.groups]
        for indices in product(*(range(group.size()) for group in self.groups)):
            copy, coordinate = 0, [] if spread is None else [*(spread.mesh.get_coordinate() or ())]
            for dim, index, group in zip(along, indices, self.groups, strict=True):
                if dim is None:
                    copy = copy * group.size() + index
                else:
                    coordinate[dim] = index
            if spread is None or not dims:
                yield copy, Region.whole(place.region.sizes)
            else:
                parts = _placed(spread, dims, there=True)
                yield copy, dtensor_region(_joined(spread, dims).sizes, spread.mesh, parts, coordinate)


def _crossed(place: ParamRange, stacking: Stacking) -> tuple[Spread | None, tuple[int, ...]]:
    """Returns how a tensor is divided, and the dimensions of its mesh over which the class would see only a part."""
    spread = place.info.spread
    if spread is None:
        return None, ()
    ndim = len(spread.shape)
    unseen = ndim - len(stacking.item(spread.shape))
    cut = {
        dim: each.dim % ndim for dim, each in enumerate(spread.placements) if isinstance(each, Shard | _StridedShard)
    }
    return spread, tuple(dim for dim, own in cut.items() if own >= unseen and spread.mesh.size(dim) > 1)


def _joined(spread: Spread, dims: Collection[int]) -> Region:
    """The region that this rank holds together with its neighbours along `dims` of its mesh."""
    return dtensor_region(spread.shape, spread.mesh, _placed(spread, dims, there=False))


def _placed(spread: Spread, dims: Collection[int], *, there: bool) -> list[Placement]:
    return [own if (dim in dims) is there else Replicate() for dim, own in enumerate(spread.placements)]


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _reach(engine: Engine, name: str, group: dist.ProcessGroup) -> str:
    """Returns the name of the axis along these ranks. The model's next optimizer shares its communicators."""
    groups, ranks = engine.backend.groups, _ranks(group)
    taken = {axis.name for layout in engine.schedule.layouts for axis in layout.axes}
    while name in taken or (name in groups and groups[name].ranks != ranks):
        name = f"beyond {name}"
    if name not in groups:
        groups[name] = make_line(name, group, engine.control.device.type)
    return name
