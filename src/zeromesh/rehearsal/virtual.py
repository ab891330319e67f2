"""Makes this process one rank of any number, on the virtual device, and gives the device an attention kernel.

If a device has no kernel for `scaled_dot_product_attention`, torch composes it from products and keeps every head's
scores for the backward. Memory and kernels would then differ from a GPU's. This kernel computes only the shapes that a
fused kernel takes, makes and keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from zeromesh import simdev
from zeromesh.errors import InputError, MeshError


@contextmanager
def virtual_rank(mesh: Mapping[str, int], rank: int) -> Iterator[DeviceMesh]:
    """Yields a mesh with these sizes by axis name, outermost first. All other ranks are assumed to hold and send the
    same as this one. Raises MeshError if there is no such rank; InputError if the process has a process group already,
    or the device is not available: there is no compiler, or torch has a version that it was not written for."""
    world = prod(mesh.values())
    if not 0 <= rank < world:
        raise MeshError(f"ranks of this mesh are 0 to {world - 1}, got {rank}")
    if dist.is_initialized():
        raise InputError(
            "a rehearsal makes its own process group, and this process has one: rehearse before init_process_group, or "
            "in a process of its own"
        )
    device = simdev.start(virtual=True)
    fuse_attention()
    simdev.module.empty_cache()  # memory of an earlier rehearsal
    simdev.counting_group(rank, world)
    try:
        with (
            patch.object(dist, "broadcast_object_list", _said_by_the_first),
            patch.object(dist, "all_gather_object", _said_by_all),
        ):
            yield init_device_mesh(device.torch.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    finally:
        dist.destroy_process_group()
        # The cache holds meshes of these groups, equal to the next ones.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch leaves it so


def _said_by_the_first(object_list: list[Any], *_: Any, **__: Any) -> None:
    """Replaces torch's broadcast by this rank's own value. Torch's sends the object's length first, which only the
    first rank has."""


def _said_by_all(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    object_list[:] = [obj] * len(object_list)


_FORWARD, _BACKWARD = "zeromesh::scaled_dot_product", "zeromesh::scaled_dot_product_backward"
_PLACE = "AutogradPrivateUse1"


@cache
def fuse_attention() -> Any:
    """Gives the device its attention kernel. It is registered for as long as the returned libraries live."""
    library: Any = torch.library.Library("zeromesh", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it so
    inputs = "Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal"
    library.define(f"scaled_dot_product({inputs}) -> (Tensor, Tensor)")
    library.define(
        f"scaled_dot_product_backward(Tensor grad, {inputs}, Tensor result, Tensor sums) -> (Tensor, Tensor, Tensor)"
    )
    torch.library.impl(_FORWARD, "Meta", _shapes, lib=library)
    torch.library.impl(_BACKWARD, "Meta", _shapes_backward, lib=library)
    torch.library.register_autograd(_FORWARD, _differentiate, setup_context=_keep, lib=library)
    aten: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # as above
    torch.library.impl("aten::scaled_dot_product_attention", _PLACE, _attention, lib=aten)
    return library, aten


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    result: Tensor = torch.ops.zeromesh.scaled_dot_product(query, key, value, attn_mask, is_causal)[0]
    return result


def _shapes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Makes the result, and for each row of scores the logarithm of its sum."""
    result = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return result, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _shapes_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, is_causal = inputs
    ctx.save_for_backward(query, key, value, mask, *output)
    ctx.is_causal = is_causal


def _differentiate(ctx: Any, grad: Tensor, _sums: Tensor | None) -> tuple[Any, ...]:
    query, key, value, mask, result, sums = ctx.saved_tensors
    backward = torch.ops.zeromesh.scaled_dot_product_backward
    return *backward(grad, query, key, value, mask, ctx.is_causal, result, sums), None, None
