"""Trials of an optimizer: whether it treats each tensor separately, and how much state it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.engine.optim import NUMBERS
from zeromesh.engine.vouched import stored
from zeromesh.errors import OptimizerError

MIXING = frozenset({"LBFGS"})
"""Optimizers of torch.optim that treat all tensors as one vector."""

STEPS = 4
"""Steps of a trial. A state that one step leaves may take effect in the next; a distance from the first values, as in
Prodigy (arXiv 2306.06101), in the third."""


Numbers = dict[tuple[int, str], float]


def require_tensorwise(kind: type[Optimizer], like: Sequence[Tensor], options: Mapping[str, Any]) -> None:
    """Raises OptimizerError if stepping on two tensors together differs from stepping on each separately.

    The second tensor's gradients are large: a norm over both would show in the first. Numbers that a class takes from
    gradients and keeps for all tensors, in a group's options or as attributes, are compared directly. They may take
    effect only after the trial (D-Adaptation, arXiv 2301.07733: after 2 to 32 steps).

    `like` are small tensors, one for each number of dimensions that the class will see.
    """
    if any(base.__name__ in MIXING and base.__module__.startswith("torch.optim") for base in kind.__mro__):
        raise _mixes(kind)
    for sample in like:
        values = [_values(sample, seed) for seed in (1, 2)]
        together, kept = _stepped(kind, values, (0, 1), options)
        alone = [_stepped(kind, values, (which,), options) for which in (0, 1)]
        if not all(torch.equal(one, other) for one, ((other,), _) in zip(together, alone, strict=True)):
            raise _mixes(kind)
        found = sorted({key[1] for _, other in alone for key, value in kept.items() if other.get(key) != value})
        if found:
            raise _mixes(kind, f", kept as {', '.join(found)}")


def small_like(like: Tensor) -> Tensor:
    """A small tensor with the number of dimensions, dtype and device of `like`."""
    return _values(like[tuple(slice(4 + place) for place in range(like.dim()))], 0)


def _values(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device, like.dtype)


def _stepped(
    kind: type[Optimizer], values: Sequence[Tensor], which: Sequence[int], options: Mapping[str, Any]
) -> tuple[list[Tensor], Numbers]:
    """Returns the values after a few steps, and the numbers outside of tensors' states that the steps have changed."""
    params = [nn.Parameter(values[index].clone()) for index in which]
    optimizer = _made(kind, [{"params": params}], options)
    before = _numbers(optimizer)
    for _ in range(STEPS):
        for index, param in zip(which, params, strict=True):
            param.grad = values[1 - index] * 1000**index
        try:
            optimizer.step()
        except TypeError as error:  # LBFGS and similar classes need a closure
            raise OptimizerError(
                f"zm.by_owner steps {kind.__name__} without a closure, and it does not step so: {error}"
            ) from error
    changed = {key: value for key, value in _numbers(optimizer).items() if before.get(key) != value}
    return [param.detach() for param in params], changed


def _made(kind: type[Optimizer], groups: list[dict[str, Any]], options: Mapping[str, Any]) -> Optimizer:
    """Makes an optimizer of the class. If it has two modes, as schedule-free ones have, it is in training mode."""
    optimizer = kind(groups, **options)
    getattr(optimizer, "train", lambda: None)()
    return optimizer


def _numbers(optimizer: Optimizer) -> Numbers:
    """Returns the numbers in the optimizer's attributes and in its first group, by place and name."""
    held = [
        ((place, key), value)
        for place, of in enumerate((vars(optimizer), optimizer.param_groups[0]))
        for key, value in of.items()
    ]
    single = [(key, v.item() if isinstance(v, Tensor) and v.dim() == 0 else v) for key, v in held]
    return {key: value for key, value in single if isinstance(value, int | float) and value == value}


def _mixes(kind: type[Optimizer], how: str = "") -> OptimizerError:
    return OptimizerError(
        f"zm.by_owner is for optimizers that treat each tensor by itself; {kind.__name__} makes one tensor's update of "
        f"others' gradients too{how}, and each rank would see those of its own only. Clip or scale by a norm over all "
        f"of them before the step (zm.clip_grad_norm_), or use another optimizer"
    )


def trial_state_bytes(
    kind: type[Optimizer], like: Tensor, grad_dtype: torch.dtype, group: Mapping[str, Any], options: Mapping[str, Any]
) -> int:
    """Bytes that the class keeps for a tensor after stepping on it, without numbers.

    The trial runs on torch's meta device, which takes no memory; a class that reads values is tried on the tensor's
    device. The tensor has the shape, dtype and device of `like`. Its group has the options `group`, and the class gets
    `options`.
    """
    try:
        state = trial_state(kind, like, torch.device("meta"), grad_dtype, group, options)
    except (RuntimeError, NotImplementedError):
        state = trial_state(kind, like, like.device, grad_dtype, group, options)
    return sum(value.nbytes for value in kept_tensors(state, like))


def trial_state(
    kind: type[Optimizer],
    like: Tensor,
    device: torch.device,
    grad_dtype: torch.dtype,
    group: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Returns the state that the class makes for a tensor in one step; for arguments see `trial_state_bytes`."""
    param = nn.Parameter(torch.ones(like.shape, dtype=like.dtype, device=device))
    if grad_dtype != like.dtype:
        param.grad_dtype = grad_dtype
    param.grad = torch.ones(like.shape, dtype=grad_dtype, device=device)
    optimizer = _made(kind, [{**group, "params": [param]}], options)
    optimizer.step()
    state: dict[str, Any] = optimizer.state[param]
    return state


def kept_tensors(state: Mapping[str, Any], param: Tensor) -> list[Tensor]:
    """The tensors among a parameter's states, without numbers such as step counts."""
    return [
        part
        for key, value in state.items()
        if isinstance(value, Tensor) and (value.dim() or (not param.dim() and key not in NUMBERS))
        for part in stored(key, value).values()
    ]
