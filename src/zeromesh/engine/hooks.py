"""Hooks that turn a module's forward and backward into points of the schedule."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

from zeromesh.errors import CommunicationError, ModelError

if TYPE_CHECKING:
    from zeromesh.engine.engine import Engine

_AS_PYTHON = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
"""A function's, and that of whatever it calls."""


def install(engine: Engine, unit: int, modules: Sequence[nn.Module], cast: torch.dtype | None) -> None:
    """Registers the hooks of one unit.

    Args:
        engine: held weakly.
        unit: its index.
        modules: the unit's; the forward of each is one call of the unit.
        cast: dtype that floating-point inputs are cast to; None leaves them.
    """
    reference = weakref.ref(engine)
    for index, module in enumerate(modules):
        _on_module(reference, unit, module, cast, outermost=unit == index == 0)


def _on_module(
    reference: weakref.ref[Engine], unit: int, module: nn.Module, cast: torch.dtype | None, *, outermost: bool
) -> None:
    def pre_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        _alive(reference).pre_forward(unit, outermost=outermost)
        if cast is None:
            return None
        inside = outermost
        return _cast(args, cast, inside), {key: _cast(value, cast, inside) for key, value in kwargs.items()}

    def post_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        engine = reference()
        if engine is not None:  # else `pre_forward` has said so
            # Without a result the forward may have raised; a lane that failed too would bury that in a warning.
            with suppress(*([CommunicationError] if result is None else [])):
                engine.post_forward(unit, None if result is None else tensors_of(result))

    # What a compiled caller traces must not enter the engine: the hooks run as Python, between graphs. Nor are they and
    # what they call compiled by themselves, which torch would try with any function that runs between graphs;
    # `torch.compiler.disable` says the same and costs each call two microseconds, and seconds of imports.
    for hook in (pre_forward, post_forward):
        setattr(hook, "_torchdynamo_disable", True)  # noqa: B010  # functions have no such attribute for mypy
        eval_frame.set_code_exec_strategy(hook.__code__, _AS_PYTHON)
    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    # always_call: after a forward that raised, nothing may count as in use.
    module.register_forward_hook(post_forward, with_kwargs=True, always_call=True)


def _alive(reference: weakref.ref[Engine]) -> Engine:
    engine = reference()
    if engine is None:
        raise ModelError("this module was part of a sharded model that has been deleted, and its parameters with it")
    return engine


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in nested sequences, mappings and dataclasses (a Hugging Face output is both of the last)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def _cast(value: Any, dtype: torch.dtype, inside: bool) -> Any:
    """Floating tensors, and those in tuples; in lists and dicts only `inside`, of what the whole model is given: what
    units hand each other they may also fill."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) is tuple:
        return tuple(_cast(item, dtype, inside) for item in value)
    if inside and isinstance(value, list):
        items = [_cast(item, dtype, inside) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if inside and type(value) is dict:
        cast = {key: _cast(item, dtype, inside) for key, item in value.items()}
        return cast if any(cast[key] is not item for key, item in value.items()) else value
    return value
