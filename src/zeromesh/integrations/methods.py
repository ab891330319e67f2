"""Methods that one sharded model has beside its class's, since what they do needs all ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from zeromesh.engine.api import ENGINE, accumulate


def is_sharded(model: object) -> bool:
    """Whether `zm.shard` has sharded `model`, or a part of it."""
    return isinstance(model, nn.Module) and any(hasattr(module, ENGINE) for module in model.modules())


def give_method(model: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """`model.name(...)` is `function(model, ...)` from now on. The model is held weakly, or it would never be freed."""
    reference = weakref.ref(model)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(reference(), *args, **kwargs)

    object.__setattr__(model, name, method)


def give_no_sync(model: nn.Module) -> None:
    """`no_sync`, which libraries use of DistributedDataParallel: a micro-batch that is not the step's last."""
    give_method(model, "no_sync", _no_sync)


def _no_sync(model: nn.Module) -> AbstractContextManager[None]:
    return accumulate(model, last=False)
