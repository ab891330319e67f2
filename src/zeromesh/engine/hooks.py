"""Hooks that turn a module's forward and backward into points of the schedule.

[Note: Reads] A forward may use parameters of other units: a loss of hidden states and the head's weight, a custom
autograd.Function. Modules therefore hold their parameters in a dict that sees a parameter being read. In a forward,
reading one of a unit that is not open opens the unit until the outermost forward ends, and gives the whole parameter.
A unit that shares its gather slot cannot stay open while other units run: of such a unit the slice is read, and each of
torch's functions on that opens the unit while it computes (`Engine.on_demand`).

[Note: Cast containers] A unit with a compute dtype is given the floating tensors of all its inputs in that dtype, also
those in containers. A container in which nothing needs a cast stays the object that it is. One in which something does
is copied, since the caller's own tensors are none of the unit's; what the forward then puts into the copy, takes out of
it or replaces in it happens to the caller's object too, as the forward returns: models hand lists of losses and caches
from block to block to be filled.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

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
    """Keeps torch.compile out of the engine: such functions run as Python, between graphs. Nor are
    they and what they call compiled by themselves, which torch would try with any function that runs between graphs.
    `torch.compiler.disable` says the same and costs each call two microseconds, and seconds of imports."""
    setattr(function, "_torchdynamo_disable", True)  # noqa: B010  # functions have no such attribute for mypy
    eval_frame.set_code_exec_strategy(function.__code__, _AS_PYTHON)
    return function


def install(
    engine: Engine, unit: int, modules: Iterable[nn.Module], cast: torch.dtype | None, *, alone: bool = False
) -> None:
    """Registers the hooks of one unit.

    Args:
        engine: held weakly.
        unit: its index.
        modules: the unit's; the forward of each is one call of the unit.
        cast: dtype that floating-point inputs are cast to; None leaves them.
        alone: they hold units (an encoder, the body below a head). Only calls in no other forward of the model count:
            then the root's parameters are whole for it, as `generate` needs.
    """
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
    calls = CastCalls(cast) if cast is not None else None
    counts: list[bool] = []  # of its calls that run

    @as_python
    def pre_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        engine = _alive(reference)
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

    vars(module)["_compiled_call_impl"] = call  # compiled modules hand on what is set


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


_SEQUENCES = (list, tuple, set, frozenset, deque)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in nested sequences, mappings and dataclasses (a Hugging Face output is both of the last)."""
    if isinstance(value, Tensor):
        yield value
        return
    for item in (_items(value) or {}).values():
        yield from tensors_of(item)


class CastCalls:
    """The calls of one unit that are under way, inner ones last: [Note: Cast containers].

    Args:
        dtype: that floating tensors are cast to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._open: list[tuple[dict[str, Any], _Copies]] = []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that replace the given ones."""
        copies = _Copies(self._dtype)
        cast = tuple(copies.of(arg) for arg in args), {key: copies.of(arg) for key, arg in kwargs.items()}
        self._open.append((cast[1], copies))
        return cast

    def end(self, kwargs: dict[str, Any]) -> None:
        """A forward that was called with `kwargs` has returned, or raised."""
        # Calls above it were interrupted. Another hook may have put other `kwargs` in the place of ours.
        depth = next(
            (at for at in reversed(range(len(self._open))) if self._open[at][0] is kwargs), len(self._open) - 1
        )
        ended = self._open[max(depth, 0) :]
        del self._open[max(depth, 0) :]
        for _, copies in ended[:1]:
            copies.write_back()


class _Copies:
    """Copies of the containers of one call."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._made: dict[int, tuple[Any, Any]] = {}
        self._copies: list[tuple[Any, Any, dict[Any, Any], dict[Any, Any]]] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._dtype) if value.is_floating_point() else value
        items = _items(value)
        if not items:
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        self._made[id(value)] = value, value  # what it is inside itself
        cast = {key: self.of(item) for key, item in items.items()}
        if any(cast[key] is not item for key, item in items.items()):
            made = _rebuilt(value, items, cast)
            self._made[id(value)] = value, made
            self._copies.append((value, made, items, cast))
            return made
        return value

    def write_back(self) -> None:
        for value, made, items, cast in self._copies:
            given = {id(cast[key]): item for key, item in items.items()}
            _write(value, cast, _items(made) or {}, given)


def _items(value: Any) -> dict[Any, Any] | None:
    """The items of a container, by key, place or field; None if it is no container."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, _SEQUENCES):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return None


def _rebuilt(value: Any, items: dict[Any, Any], cast: dict[Any, Any]) -> Any:
    """A container like `value`, which holds `items`, of what they were cast to."""
    if isinstance(value, tuple):
        return getattr(type(value), "_make", type(value))(cast.values())
    if isinstance(value, frozenset):
        return type(value)(cast.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return value  # there is no telling how it is made
    made = copy.copy(value)
    _write(made, items, cast, {})
    return made


def _write(value: Any, before: dict[Any, Any], after: dict[Any, Any], given: dict[int, Any]) -> None:
    """Does to `value` what made `after` of `before`; what is in `given`, by its id, stands for something else."""
    changed = {
        key: given.get(id(item), item) for key, item in after.items() if key not in before or before[key] is not item
    }
    if isinstance(value, MutableMapping):
        for key in before.keys() - after.keys():
            value.pop(key, None)
        for key, item in changed.items():
            value[key] = item
    elif isinstance(value, list | deque | set):
        if changed or len(before) != len(after):
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(given.get(id(i), i) for i in after.values())
    elif not isinstance(value, (*_SEQUENCES, Mapping)):
        for name, item in changed.items():
            object.__setattr__(value, name, item)  # frozen ones too, as they are made
