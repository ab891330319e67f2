"""Changes calls while a module runs on fake tensors, so that it behaves as in a real run. Imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from zeromesh.model.module_values import KnownValues
from zeromesh.modules import DTYPE_NAMES

_PACKED = "find_packed_sequence_indices"
_FINITE = {"isnan": False, "isinf": False, "isfinite": True}


class _Calls(TorchFunctionMode):
    """Counts calls, treats numbers as finite, and casts as autocast would if dtypes do not fit.

    Attention has no dropout here: the CPU's fused kernel falls back to scores for it, while an accelerator's keeps only
    a seed. RMSNorm is one kernel: the CPU composes it from others, which keep copies in fp32.
    """

    def __init__(self, values: KnownValues, dtype: torch.dtype, count: Callable[[], None]) -> None:
        super().__init__()
        self._values, self._dtype, self._count = values, dtype, count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._count()
        given = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            given["dropout_p"] = 0.0
        if func in (torch.rms_norm, torch.nn.functional.rms_norm):
            func = _rms_norm
        if func is Tensor.__format__ and args[0].ndim == 0:  # torch writes a fake tensor's kind, not its value
            return format(args[0].item(), *args[1:])
        name = getattr(func, "__name__", "")
        try:
            out = func(*args, **given)
        except (RuntimeError, ValueError) as error:
            out = self._cast(func, args, given, error)
        if name in _FINITE and isinstance(out, FakeTensor):
            self._values.fill(out, _FINITE[name])
        return out

    def _cast(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> Any:
        """Runs `func` in the module's dtype, or in fp32, if it takes no mixed dtypes or has no kernel for the given
        one."""
        name = func.__name__
        if name.endswith("_") and not name.endswith("__"):
            raise error  # its destination may not be a copy
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        for dtype in (self._dtype, torch.float32):
            if all(one is dtype for one in given):
                continue

            def cast(leaf: Any, dtype: torch.dtype = dtype) -> Any:
                return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

            try:
                out = func(*tree_map(cast, args), **tree_map(cast, dict(kwargs)))
            except (RuntimeError, ValueError):
                continue
            mixed = " and ".join(sorted({DTYPE_NAMES.get(one, str(one)) for one in given}))
            told = f"{name} takes no {mixed}, and is computed in {DTYPE_NAMES[dtype]}, as under autocast"
            self._values.assume(f"{told}: without it this model does not run")
            return out
        raise error


class _RmsNorm(torch.autograd.Function):
    """An RMS norm with the right shapes that keeps the right tensors: the input, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, rows, weight)
        return torch.neg(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
        values, _, weight = ctx.saved_tensors
        return grad * values, None, None if weight is None else torch.empty_like(weight)


def _rms_norm(values: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """`torch.nn.functional.rms_norm` as one kernel; its values mean nothing."""
    rows = values.new_empty(values.shape[: values.ndim - len(normalized_shape)], dtype=torch.float32)
    out: Tensor = _RmsNorm.apply(values, rows, weight)  # type: ignore[no-untyped-call]  # torch leaves it so
    return out


def _cast_module(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replaces `Module._apply`, which cannot swap fake tensors, for models that cast their weights while they run."""
    for part in module.modules() if recurse else [module]:
        for key, parameter in part._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    part._parameters[key] = nn.Parameter(fn(parameter), parameter.requires_grad)
        part._buffers.update({key: fn(buffer) for key, buffer in part._buffers.items() if buffer is not None})
    return module


@contextmanager
def as_on_an_accelerator(values: KnownValues, dtype: torch.dtype, count: Callable[[], None]) -> Iterator[None]:
    """Makes fake tensors on a CPU behave as in a real run of a module in `dtype` on an accelerator. Calls `count` at
    each call of an operation.

    transformers cannot see in fake tensors that a batch has no packed sequences, and would build a causal mask that a
    real run omits. So it is told.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        if hasattr(masking, _PACKED):
            stack.enter_context(patch.object(masking, _PACKED, lambda position_ids: None))
        stack.enter_context(patch.object(nn.Module, "_apply", _cast_module))
        stack.enter_context(patch.object(fake_tensor.log, "disabled", True))  # attempts in another dtype would log
        stack.enter_context(patch.object(Distribution, "_validate_args", False))  # it asks for numbers
        stack.enter_context(_Calls(values, dtype, count))
        yield
