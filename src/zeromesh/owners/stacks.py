"""Steps on many tensors of one shape at once, with a class that handles one: torch's vmap shows it one of a stack.

The class is unchanged. It sees a tensor in an item's shape, and its computation runs on all items at once: a matrix
product becomes a batched one. Results equal those of one step after the other except for rounding, since batched
kernels and sums add up in another order.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from zeromesh.errors import OptimizerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacking:
    """How tensors are stacked, to be stepped on at once."""

    alike: bool = False  # whether tensors of one shape are stacked
    dims: int | None = None  # trailing dimensions that the class sees, None for all; a tensor with more is a stack

    def __post_init__(self) -> None:
        if self.dims is not None and self.dims < 1:
            raise OptimizerError(
                f"dims, how many of a tensor's dimensions the class sees, must be at least 1; got {self.dims}"
            )

    def item(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that the class sees for a tensor of `shape`."""
        return tuple(shape) if self.dims is None else tuple(shape[max(0, len(shape) - self.dims) :])

    def is_batch(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of `shape` is a stack by itself."""
        return self.item(shape) != tuple(shape)

    def stacks(self, optimizer: Optimizer) -> list[list[nn.Parameter]]:
        """Groups all parameters of `optimizer`: those of one group whose shape is the same for the class."""
        found: dict[object, list[nn.Parameter]] = {}
        for place, group in enumerate(optimizer.param_groups):
            for whole in group["params"]:
                found.setdefault((place, self.item(whole.shape), whole.dtype), []).append(whole)
        return [*found.values()]


def step_on_stacks(optimizer: Optimizer, stacking: Stacking) -> None:
    """Makes one step on all parameters that have a gradient."""
    stacked = [
        (place, alike)
        for place, group in enumerate(optimizer.param_groups)
        for alike in _alike(optimizer, group["params"], stacking)
    ]
    if not stacked:
        optimizer.step()
        return
    apart = {whole for _, alike in stacked for whole in alike}
    counted = [_options(group) for group in optimizer.param_groups]
    alone = [[whole for whole in group["params"] if whole not in apart] for group in optimizer.param_groups]
    with _showing(optimizer, alone):
        optimizer.step()
    for place, alike in stacked:
        for group, options in zip(optimizer.param_groups, counted, strict=True):
            _put_options(group, options)  # without this, a class that counts steps by group would count each stack
        _step_on(optimizer, place, alike, stacking)


def _alike(optimizer: Optimizer, wholes: Sequence[nn.Parameter], stacking: Stacking) -> list[list[nn.Parameter]]:
    """Groups tensors of one shape and one history, as their states' numbers show: they are stepped on at once."""
    found: dict[object, list[nn.Parameter]] = {}
    for whole in wholes:
        if whole.grad is None or not (stacking.alike or stacking.is_batch(whole.shape)):
            continue
        item, state = stacking.item(whole.shape), optimizer.state.get(whole, {})
        kinds = {
            key: (value.dtype, value.shape[whole.dim() - len(item) :]) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
        own = None if stacking.alike else whole
        found.setdefault((own, item, whole.dtype, whole.grad.dtype, repr(sorted(kinds.items()))), []).append(whole)
    return [alike for alike in found.values() if len(alike) > 1 or stacking.is_batch(alike[0].shape)]


def _step_on(optimizer: Optimizer, place: int, wholes: Sequence[nn.Parameter], stacking: Stacking) -> None:
    """Makes one step on tensors that are alike, as one stack."""
    leads = [tuple(whole.shape[: whole.dim() - len(stacking.item(whole.shape))]) for whole in wholes]
    states = [optimizer.state.get(whole, {}) for whole in wholes]
    numbers = {key: value for key, value in states[0].items() if not isinstance(value, Tensor)}

    def laid(tensors: Sequence[Tensor]) -> Tensor:
        """Stacks the items of tensors, or of their states, which may have another shape."""
        pairs = zip(tensors, leads, strict=True)
        return _laid_together([each.view(prod(lead), *each.shape[len(lead) :]) for each, lead in pairs])

    values, grads = laid([w.data for w in wholes]), laid([w.grad for w in wholes if w.grad is not None])
    held = {key: laid([state[key] for state in states]) for key in states[0].keys() - numbers.keys()}
    lists: list[list[Tensor]] = [[] for _ in optimizer.param_groups]

    def step(values: Tensor, grads: Tensor, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if values.dtype != grads.dtype:
            values.grad_dtype = grads.dtype
        values.grad = grads
        lists[place] = [values]
        with _showing(optimizer, lists, {values: {**numbers, **held}} if states[0] else {}):
            optimizer.step()
            found = optimizer.state[values]
        numbers.update({key: value for key, value in found.items() if not isinstance(value, Tensor)})
        values.grad = None
        return {key: value for key, value in found.items() if isinstance(value, Tensor)}

    with warnings.catch_warnings(), _WholeProducts():
        # Some functions with little work run over the items one by one.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        kept = {key: each.contiguous() for key, each in torch.vmap(step)(values, grads, held).items()}
    bounds = [0, *accumulate(map(prod, leads))]
    for whole, lead, (start, stop) in zip(wholes, leads, pairwise(bounds), strict=True):
        if values.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            whole.data.view(stop - start, -1).copy_(values[start:stop].view(stop - start, -1))
        state = {key: each[start:stop].view((*lead, *each.shape[1:])) for key, each in kept.items()}
        optimizer.state[whole].update({**numbers, **state})


class _WholeProducts(TorchFunctionMode):
    """Rounds fused multiply-adds once, as for a single matrix. torch.vmap by itself would split them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.addmm, torch.Tensor.addmm) and len(args) == 3 and kwargs.keys() <= {"beta", "alpha"}:
            beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
            return _Added.apply(*args, beta, alpha)  # type: ignore[no-untyped-call]  # torch leaves it so
        return func(*args, **kwargs)


class _Added(torch.autograd.Function):
    """torch.addmm; for a stack, torch.baddbmm."""

    @staticmethod
    def forward(added: Tensor, one: Tensor, other: Tensor, beta: float, alpha: float) -> Tensor:
        return torch.addmm(added, one, other, beta=beta, alpha=alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Does nothing: optimizers are not differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, added: Any, one: Any, other: Any, beta: float, alpha: float) -> Any:
        stacks = [
            each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip((added, one, other), in_dims, strict=False)
        ]
        if stacks[0].dim() == 2:  # one row that is added to each
            stacks[0] = stacks[0].unsqueeze(1)
        return torch.baddbmm(*stacks, beta=beta, alpha=alpha), 0


def _laid_together(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates along the first dimension; without a copy if the parts are contiguous in one storage."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.data_ptr() == at):
            return torch.cat([*parts])
        at += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


@contextmanager
def _showing(
    optimizer: Optimizer, params: Sequence[Sequence[Tensor]], states: Mapping[Tensor, dict[str, Any]] | None = None
) -> Iterator[None]:
    """Gives the optimizer these parameters, by group, for a while; and only these states, if any are given."""
    lists, held = [group["params"] for group in optimizer.param_groups], optimizer.state
    for group, own in zip(optimizer.param_groups, params, strict=True):
        group["params"] = [*own]
    if states is not None:
        optimizer.state = defaultdict(dict, states)
    try:
        yield
    finally:
        optimizer.state = held
        for group, own in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = own


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}


def _put_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key in [key for key in group if key != "params" and key not in options]:
        del group[key]
    for key, value in options.items():
        if isinstance(value, Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def require_stackable(kind: type[Optimizer], items: Sequence[Tensor], options: Mapping[str, Any]) -> None:
    """Raises OptimizerError if the class cannot step on a stack.

    `items` are small tensors, one for each number of dimensions that the class will see.
    """
    for item in items:
        params = [nn.Parameter(item.clone()) for _ in range(2)]
        optimizer = kind([{"params": params}], **options)
        try:
            for _ in range(2):
                for param in params:
                    param.grad = item.clone()
                step_on_stacks(optimizer, Stacking(alike=True))
        except RuntimeError as error:
            raise OptimizerError(
                f"{kind.__name__} cannot step on a stack of tensors of {item.dim()} dimensions, since torch.vmap does "
                f"not run it: give zm.by_owner neither batched=True nor dims. [{str(error).splitlines()[0]}]"
            ) from error
