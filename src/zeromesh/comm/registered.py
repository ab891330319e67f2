"""Memory from which a device's backend sends, and into which it receives, without staging: registered with its
communicators once, and in NCCL's case as windows that are alike on all ranks, which its kernels for NVLink and for sums
inside of switches need.

    device   memory
    CUDA     a pool of torch's allocator over the backend's own (`ncclMemAlloc`), registered with every communicator
    other    plain: nothing is registered
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zeromesh.comm.groups import AxisGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A pool, and who knows it: torch's backends of communicators, which outlive it."""

    pool: Any
    backends: tuple[Any, ...]
    device: torch.device

    def release(self) -> None:
        """Before its memory is freed, when nobody uses it any more."""
        torch.accelerator.synchronize(self.device)
        for backend in self.backends:
            backend.deregister_mem_pool(self.pool)


@contextmanager
def registered(groups: Iterable[AxisGroup], device: torch.device) -> Iterator[Registration | None]:
    """What is allocated inside on `device` is registered with all communicators at the end; all ranks of the groups
    allocate the same, in the same order. None where the device or its backend has no such memory."""
    channels = dict.fromkeys(channel for group in groups for channel in (group.gather, group.reduce))
    backends: tuple[Any, ...] = tuple(channel.process_group._get_backend(device) for channel in channels)
    if device.type != "cuda" or not backends or not all(hasattr(each, "register_mem_pool") for each in backends):
        yield None
        return
    pool = torch.cuda.MemPool(backends[0].mem_allocator)
    with torch.cuda.use_mem_pool(pool, device):
        yield Registration(pool=pool, backends=backends, device=device)
    for backend in backends:  # in one order on all ranks, which take part
        backend.register_mem_pool(pool, symm=True)
