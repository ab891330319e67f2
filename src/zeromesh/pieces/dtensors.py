"""The region of a DTensor that a rank holds."""

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
    """Returns the region of a DTensor that the rank with `coordinate` on the mesh holds. Default: this rank."""
    index, at_mesh = folding(shape, mesh, placements), [*(coordinate or mesh.get_coordinate() or ())]
    boxes = [Replicate() if at == index else placement for at, placement in enumerate(placements)]
    sizes, offsets = map(list, _compute_local_shape_and_global_offset(tuple(shape), mesh.shape, at_mesh, boxes))
    # If a rank has nothing, torch puts its empty box at the tensor's end, or beyond.
    offsets, fold = [*map(min, offsets, shape)], (0, 1)
    if index is not None:
        placement = placements[index]
        assert isinstance(placement, _StridedShard)
        dim, fold = placement.dim % len(shape), (placement.dim % len(shape), int(placement.split_factor))
        sizes[dim] = shape[dim] // mesh.size(index)
        offsets[dim] = sizes[dim] // fold[1] * at_mesh[index]
    return Region(shape=tuple(shape), offsets=tuple(offsets), sizes=tuple(sizes), fold=fold)


def folding(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> int | None:
    """Returns the mesh dimension over which a tensor dimension is divided in equal parts, each of them evenly: [Note:
    Folds] of `zeromesh.pieces.region`. None if there is none, or if further mesh dimensions divide the same tensor
    dimension."""
    divided = [placement.dim % len(shape) for placement in placements if isinstance(placement, Shard | _StridedShard)]
    strided = [at for at, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    if len(strided) != 1:
        return None
    placement = placements[strided[0]]
    assert isinstance(placement, _StridedShard)
    dim, parts = placement.dim % len(shape), int(placement.split_factor) * mesh.size(strided[0])
    return strided[0] if divided.count(dim) == 1 and shape[dim] % parts == 0 else None
