"""Modules that compute their activations again in the backward."""

from __future__ import annotations

from torch import nn

from zeromesh.modules import CHECKPOINTED, WRAPPERS, unwrapped


def recomputes(module: nn.Module) -> bool:
    """Whether parts of it compute their activations again: by a checkpoint wrapper, or as transformers' do."""
    return any(
        CHECKPOINTED in part._modules or getattr(part, "gradient_checkpointing", False) is True
        for part in module.modules()
    )


def without_recomputation(module: nn.Module) -> nn.Module:
    """`module`, which is changed: no wrappers, and nothing computed twice."""
    for part in list(module.modules()):
        if getattr(part, "gradient_checkpointing", False) is True:
            part.gradient_checkpointing = False  # type: ignore[assignment]  # no parameter or module
        for key, child in part._modules.items():
            if child is not None and key not in WRAPPERS:
                part._modules[key] = unwrapped(child)
    return unwrapped(module)
