"""Optimizers that are not torch's: the states that they make in their first step are looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from zeromesh.engine.optim import UNPROVEN, VOUCHED, WHOLE, by_engine
from zeromesh.engine.param import ShardedParameter, Slice
from zeromesh.errors import OptimizerError

_PLAIN = (torch.Tensor, torch.nn.Parameter, Slice)


def elementwise(optimizer: Optimizer) -> Optimizer:
    """Declares that `optimizer` treats each element by itself, so that it may step on slices of parameters.

    Torch's elementwise optimizers need no declaration. Do not declare an optimizer that mixes a tensor's elements
    (LAMB's norms, Adafactor's factors, Muon's and Shampoo's matrices): its numbers would silently be wrong.

    Returns:
        The optimizer itself.
    """
    VOUCHED.add(optimizer)
    UNPROVEN[optimizer] = require_known_states
    return optimizer


def require_known_states(optimizer: Optimizer, failure: RuntimeError | None) -> None:
    """Raises OptimizerError, on all ranks, if in a first step any fails by the shape of a state, or keeps one in a
    subclass of Tensor. On slices none is taken: codes share a scale, so they are not independent elements. On whole
    tensors a subclass is taken if it names the tensors inside it."""
    name = getattr(optimizer, "kind", type(optimizer)).__name__
    strange, unlike, whole = set[str](), set[str](), optimizer in WHOLE
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and type(value) not in _PLAIN and not (whole and plain_parts(value)):
                strange.add(key)
            elif failure and isinstance(param, ShardedParameter) and isinstance(value, torch.Tensor):
                unlike.update([key] if value.numel() not in (1, param.elements.numel) else [])
    if failure and not strange | unlike:
        return
    del UNPROVEN[optimizer]
    for engine in by_engine(optimizer):
        found = engine.control.gather((sorted(strange), sorted(unlike)))
        if keys := [key for keys, _ in found for key in keys]:
            raise OptimizerError(
                f"states of {name} must be plain tensors or numbers; {keys[0]!r} is of a subclass of Tensor: "
                + ("give the subclass `__tensor_flatten__`" if whole else f"make it as zm.by_owner({name}, params)")
            ) from failure
        if keys := [key for _, keys in found for key in keys]:
            raise OptimizerError(
                f"states of {name} must have the shape of this rank's slice, as torch.zeros_like(p) has it; "
                f"{keys[0]!r} has another number of elements. If {name} needs whole tensors, make it as "
                f"zm.by_owner({name}, params)"
            ) from failure


def stored(key: str, state: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that a state consists of, by the names that they are saved under: itself, or the codes and
    scales of a quantised one."""
    return {f"{key}:{part}": getattr(state, part) for part in plain_parts(state)} or {key: state}


def plain_parts(state: torch.Tensor) -> list[str]:
    """As `torch.compile` asks subclasses of Tensor for the tensors inside them."""
    flatten: Any = getattr(state, "__tensor_flatten__", None)
    return list(flatten()[0]) if flatten else []
