"""What a unit computes with: its parameters, whole, in memory that others will use after it.

[Note: Leaves] A leaf is open while its unit is in use. It is a plain parameter to torch, but that what is written to
its `.data` counts as a change, which the engine looks for when the unit's forward ends: masters would never see it.
Closed, in memory that may hold another unit's parameters, it is of a class that computes nothing: it may have left its
unit through a cache or an attribute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.engine import allowed
from zeromesh.errors import ModelError

_TELLS = (
    allowed.PROPERTIES
    | frozenset(allowed.spelt("size dim ndimension numel nelement"))
    | {getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim")}
)


class Leaf(nn.Parameter):
    """Open: [Note: Leaves].

    Attributes:
        full_name: the parameter's.
    """

    full_name: str

    @property
    def data(self) -> Tensor:
        """The same memory, and the same version."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # a getset_descriptor


class ClosedLeaf(Leaf):
    """Closed: [Note: Leaves]."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ClosedLeaf({self.full_name!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        closed = next((arg for arg in args if type(arg) is ClosedLeaf), None)
        if func in _TELLS or closed is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ModelError(
            f"{func.__name__} of the gathered {closed.full_name}, which was kept from inside its unit's forward: its "
            f"memory may hold another unit's parameters by now. Keep a clone, compute it inside that forward, or name "
            f"the unit in zm.shard(resident=[...])"
        )
