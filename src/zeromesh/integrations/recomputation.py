"""The recomputation that the planner calls "selective", for activation checkpointing of transformers' models::

model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": selective})
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
# Attention that is made of matrix products uses 3-D ones, so these are never part of it.
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)


def selective() -> Any:
    """Keeps the outputs of attention and of every second matrix product (first, third and so on in each block). Planner
    and simulator call this `Recomputation.SELECTIVE`."""
    products = 0

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal products
        products += function in _PRODUCTS
        keep = products % 2 == 1 if function in _PRODUCTS else function in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]  # torch leaves it so
