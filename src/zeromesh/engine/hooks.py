"""Hooks that turn a module's forward and backward into points of the schedule.

[Note: Reads] A forward that reads a parameter of a unit that is not open opens the unit until the outermost forward
ends. Of a unit that shares its gather slot it reads the slice, and each of torch's functions on that opens the unit
while it computes (`Engine.on_demand`): docs/decisions/0039.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from zeromesh.engine.calls import as_python, tensors_of
from zeromesh.engine.engine import Engine
from zeromesh.engine.param import ShardedParameter
from zeromesh.engine.units import ModuleUnit
from zeromesh.errors import CommunicationError, ModelError


def install(
    engine: Engine, unit: int, modules: Iterable[nn.Module], cast: torch.dtype | None, *, alone: bool = False
) -> None:
    """Registers the hooks of one unit, which hold the engine weakly. The forward of each module is a call of the unit,
    with floating-point inputs in dtype `cast`. `alone`, as in `_points`: the modules hold units (an encoder, the body
    below a head), and the root's parameters are whole for their calls, as `generate` needs."""
    reference = weakref.ref(engine)
    for module in modules:
        engine.called.add(module)
        pre_forward, post_forward = _points(reference, unit, cast, alone=alone)
        module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
        # always_call: after a forward that raised, nothing may count as in use.
        module.register_forward_hook(post_forward, with_kwargs=True, always_call=True)
        _watch_ends(reference, module)


def install_on_method(engine: Engine, module: nn.Module, name: str) -> None:
    """On another method of one of the model's modules, which is then a forward as a part's is."""
    pre_forward, post_forward = _points(weakref.ref(engine), 0, engine.precision.param, alone=True)
    method = getattr(type(module), name)

    @wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pre_forward(self, args, kwargs) or (args, kwargs)
        result = None
        try:
            result = method(self, *args, **kwargs)
        finally:
            post_forward(self, args, kwargs, result)
        return result

    setattr(module, name, MethodType(call, module))  # a copy of the module binds it anew


def _points(reference: weakref.ref[Engine], unit: int, cast: torch.dtype | None, *, alone: bool) -> tuple[Any, Any]:
    """The hooks before and after a forward. `alone`: only calls count that are in no other forward of the model, nor in
    a backward."""
    calls = None
    if cast is not None:
        from zeromesh.engine.casts import CastCalls  # of param_dtype=

        calls = CastCalls(cast)
    counts: list[bool] = []  # for each call under way, whether it is one

    @as_python
    def pre_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if (engine := reference()) is None:
            raise ModelError(
                "this module was part of a sharded model that has been deleted, and its parameters with it"
            )
        if alone:
            counts.append(torch._C._current_graph_task_id() == -1 and not engine.runs())
            if not counts[-1]:
                return None
        engine.pre_forward(unit)
        return calls.begin(args, kwargs) if calls else None

    @as_python
    def post_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if alone and not counts.pop():
            return
        if calls:
            calls.end(kwargs)
        engine = reference()
        if engine is not None:  # else `pre_forward` has said so
            # Without a result the forward may have raised; a lane that failed too would bury that in a warning.
            with suppress(*([CommunicationError] if result is None else [])):
                engine.post_forward(unit, None if result is None else tensors_of(result))

    return pre_forward, post_forward


def _watch_ends(reference: weakref.ref[Engine], module: nn.Module) -> None:
    """Tells the engine of calls that end with an exception. Torch calls no hooks for those that are no `Exception`
    (Ctrl-C), nor in compiled code. It calls `_compiled_call_impl` around all hooks, and leaves it out of copies."""
    compiled, own = module._compiled_call_impl, weakref.ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        engine, module = reference(), own()
        assert module is not None  # it is being called
        # In a backward, which raises too, the next point finds it.
        outermost = engine and engine.interpreter.forward is None and torch._C._current_graph_task_id() == -1
        try:
            return (compiled or module._call_impl)(*args, **kwargs)
        except BaseException:
            if engine and outermost and engine.interpreter.forward is not None:
                engine.fail()
            raise

    vars(module)["_compiled_call_impl"] = call  # a compiled module passes the attribute on


class Parameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters: [Note: Reads]."""

    __slots__ = ()

    def __getitem__(self, key: str) -> nn.Parameter | None:
        found = dict.__getitem__(self, key)
        return found if type(found) is not ShardedParameter else _read(found)


@as_python
def _read(param: ShardedParameter) -> Any:
    engine = param.engine()
    return param if engine is None else engine.read(param)


def watch_reads(units: Iterable[ModuleUnit], modules: Iterable[nn.Module]) -> None:
    """Puts `Parameters` in the place of the dicts that `modules` and the infos of `units` have."""
    made: dict[int, tuple[Any, Parameters]] = {}  # the old dicts too, whose numbers are used
    for module in modules:
        if module._parameters:
            made[id(module._parameters)] = module._parameters, Parameters(module._parameters)
            module._parameters = made[id(module._parameters)][1]
    for infos in (infos for unit in units for infos in unit.groups.values()):
        infos[:] = [
            replace(info, sites=tuple((made[id(params)][1], key) for params, key in info.sites)) for info in infos
        ]
