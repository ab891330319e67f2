"""The region of a DTensor that a rank has."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from zeromesh.pieces.region import Region


def dtensor_region(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], coordinate: Sequence[int] | None = None
) -> Region:
    """The region of a DTensor that the rank with this coordinate on the mesh holds; this rank by default."""
    index, at_mesh = folding(shape, mesh, placements), [*(coordinate or mesh.get_coordinate() or ())]
    boxes = [Replicate() if at == index else placement for at, placement in enumerate(placements)]
    sizes, offsets = map(list, _compute_local_shape_and_global_offset(tuple(shape), mesh.shape, at_mesh, boxes))
    # Torch puts the empty box of a rank that has nothing where the tensor ends, or beyond.
    offsets, fold = [*map(min, offsets, shape)], (0, 1)
    if index is not None:
        placement = placements[index]
        assert isinstance(placement, _StridedShard)
        dim, fold = placement.dim % len(shape), (placement.dim % len(shape), int(placement.split_factor))
        sizes[dim] = shape[dim] // mesh.size(index)
        offsets[dim] = sizes[dim] // fold[1] * at_mesh[index]
    return Region(shape=tuple(shape), offsets=tuple(offsets), sizes=tuple(sizes), fold=fold)


def folding(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> int | None:
    """The dimension of the mesh over which a DTensor is divided in equal parts, each of them evenly: [Note: Folds] of
    `zeromesh.pieces.region`. None if there is none, or if the axis that divides a dimension so has others beside it."""
    divided = [placement.dim % len(shape) for placement in placements if isinstance(placement, Shard | _StridedShard)]
    strided = [at for at, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    if len(strided) != 1:
        return None
    placement = placements[strided[0]]
    assert isinstance(placement, _StridedShard)
    dim, parts = placement.dim % len(shape), int(placement.split_factor) * mesh.size(strided[0])
    return strided[0] if divided.count(dim) == 1 and shape[dim] % parts == 0 else None
