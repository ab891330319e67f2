"""Device tensors over gloo: through pinned host memory.

For tests of the CUDA engine with several processes on one device, where NCCL cannot be used. It allocates, and it
blocks the host until all have exchanged; nobody should train like this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from zeromesh.comm.groups import AxisGroup

P = ParamSpec("P")


def hosted(collective: Callable[P, None]) -> Callable[P, None]:
    """`collective`, and where the group is gloo and the tensors are not on the host, on copies there."""

    @functools.wraps(collective)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        values = (*args, *kwargs.values())
        on_device = any(isinstance(value, Tensor) and not value.is_cpu for value in values)
        if on_device and any(isinstance(value, AxisGroup) and value.backend == "gloo" for value in values):
            _on_host(collective, args, kwargs)
        else:
            collective(*args, **kwargs)

    return run


def _on_host(collective: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Copies tensors to the host, keeping those apart that alias: the first argument comes back before the others."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    copies = {id(tensor): torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors}
    for tensor in tensors:
        copies[id(tensor)].copy_(tensor)
    collective(
        *(copies.get(id(value), value) for value in args),
        **{name: copies.get(id(value), value) for name, value in kwargs.items()},
    )
    bring_back(tensors, copies)


def bring_back(tensors: Sequence[Tensor], copies: Mapping[int, Tensor]) -> None:
    """Back to the device, from the copies by id. The host does not wait: what follows must, as after any collective."""
    for tensor in tensors:
        tensor.copy_(copies[id(tensor)], non_blocking=True)
