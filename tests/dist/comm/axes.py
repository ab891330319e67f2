"""Groups of the axes of a mesh, values of each rank, and room for collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.dist.pool import kept
from zeromesh.comm.collectives import workspace_bytes
from zeromesh.comm.exchange import AxisGroup
from zeromesh.comm.groups import make_groups
from zeromesh.strategy import Layout


def axes(*shape: int, timeout_s: float | None = None) -> list[AxisGroup]:
    """The groups of a mesh of such a shape, made once; innermost first, as the shape: node, cluster, region."""
    return kept(make_axes, *shape, timeout_s=timeout_s)


def make_axes(*shape: int, timeout_s: float | None = None) -> list[AxisGroup]:
    """`axes`, made anew."""
    names = ("node", "cluster", "region")[: len(shape)]
    mesh = init_device_mesh("cpu", tuple(reversed(shape)), mesh_dim_names=tuple(reversed(names)))
    layout = Layout.of(",".join(f"{name}=3" for name in names), list(zip(names, shape, strict=True)))
    return list(make_groups(mesh, layout.axes, timeout_s=timeout_s).values())


def line() -> AxisGroup:
    """All ranks as one axis."""
    return axes(dist.get_world_size())[0]


def room(group: AxisGroup) -> Tensor:
    return torch.empty(workspace_bytes(group), dtype=torch.uint8)


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 0.0) -> Tensor:
    """Normal values of a rank; with a spread, of sizes so many powers of e apart."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    found = torch.randn(numel, generator=generator, dtype=torch.float64)
    if spread:
        found *= torch.exp(spread * torch.randn(numel, generator=generator, dtype=torch.float64))
    return found.to(dtype)
