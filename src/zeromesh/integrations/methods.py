"""A model sharded as a library's own wrapper would be, and the methods that it has then beside its class's."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zeromesh.engine.api import ENGINE, accumulate
from zeromesh.sharding import Sharding

MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""By the names that accelerate has for mixed precision."""


def is_sharded(model: object) -> bool:
    """Whether `zm.shard` has sharded `model`, or a part of it."""
    return isinstance(model, nn.Module) and any(hasattr(module, ENGINE) for module in model.modules())


def with_mixed_precision(sharding: Sharding, name: str | None) -> Sharding:
    """`sharding`, in the dtype that a library is told to compute in, where it says none itself."""
    return replace(sharding, param_dtype=sharding.param_dtype or MIXED.get(name or ""))


def shard_model(sharding: Sharding, model: nn.Module) -> Any:
    """Shards `model`, and gives it what libraries call on their wrappers: `no_sync`, and what transformers' have.

    Returns:
        By parameter as it was, the shard that it became; weak in what was.
    """
    before = list(model.named_parameters(remove_duplicate=False))
    own = next((param.dtype for param in model.parameters() if param.is_floating_point()), None)
    if "transformers" not in sys.modules:  # so it is none of theirs
        sharding.shard(model)
    else:
        from zeromesh.integrations.pretrained import adapt, with_blocks_only

        with_blocks_only(sharding, model).shard(model)
        # What nobody casts is written as it computes, each parameter in its own dtype.
        adapt(model, own if sharding.param_dtype is not None else None)
    give_method(model, "no_sync", _no_sync)
    after = dict(model.named_parameters(remove_duplicate=False))
    shards = WeakIdKeyDictionary()
    for name, param in before:
        shards[param] = after[name]
    return shards


def give_method(model: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """`model.name(...)` is `function(model, ...)` from now on. The model is held weakly, or it would never be freed."""
    reference = weakref.ref(model)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(reference(), *args, **kwargs)

    object.__setattr__(model, name, method)


def _no_sync(model: nn.Module) -> AbstractContextManager[object]:
    """Which libraries know of DistributedDataParallel: a micro-batch that is not the step's last."""
    return accumulate(model, last=False)
