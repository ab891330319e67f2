"""Values that a model has in files: each rank reads its own slices once there are shards.

[Note: Lazy] A lazy tensor gets no memory until it is sharded, and is neither initialised nor sent; then every rank
fills its slice. Until then functions that need no values are answered without them, and any other function, and any
write, first reads the whole tensor on this rank: docs/decisions/0033.

Several tensors may show the same values (`p.data`, `p.detach()`): they share a `_Cell`, as others share a storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zeromesh.engine.allowed import PROPERTIES, spelt
from zeromesh.errors import ModelError
from zeromesh.modules import ORIGIN, Lazy, Source, tensors_of

_CHUNK = 1 << 20  # elements that are converted at once, so that no rank holds a slice in two dtypes


class _Unmade:
    """Stands for a tensor that no file has: it is initialised when the model is sharded."""

    def __init__(self, name: str, shape: tuple[int, ...], origin: str) -> None:
        self.name, self.shape, self.origin = name, shape, origin

    def fill(self, target: Tensor, start: int) -> None:
        raise ModelError(
            f"{self.name} is not in {self.origin}: it is initialised where the model is sharded, and has no "
            f"values before; to give it some, put a tensor in its place"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rounded:
    """A source of which values are taken in a dtype first: a tensor in bf16 that is cast to fp32 stays rounded."""

    source: Source
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def fill(self, target: Tensor, start: int) -> None:
        if target.dtype == self.dtype:
            return self.source.fill(target, start)
        for first in range(0, target.numel(), _CHUNK):
            part = target[first : first + _CHUNK]
            rounded = torch.empty_like(part, dtype=self.dtype)
            self.source.fill(rounded, start + first)
            part.copy_(rounded)


class _Cell:
    """Values that may be read yet."""

    def __init__(self, source: Source | None, values: Tensor | None = None) -> None:
        self.source, self.values = source, values

    def read(self, dtype: torch.dtype) -> Tensor:
        if self.values is None:
            assert self.source is not None
            flat = torch.empty(torch.Size(self.source.shape).numel(), dtype=dtype)
            self.source.fill(flat, 0)
            self.values = flat.view(self.source.shape)
        return self.values


class LazyTensor(Tensor, Lazy):
    """A tensor whose values are in files still: [Note: Lazy]. A lazy parameter passes for an `nn.Parameter`."""

    _cell: _Cell
    _held: Tensor | None
    _is_param: bool

    @staticmethod
    def of(like: Tensor, cell: _Cell) -> LazyTensor:
        """Shape, dtype and flags of `like`, and values of `cell`."""
        with torch._C.DisableTorchFunctionSubclass():
            made: Any = like.detach().to("meta").as_subclass(LazyTensor).requires_grad_(like.requires_grad)
        made._cell, made._held, made._is_param = cell, None, isinstance(like, nn.Parameter)
        return made  # type: ignore[no-any-return]  # torch types as_subclass as Tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute in C
        return torch.device("cpu") if self._cell.values is None else self._cell.values.device

    is_meta = False

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]  # an attribute in C
        return self.device.type == "cpu"

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.whole.__reduce_ex__(proto)  # type: ignore[no-untyped-call]  # torch leaves it so

    @property
    def source(self) -> Source | None:
        return self._cell.source if self._cell.values is None else None

    def in_dtype(self) -> Source | None:
        source = self.source
        return None if source is None or isinstance(source, _Unmade) else _Rounded(source=source, dtype=self.dtype)

    @property
    def whole(self) -> Tensor:
        """A tensor with the values, read now if they are not yet."""
        if self._held is None:
            with torch._C.DisableTorchFunctionSubclass():
                values, requires_grad = self._cell.read(self.dtype).detach(), self.requires_grad
            self._held = nn.Parameter(values, requires_grad) if self._is_param else values.requires_grad_(requires_grad)
            vars(self._held).update(self._given())
        return self._held

    def __getattr__(self, name: str) -> Any:
        held = vars(self).get("_held")
        if held is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(held, name)  # an attribute set on it is noted on the tensor that is in the model now

    def _given(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in LazyTensor.__annotations__}

    def meta(self) -> Tensor:
        """Its shape, dtype and strides, on the meta device."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if self.source is None:
            copied: Tensor = self.whole.__deepcopy__(memo)  # type: ignore[no-untyped-call]  # torch leaves it so
        else:
            copied = self._lazily(torch.empty_like(self.meta()).requires_grad_(self.requires_grad))
            copied._is_param = self._is_param
            vars(copied).update(self._given())
        memo[id(self)] = copied
        return copied

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor's takes tensor_contents
        if self.source is None:
            return repr(self.whole)
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, source={self.source})"

    def _lazily(self, like: Tensor) -> LazyTensor:
        """Another tensor of the same values, in the dtype of `like`."""
        return LazyTensor.of(like, _Cell(self.in_dtype() or self.source))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = args[0] if args else None
        if isinstance(own, LazyTensor) and own._held is None:
            act = _WITHOUT_VALUES.get(func)
            if act is not None:
                found = act(own, func, args, kwargs)
                if found is not NotImplemented:
                    return found
        args, kwargs = tree_map_only(LazyTensor, lambda each: each.whole, (args, kwargs))
        return func(*args, **kwargs)


