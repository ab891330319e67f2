"""FLOPs of one operation, forward or backward: torch's own count, and kernels that it does not know. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

aten = torch.ops.aten


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float | None:
    """None for a function that multiplies no matrices."""
    packet = func.overloadpacket
    if packet in _OURS:
        return _OURS[packet](args)
    return float(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else None


def _attention(args: Sequence[Any]) -> float:
    """Both products of a forward."""
    return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]  # torch's


def _grouped(args: Sequence[Any]) -> float:
    """FLOPs of a grouped product: [rows, inner] and [experts, inner, outer] or, in a backward, [inner, rows] and
    [rows, outer]."""
    left, right = args[0].shape, args[1].shape
    return float(2 * math.prod(left if len(left) == len(right) == 3 else left[-2:]) * right[-1])


def _convolution_backward(args: Sequence[Any]) -> float:
    """torch's count of it leaves out that groups have fewer products."""
    gradient, x, weight = (tensor.shape for tensor in args[:3])
    transposed, wanted = args[7], args[10]
    return float(sum(wanted[:2]) * conv_flop_count(x, weight, gradient, transposed=transposed))


_OURS: dict[Any, Callable[[Sequence[Any]], float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda args: 2.5 * _attention(args[1:]),
    aten._grouped_mm: _grouped,
    aten.convolution_backward: _convolution_backward,
}
