"""The outputs of a unit's calls, to which gradients come back."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from zeromesh.schedule.state import Call

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


SEQUENCES = (list, tuple, set, frozenset, deque)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in nested sequences, mappings and dataclasses (a Hugging Face output is both of the last)."""
    if isinstance(value, Tensor):
        yield value
        return
    for item in (items_of(value) or {}).values():
        yield from tensors_of(item)


def items_of(value: Any) -> dict[Any, Any] | None:
    """The items of a container, by key, place or field; None if it is no container."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, SEQUENCES):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return None
