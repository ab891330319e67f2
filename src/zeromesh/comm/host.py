"""The memory of a device's host, and copies to and from it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeromesh.comm.exchange import Copy, Sent, Step
from zeromesh.errors import CommunicationError
from zeromesh.files import available_memory_bytes
from zeromesh.schedule.transfer import Copying


@dataclass(slots=True, eq=False)
class HostLink:
    """Copies between one device and its host's memory."""

    name: str  # in reports, beside those of axes
    arena: HostArena  # the host's memory, which stays registered as long as this lives
    device: torch.device
    ranks: int  # how many this machine has, which share its memory
    record: Callable[[Sent], None] = lambda sent: None  # is told of every copy; for tests and byte counters

    def enter_thread(self, threads: int) -> None:
        """Has this thread compute with so many threads, on memory near the device."""
        torch.set_num_threads(threads)
        if self.device.type == "cuda" and (node := _node_of(self.device)) is not None:
            prefer_node(node)

    def brought(self, source: Tensor) -> Tensor:
        """A copy of `source` in new memory of the device."""
        here = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        self.copy("up", here, source)
        return here

    def recorded(self, record: Callable[[Sent], None]) -> Callable[[Sent], None]:
        """From now on reports copies to `record`; returns the observer before it."""
        before, self.record = self.record, record
        return before

    def step(
        self, operation: Copying, destination: Tensor, source: Tensor, *, before: Copy | None = None, aside: bool = True
    ) -> Step:
        """One copy, as a step of a chain; by default in a lane of its own."""
        call = partial(self.copy, operation, destination, source)
        return Step(operation=operation, call=call, lane=operation if aside else "", before=before)

    def copy(self, operation: Copying, destination: Tensor, source: Tensor) -> None:
        """One copy, on the device's current stream; it may be on its way when this returns."""
        destination.copy_(source, non_blocking=True)
        self.record(Sent(operation=operation, axis=f"{self.name} {operation}", sent_bytes=source.nbytes, messages=1))


class HostArena:
    """The host's memory of one rank's shards, in one piece of exactly so many bytes. CUDA copies from and to it
    without waiting, since it is registered: torch's own pinned memory comes in powers of two.

    Args:
        num_bytes: of all that will be taken; at least 1.
        chunk_bytes: it is registered in chunks of so many, since CUDA does nothing else meanwhile, and no copy may lie
            in two; None for one piece.

    Raises:
        CommunicationError: CUDA does not register it.
    """

    def __init__(self, num_bytes: int, device: torch.device, chunk_bytes: int | None = None) -> None:
        if (own := own_memory(device)) is not None:
            self.memory: Tensor = own(num_bytes)
        elif device.type not in ("cpu", "cuda"):
            self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:  # an anonymous mapping is of zeros, and takes no memory before it is written to
            self.memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        self._taken = 0
        if device.type == "cuda":
            if (node := _node_of(device)) is not None:
                prefer_node(node, self.memory)
            for start in range(0, num_bytes, chunk_bytes or num_bytes):
                address, length = self.memory.data_ptr() + start, min(chunk_bytes or num_bytes, num_bytes - start)
                code = int(_cudart().cudaHostRegister(address, length, 0))
                if code:
                    raise CommunicationError(
                        f"CUDA cannot register {num_bytes} bytes of the host's memory (error {code}): raise the limit "
                        f"of locked memory (ulimit -l), or give a strategy that keeps less on the host"
                    )
                weakref.finalize(self, _cudart().cudaHostUnregister, address).atexit = False

    def take(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """The next part of it, zeroed: 1-D. Shards begin at multiples of 16 bytes: [Note: Padding] of layouts."""
        start, self._taken = self._taken, self._taken + num_bytes
        return self.memory[start : self._taken].view(dtype)


_POLICIES = {"x86_64": (237, 238), "aarch64": (235, 237)}
"""Linux's numbers of mbind and set_mempolicy; Python has no names for them."""


def prefer_node(node: int, memory: Tensor | None = None) -> None:
    """Has Linux put pages that nobody has touched on a NUMA node, as long as that has room: those of `memory`, or all
    that this thread, and those that it starts from now on, touch first."""
    if platform.machine() in _POLICIES:
        of_memory, of_thread = _POLICIES[platform.machine()]
        mask, preferred = (ctypes.c_ulong * 16)(), 1
        mask[node // 64] = 1 << node % 64
        policy, call = (preferred, mask, ctypes.c_ulong(1024)), ctypes.CDLL(None).syscall
        if memory is None:
            call(of_thread, *policy)
        else:
            call(of_memory, ctypes.c_void_p(memory.data_ptr()), ctypes.c_ulong(memory.nbytes), *policy, 0)


def _node_of(device: torch.device) -> int | None:
    """The NUMA node that a device is nearest to, if the machine says."""
    found = torch.get_device_module(device).get_device_properties(device)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        node = int(Path(f"/sys/bus/pci/devices/{place}/numa_node").read_text())
        return node if node >= 0 else None
    return None


def own_memory(device: torch.device) -> Callable[[int], Tensor] | None:
    """Makes memory of so many bytes for a device that stands for its host too; None for all others."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), "host_memory", None)


def free_bytes(device: torch.device) -> int | None:
    """The memory that a device's machine has left; None where it does not say, or the device stands for it."""
    return available_memory_bytes() if own_memory(device) is None else None


def padded(num_bytes: int) -> int:
    """Its room in an arena, where tensors of any dtype begin at multiples of 16 bytes."""
    return -(-num_bytes // 16) * 16


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
