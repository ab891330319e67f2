"""Parameters that are DTensors: divided, before they are sharded, over axes that have no stage. Only a model with such
loads this.

[Note: Spread] Flat buffers hold the local tensor, and a unit computes with a DTensor over the slot's memory. Its
gradient goes its way as a local tensor once it lies as the parameter does: one that is Partial, of a norm's weight
under sequence parallelism, is summed over its axis first (docs/decisions/0028).

A plain parameter of a model that has DTensors is the same on all their ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from zeromesh.engine.control import Span
from zeromesh.errors import MeshError, ModelError
from zeromesh.pieces.dtensors import dtensor_region, folding
from zeromesh.pieces.region import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a DTensor lies on its mesh: [Note: Spread]."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # by dimension of the mesh, `Shard` or `Replicate`; one may be `_StridedShard`
    shape: torch.Size  # of the whole tensor
    stride: tuple[int, ...]  # of the whole tensor

    @property
    def region(self) -> Region:
        return dtensor_region(self.shape, self.mesh, self.placements)

    @property
    def most(self) -> int:
        """The number of elements that a rank has at most: the same on all of them."""
        sizes = list(self.shape)
        for placement, count in zip(self.placements, self.mesh.shape, strict=True):
            if isinstance(placement, Shard | _StridedShard):
                sizes[placement.dim] = -(-sizes[placement.dim] // count)
        return prod(sizes)

    @property
    def axes(self) -> list[tuple[dist.ProcessGroup, bool]]:
        """The groups of its mesh's dimensions of more than one rank, and whether it is divided over each."""
        return [
            (self.mesh.get_group(dim), not placement.is_replicate())
            for dim, placement in enumerate(self.placements)
            if self.mesh.size(dim) > 1
        ]

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(Span(group=group) for group, divided in self.axes if divided)

    def over(self, local: Tensor) -> DTensor:
        with torch.no_grad():
            made = DTensor.from_local(
                local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
            )
        assert isinstance(made, DTensor)
        return made

    def local_grad(self, grad: Tensor) -> Tensor:
        """This rank's part of a gradient that lies as the parameter does, or is made to: a collective of its mesh."""
        if not isinstance(grad, DTensor):  # of a module that computes with local tensors
            return grad
        with torch.no_grad():
            if grad.placements != self.placements:
                grad = grad.redistribute(placements=self.placements)
            local = grad.to_local()
            return local.wait() if isinstance(local, AsyncCollectiveTensor) else local

    def __str__(self) -> str:
        names = self.mesh.mesh_dim_names or tuple(map(str, range(self.mesh.ndim)))
        return ", ".join(f"{place} over {name}" for place, name in zip(self.placements, names, strict=True))


def spread_of(param: DTensor, name: str) -> Spread:
    """How a parameter lies.

    Raises:
        ModelError: it lies in a way that no box of it describes.
    """
    mesh, placements = param.device_mesh, param.placements
    dense = tuple(prod(param.shape[dim + 1 :]) for dim in range(param.dim()))
    spread = Spread(mesh=mesh, placements=placements, shape=param.shape, stride=dense)
    folded = folding(param.shape, mesh, placements)
    if any(type(each) not in (Shard, Replicate) and at != folded for at, each in enumerate(placements)):
        raise ModelError(
            f"{name} is a DTensor of {tuple(param.shape)} that lies as {spread}; only Shard, Replicate, and one "
            f"_StridedShard that divides each of its parts evenly can be sharded further: redistribute it before "
            f"zm.shard"
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"{name} is a DTensor on {mesh}, which rank {dist.get_rank()} is not in: call zm.shard on its ranks"
        )
    local = param._local_tensor
    if type(local) is not Tensor or tuple(local.shape) != spread.region.sizes:
        raise ModelError(
            f"{name} is a DTensor that lies as {spread}, so this rank must have a plain tensor of "
            f"{spread.region.sizes} of it; it has {type(local).__name__} of {tuple(local.shape)}"
        )
    return spread


def require_whole_buffers(model: nn.Module) -> None:
    """Raises ModelError for a buffer that is divided: buffers are the first rank's, and whole on every rank."""
    for name, buffer in model.named_buffers():
        if isinstance(buffer, DTensor) and any(not placement.is_replicate() for placement in buffer.placements):
            raise ModelError(
                f"{name} is a buffer that lies as {buffer.placements} on {buffer.device_mesh}: only parameters may be "
                f"divided; replicate it, or make it a parameter with requires_grad=False"
            )


def groups_beyond(
    mesh: DeviceMesh | None, spreads: Iterable[tuple[str, Spread | None]]
) -> tuple[dist.ProcessGroup, ...]:
    """The groups of all axes, beside the mesh's own, that a model's parameters lie on: [Note: Beyond] of
    `zeromesh.engine.control`.

    Raises:
        MeshError: such an axis has ranks in common with the mesh, or with another one.
    """
    own = set() if mesh is None else set(mesh.mesh.flatten().tolist())
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for name, spread in spreads:
        for group, _ in spread.axes if spread is not None else ():
            ranks = tuple(dist.get_process_group_ranks(group))
            if len(own.intersection(ranks)) > 1:
                raise MeshError(
                    f"{name} is a DTensor ({spread}) over ranks {list(ranks)}, which are ranks of the mesh of zm.shard "
                    f"too, {_shown(mesh)}: give zm.shard the data-parallel axes alone, mesh['cluster', 'node'] say, "
                    f"and no stage to an axis that parameters are divided over already; or name the modules in parts="
                    f"{{...: zm.Part(mesh=...)}}, with a mesh of the axes that are left for them"
                )
            for other in found:
                if other != ranks and len(set(other).intersection(ranks)) > 1:
                    raise MeshError(
                        f"{name} is a DTensor ({spread}) over ranks {list(ranks)}, and another parameter over "
                        f"{list(other)}: two axes must have one rank in common. Make both dimensions of one mesh"
                    )
            found.setdefault(ranks, group)
    return tuple(found.values())


def _shown(mesh: DeviceMesh | None) -> str:
    assert mesh is not None
    return ", ".join(f"{name}={size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