# Functions that need no values ----------------------------------------------------------------------------------------


def _plainly(own: LazyTensor, func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _shown(own: LazyTensor, func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor that shows the same values: a write through either is seen in both."""
    shown = LazyTensor.of(own.meta(), own._cell)
    shown._is_param = False
    return shown


def _converted(own: LazyTensor, func: Any, args: Any, kwargs: Any) -> Any:
    """In another dtype, or as it is: no parameter. Not where autograd would know of it, nor for another device."""
    if own.source is None or (torch.is_grad_enabled() and own.requires_grad):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        try:
            args, kwargs = tree_map_only((str, torch.device), _on_meta, (args, kwargs))
            like = func(*args, **kwargs)
        except (RuntimeError, TypeError):
            return NotImplemented
    if like is own:
        return own
    if not isinstance(like, Tensor) or not like.is_floating_point() or not like.is_meta:
        return NotImplemented
    return own._lazily(like)


def _on_meta(device: str | torch.device) -> torch.device:
    named = torch.device(device)
    return torch.device("meta") if named.type == "cpu" else named


def _beside(own: LazyTensor, func: Any, args: Any, kwargs: Any) -> Any:
    return func(own.meta(), *args[1:], **{"device": own.device, **kwargs})


def _taken(own: LazyTensor, func: Any, args: Any, kwargs: Any) -> Any:
    """`own.data = value`."""
    value = args[1]
    lazy = isinstance(value, LazyTensor) and value.source is not None
    if isinstance(value, LazyTensor) and not lazy:
        value = value.whole
    own._cell = value._cell if lazy else _Cell(None, value.detach())
    with torch._C.DisableTorchFunctionSubclass():
        own.data = value.meta() if lazy else torch.empty_like(value, device="meta").as_subclass(Tensor)


_SIZES = """
    size dim ndimension numel nelement stride storage_offset requires_grad_ __len__ _has_compatible_shallow_copy_type
"""
_LIKE = "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full"
_OF_VALUES = frozenset((*spelt("is_nonzero __reduce_ex__"), Tensor.grad.__set__))  # type: ignore[union-attr]  # in C
_WITHOUT_VALUES: dict[Any, Callable[..., Any]] = {
    **{function: _plainly for function in (*spelt(_SIZES), *PROPERTIES - _OF_VALUES)},
    **{getattr(Tensor, name).__get__: _plainly for name in ("shape", "ndim", "nbytes")},
    **{function: _converted for function in spelt("to type float double half bfloat16 contiguous clone")},
    **{function: _shown for function in spelt("detach")},
    **{function: _beside for function in spelt(_LIKE)},
    Tensor.cpu: lambda own, *_: own,
    Tensor.data.__get__: _shown,  # type: ignore[attr-defined]  # a property in C
    Tensor.data.__set__: _taken,  # type: ignore[attr-defined]  # a property in C
}


def make_lazy(model: nn.Module, sources: Mapping[str, Source], origin: str) -> None:
    """Promises tensors of a model on the meta device the values of `sources`, by the names of `state_dict()`; of a
    tensor that has several, by one of them. All others are as fresh as any there. People are told the `origin`."""
    made: dict[int, LazyTensor] = {}
    for name, tensor in tensors_of(model):
        if name in sources or (tensor.is_meta and id(tensor) not in made):  # `torch.Tensor(n)` is never on that device
            source = sources.get(name) or _Unmade(name, tuple(tensor.shape), origin)
            made[id(tensor)] = lazy = LazyTensor.of(tensor, _Cell(source))
            vars(lazy).update(vars(tensor))
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({key: made[id(t)] for key, t in tensors.items() if id(t) in made})  # type: ignore[misc]
    object.__setattr__(model, ORIGIN, origin)
