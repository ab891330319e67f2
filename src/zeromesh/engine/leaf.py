"""Leaves: the whole parameters that a unit computes with, in memory that other units use after it.

[Note: Leaves] A leaf is open while its unit is in use. It is a plain parameter to torch, with one difference: a write
to its `.data` counts as a change. The engine looks for changes when the unit's forward ends, as masters would never see
them. A closed leaf lies in memory that may hold another unit's parameters, and is of a class that computes nothing: it
may have left its unit through a cache or an attribute.

The leaf of a DTensor is a DTensor, whose local tensor is the memory. A function of torch on the DTensor counts as a
change of it and not of the memory, so the engine looks at the versions of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor

from zeromesh.engine import allowed
from zeromesh.errors import ModelError

if TYPE_CHECKING:
    from zeromesh.engine.spread import Spread

_TELLS = (
    allowed.PROPERTIES
    | allowed.spelt("size dim ndimension numel nelement")
    | {getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim")}
)


def local_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor on this rank: of a DTensor its local tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Leaf(nn.Parameter):
    """Open: [Note: Leaves]."""

    __slots__ = ()
    full_name: str

    @property
    def data(self) -> Tensor:
        """The same memory, and the same version."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # a getset_descriptor

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """No change where it is set to itself, as by `register_parametrization`."""
        return self if not kwargs and len(args) == 1 and args[0] is self else super().set_(*args, **kwargs)


class _Closed(Leaf):
    """Closed: [Note: Leaves]."""

    __slots__ = ()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ClosedLeaf({self.full_name!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        closed = next((arg for arg in args if isinstance(arg, _Closed)), None)
        if func in _TELLS or closed is None:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        raise ModelError(
            f"{func.__name__} of the gathered {closed.full_name}, which was kept from inside its unit's forward: its "
            f"memory may hold another unit's parameters by now. Keep a clone, compute it inside that forward, or name "
            f"the unit in zm.shard(resident=[...])"
        )


class Retired(nn.Parameter):
    """A parameter as the model held it before zm.shard. It has no values any more: their sum, say, would be zero."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TELLS or func is torch.Tensor.untyped_storage:
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        raise ModelError(
            f"{func.__name__} of a parameter from before zm.shard, now without values: ask its module for it"
        )


class PlainLeaf(Leaf):
    """Over memory that is all of the parameter."""


class SpreadLeaf(Leaf, DTensor):
    """Over the memory of this rank's part of a DTensor."""

    __slots__ = ()


_CLOSED: dict[type[Leaf], type[Leaf]] = {
    opened: type(f"Closed{opened.__name__}", (_Closed, opened), {"__slots__": ()}) for opened in (PlainLeaf, SpreadLeaf)
}
_OPEN = {closed: opened for opened, closed in _CLOSED.items()}


def make_leaf(memory: Tensor, trainable: bool, name: str, spread: Spread | None) -> Leaf:
    """An open leaf over `memory`, which has the shape of the parameter, or of this rank's part of it."""
    leaf: Leaf
    if spread is None:
        leaf = torch.Tensor._make_subclass(PlainLeaf, memory, trainable)
    else:
        made: Tensor = nn.Parameter(spread.over(memory), requires_grad=trainable)
        made.__class__ = SpreadLeaf
        assert isinstance(made, SpreadLeaf)
        leaf = made
    leaf.full_name = name
    return leaf


def classes_of(leaf: Leaf) -> tuple[type[Leaf], type[Leaf]]:
    """Its class while it is open, and while it is closed."""
    opened = _OPEN.get(type(leaf), type(leaf))
    return opened, _CLOSED[opened]
