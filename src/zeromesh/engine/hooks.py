"""Hooks that turn a module's forward and backward into points of the schedule.

[Note: Reads] A forward may use parameters of other units: a loss of hidden states and the head's weight, a custom
autograd.Function. Modules therefore hold their parameters in a dict that sees a parameter being read. In a forward,
reading one of a unit that is not open opens the unit until the outermost forward ends, and gives the whole parameter.
A unit that shares its gather slot cannot stay open while other units run: of such a unit the slice is read, and each of
torch's functions on that opens the unit while it computes (`Engine.on_demand`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

from zeromesh.engine.containers import CastCalls, tensors_of
from zeromesh.engine.param import ShardedParameter
from zeromesh.engine.units import ModuleUnit
from zeromesh.errors import CommunicationError, ModelError

if TYPE_CHECKING:
    from zeromesh.engine.engine import Engine
    from zeromesh.schedule import Call

_AS_PYTHON = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
"""A function's, and that of whatever it calls."""

T = TypeVar("T")
_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def as_python(function: _FunctionT) -> _FunctionT:
    """What a compiled caller traces must not enter the engine: such functions run as Python, between graphs. Nor are
    they and what they call compiled by themselves, which torch would try with any function that runs between graphs.
    `torch.compiler.disable` says the same and costs each call two microseconds, and seconds of imports."""
    setattr(function, "_torchdynamo_disable", True)  # noqa: B010  # functions have no such attribute for mypy
    eval_frame.set_code_exec_strategy(function.__code__, _AS_PYTHON)
    return function


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
        engine.called.add(module)
        _on_module(reference, unit, module, cast, outermost=unit == index == 0)


def install_on_parts(engine: Engine, parts: Iterable[nn.Module], cast: torch.dtype | None) -> None:
    """On modules of the root that hold units (an encoder, what a head is on): whoever calls one by itself, as
    `generate` does, runs a forward of the model, and the root's parameters are whole for it."""
    reference = weakref.ref(engine)
    for part in parts:
        engine.called.add(part)
        _on_module(reference, 0, part, cast, outermost=True, alone=True)


def _on_module(
    reference: weakref.ref[Engine],
    unit: int,
    module: nn.Module,
    cast: torch.dtype | None,
    *,
    outermost: bool,
    alone: bool = False,
) -> None:
    """`alone`: only calls count that are in no other forward of the model, nor in a backward."""
    calls = CastCalls(cast) if cast is not None else None
    counts: list[bool] = []  # of its calls that run

    @as_python
    def pre_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        engine = _alive(reference)
        if alone:
            counts.append(torch._C._current_graph_task_id() == -1 and not engine.runs(own=1))
            if not counts[-1]:
                return None
        engine.pre_forward(unit, outermost=outermost)
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

    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    # always_call: after a forward that raised, nothing may count as in use.
    module.register_forward_hook(post_forward, with_kwargs=True, always_call=True)


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


def require_traced(param: ShardedParameter) -> None:
    """Raises ModelError where an autograd.Function is computing with a parameter as it was read: autograd would send
    the gradient to the slice."""
    frame: FrameType | None = sys._getframe()
    while param.requires_grad and frame is not None:
        if frame.f_code is _APPLY and any(arg is param for arg in frame.f_locals["args"]):
            raise ModelError(
                f"an autograd.Function is given {param.full_name}, whose unit shares its gather slot with others and "
                f"is not open here: give that unit a slot of its own, zm.shard(resident=[...]), or name in "
                f"zm.shard(units=[...]) a class around both the parameter and the forward that uses it"
            )
        frame = frame.f_back


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]  # a classmethod


def _alive(reference: weakref.ref[Engine]) -> Engine:
    engine = reference()
    if engine is None:
        raise ModelError("this module was part of a sharded model that has been deleted, and its parameters with it")
    return engine


@dataclass(slots=True)
class OutputHook:
    """On each output of one call of a unit: reports the first gradient that arrives in a backward."""

    engine: weakref.ref[Engine]
    call: Call
    task: int = -1

    @as_python
    def __call__(self, grad: Tensor) -> None:
        engine, task = self.engine(), torch._C._current_graph_task_id()
        if engine is not None and task != self.task:
            self.task = task
            engine.pre_backward(self.call)


def put_first(entries: dict[int, T], key: int) -> None:
    """By taking the others out: autograd reads an ordered dict as a plain one, which `move_to_end` leaves as it is."""
    for other in [other for other in entries if other != key]:
        entries[other] = entries.pop(other)
