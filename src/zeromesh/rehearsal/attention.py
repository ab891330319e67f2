"""An attention kernel for the virtual device, as the devices that it stands for have one.

Torch composes `scaled_dot_product_attention` of products where a device brings none, and keeps every head's scores for
the backward: other memory and other kernels than a GPU's. This one knows shapes alone: those that a fused kernel takes,
makes and keeps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_FORWARD, _BACKWARD = "zeromesh::scaled_dot_product", "zeromesh::scaled_dot_product_backward"
_PLACE = "AutogradPrivateUse1"


@cache
def fuse_attention() -> Any:
    """Gives it to the device of this process; kept as long as the returned libraries."""
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
    """The result, and of each row of scores the logarithm of its sum."""
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
