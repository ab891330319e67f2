"""The arguments and outputs of a unit's calls: casts on the way in, gradients on the way back.

[Note: Cast containers] A unit with a compute dtype is given the floating tensors of all its inputs in that dtype, also
those in containers. A container in which nothing needs a cast stays the object that it is. One in which something does
is copied, since the caller's own tensors are none of the unit's. Whenever the forward adds, removes or replaces an item
of the copy, the same happens to the caller's object as the forward returns: models hand lists of losses and caches
from block to block to be filled.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from zeromesh.schedule import Call

_AS_PYTHON = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
"""A function's, and that of all that it calls."""

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def as_python(function: _FunctionT) -> _FunctionT:
    """Keeps torch.compile out of the engine: such functions run as Python, between graphs. Nor are
    they, or functions that they call, compiled by themselves: torch would try that with any function between graphs.
    `torch.compiler.disable` says the same and costs each call two microseconds, and seconds of imports."""
    setattr(function, "_torchdynamo_disable", True)  # noqa: B010  # functions have no such attribute for mypy
    eval_frame.set_code_exec_strategy(function.__code__, _AS_PYTHON)
    return function


@dataclass(slots=True)
class OutputHook:
    """On each output of one call of a unit: reports the first gradient that arrives in a backward."""

    engine: weakref.ref[Any]
    call: Call
    task: int = -1

    @as_python
    def __call__(self, grad: Tensor) -> None:
        engine, task = self.engine(), torch._C._current_graph_task_id()
        if engine is not None and task != self.task:
            self.task = task
            engine.pre_backward(self.call)


_SEQUENCES = (list, tuple, set, frozenset, deque)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in nested sequences, mappings and dataclasses (a Hugging Face output is both of the last)."""
    if isinstance(value, Tensor):
        yield value
        return
    for item in (_items(value) or {}).values():
        yield from tensors_of(item)


class CastCalls:
    """The calls of one unit that are under way, inner ones last: [Note: Cast containers]."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._open: list[tuple[dict[str, Any], _Copies]] = []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        copies = _Copies(self._dtype)
        cast = tuple(copies.of(arg) for arg in args), {key: copies.of(arg) for key, arg in kwargs.items()}
        self._open.append((cast[1], copies))
        return cast

    def end(self, kwargs: dict[str, Any]) -> None:
        """A forward that was called with `kwargs` has returned, or raised."""
        # Calls above it were interrupted. Another hook may have put other `kwargs` in the place of ours.
        depth = next((at for at in reversed(range(len(self._open))) if self._open[at][0] is kwargs), -1)
        ended, self._open[depth:] = self._open[depth:], []
        for _, copies in ended[:1]:
            copies.write_back()


class _Copies:
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
        self._made[id(value)] = value, value  # a container may hold itself
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
    """A container like `value`, which holds `items`, with their casts in their places."""
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
    """Changes `value` as `before` was changed into `after`; `given` has, by id, items to put in the place of others."""
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
