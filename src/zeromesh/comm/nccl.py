"""NCCL's options of communicators, and the memory that is registered with them.

[Note: Options] NCCL's options depend on the level. Between machines, with one rank on each, a communicator feeds a
network card. A few CTAs (blocks of a kernel) suffice for that, and the others stay with the computation. Devices that
share NVLink with those of other machines have no such limit. Inside a machine, gathers of registered memory go by copy
engines, without CTAs.

[Note: Shared buffers] NCCL launches communicators that share buffers one after the other. So the two of an axis share
them only if its gathers and reductions never run at once anyway. The one for reductions is then split off the one for
gathers, and has as many CTAs: with fewer NCCL can crash (NVIDIA/nccl#2430). Only between machines: inside one the
mesh's own takes the place of one of the two. A user can let all share (NCCL_COMM_SPLIT_SHARE_RESOURCES=1); then none
has a limit of CTAs.

[Note: Registered memory] A CUDA device's backend sends from registered memory, and receives into it, without staging.
The memory is a pool of torch's allocator over the backend's own (`ncclMemAlloc`), registered with every communicator
once. NCCL's kernels for NVLink and for sums inside switches need windows that are alike on all ranks. On other devices
nothing is registered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zeromesh.comm.exchange import AxisGroup

SLOW_CTAS = 4
"""NCCL's fewest channels are two; each brings some 25 GB/s to a network card, of which the fastest take 100."""


def shared_splits() -> bool:
    """Whether NCCL is told to share buffers between a communicator and those that are split off it."""
    return os.environ.get("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0") not in ("", "0")


class Options(NamedTuple):
    """NCCL's options of a communicator: [Note: Options]."""

    max_ctas: int = 0  # for its kernels; 0 for NCCL's own limit
    zero_ctas: bool = False  # whether copy engines take the place of kernels where they can
    shared: bool = False  # whether an axis's two share buffers: [Note: Shared buffers]

    def made(self, timeout_s: float, parent: dist.ProcessGroup | None) -> Any:
        """As torch has them. NCCL's variables win: NCCL_MAX_CTAS, NCCL_CTA_POLICY, NCCL_COMM_SPLIT_SHARE_RESOURCES."""
        nccl: Any = dist.ProcessGroupNCCL
        made = nccl.Options()
        made._timeout = timedelta(seconds=timeout_s)  # else torch warns that it will set it
        if self.max_ctas:
            made.config.max_ctas = self.max_ctas
        if self.zero_ctas and hasattr(nccl, "NCCL_CTA_POLICY_ZERO"):  # NCCL 2.28
            made.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
        if self.shared:
            made.config.split_share = 1  # NCCL reads it from the communicator that is split
        if parent is not None:
            backend = parent._get_backend(torch.device("cuda"))
            made.split_from = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps each
            made.split_color = 0  # all of its ranks
        return made


def options_of(lines: Sequence[Sequence[str]], *, registered: bool, in_turn: bool) -> Options | None:
    """Those of an axis, by the machines of each of its lines of ranks: all split off communicators together. None where
    nothing is set."""
    apart = all(len(set(line)) == len(line) for line in lines)
    apart = apart and not torch.cuda.get_device_name().startswith("NVIDIA GB") and not shared_splits()
    zero_ctas = registered and all(len(set(line)) == 1 for line in lines)
    found = Options(SLOW_CTAS if apart else 0, zero_ctas, shared=apart and in_turn and not registered)
    return found if any(found) else None


@contextmanager
def registered(groups: Iterable[AxisGroup], device: torch.device) -> Iterator[Callable[[], None] | None]:
    """Registers the memory allocated inside on `device` with all communicators at the end; all ranks of the groups
    allocate the same, in the same order.

    Yields:
        A function to be called before the memory is freed, when nobody uses it any more: backends outlive it. None
        where the device or its backend has no such memory.
    """
    channels = dict.fromkeys(channel for group in groups for channel in (group.gather, group.reduce))
    backends: list[Any] = [channel.process_group._get_backend(device) for channel in channels]
    if device.type != "cuda" or not backends or not all(hasattr(each, "register_mem_pool") for each in backends):
        yield None
        return
    pool = torch.cuda.MemPool(backends[0].mem_allocator)

    def release() -> None:
        torch.accelerator.synchronize(device)
        for backend in backends:
            backend.deregister_mem_pool(pool)

    with torch.cuda.use_mem_pool(pool, device):
        yield release
    for backend in backends:  # in one order on all ranks, which take part
        backend.register_mem_pool(pool, symm=True)
