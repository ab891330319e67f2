"""The device itself: started once in a process, in one mode; and process groups for its tensors."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.utils import backend_registration

from zeromesh.errors import InputError
from zeromesh.simdev import module
from zeromesh.simdev.build import as_value, native

NAME = "simdev"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Rates of a device whose streams run on a wall clock.

    Args:
        flops: FLOP/s of matrix products.
        memory_bytes_per_s: of all other kernels, over the bytes that they read and write.
        host_copy_bytes_per_s: of copies between device and host, in each direction.
        host_memory_bytes_per_s: of operators on the host's memory, where it is virtual: a rank's share.
        dilation: seconds of the machine for one of the device. Links must be slower by as much.

    Raises:
        InputError: one is not positive.
    """

    flops: float
    memory_bytes_per_s: float
    host_copy_bytes_per_s: float = 25e9
    host_memory_bytes_per_s: float = 50e9
    dilation: float = 1.0

    def __post_init__(self) -> None:
        if min(astuple(self)) <= 0:
            raise InputError(f"rates and dilation of a clock must be positive, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The simulated device of this process."""

    virtual: bool  # memory is reserved only, and kernels compute shapes only
    clock: Clock | None = None  # of a device that is clocked, which is virtual too

    @property
    def mode(self) -> str:
        return "real" if not self.virtual else "virtual" if self.clock is None else f"clocked by {self.clock}"

    @property
    def torch(self) -> torch.device:
        return torch.device(NAME, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Figures of the device's allocator, which works as torch's for CUDA does."""

    allocated_bytes: int  # that live tensors asked for
    peak_allocated_bytes: int
    rounded_bytes: int  # of their blocks, as torch.cuda.memory_allocated() counts them
    peak_rounded_bytes: int
    reserved_bytes: int  # of segments that were taken from the device
    peak_reserved_bytes: int
    blocks: int
    segments: int
    retries: int  # how often free segments were given back, since another one would have gone beyond `memory_limit`


LaunchOrder = Literal["none", "implicit"]

_started: Device | None = None


def start(virtual: bool = False, *, clock: Clock | None = None) -> Device:
    """The device of this process: compiled where it is not yet, and registered with torch as "simdev".

    Args:
        virtual: its mode: virtual, else real.
        clock: rates of the clocked mode, which is virtual with time.

    Raises:
        InputError: it cannot be compiled, it was started in the other mode, or torch has another device of the kind.
    """
    global _started
    wanted = Device(virtual=virtual or clock is not None, clock=clock)
    if _started is None:
        _require_place()
        native().set_virtual(wanted.virtual)
        if clock is not None:
            native().start_clock(*astuple(clock))
        native().set_passed_over([str(Path(torch.__file__).parent), str(Path(__file__).parent)])
        backend_registration.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, module)  # type: ignore[no-untyped-call]
        backend_registration.generate_methods_for_privateuse1_backend()
        register_backends(alone=wanted.mode == "virtual")
        _started = wanted
    if _started != wanted:
        raise InputError(
            f"the simulated device of this process is {_started.mode}, and cannot become {wanted.mode}: use another "
            f"process"
        )
    return _started


def _require_place() -> None:
    other = torch._C._get_privateuse1_backend_name()
    if other not in ("privateuseone", NAME):
        raise InputError(
            f"torch has one place for a device that is not its own, and {other!r} has it in this process: start the "
            f"simulated device in another process"
        )


@contextmanager
def launch_order(order: LaunchOrder) -> Iterator[None]:
    """Inside, collectives of several communicators are ordered so on the device: "none", each stream for itself, as
    outside; "implicit", each once all that were launched before have begun, as with NCCL_LAUNCH_ORDER_IMPLICIT."""
    native().keep_launch_order(order == "implicit")
    try:
        yield
    finally:
        native().keep_launch_order(False)


def memory_stats(*, host: bool = False) -> MemoryStats:
    """Memory of the device, and its peak since `reset_peak_memory`; or of the `host` of a virtual device: memory that
    was asked for as the host's, and results of operators on it."""
    return as_value(MemoryStats, native().memory_stats(host))


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[None]:
    """Inside, the device has so much memory. As torch's for CUDA does, the allocator first gives back free segments
    where another one would go beyond that. Unlike torch's, it then takes the segment even if there is no room."""
    native().limit_memory(limit_bytes)
    try:
        yield
    finally:
        native().limit_memory(0)


def reset_peak_memory() -> None:
    """Peaks begin anew, with the memory that is held now."""
    native().reset_peaks()


def counting_group(rank: int, world: int) -> None:
    """Makes this process one rank of `world`: torch's default process group, for tensors of device and host. Raises
    InputError if the device has not been started, or the rank is not one of the world's."""
    if _started is None:
        raise InputError("counting_group needs the simulated device: call zeromesh.simdev.start() first")
    if not 0 <= rank < world:
        raise InputError(f"rank must be 0 to {world - 1} in a world of {world}; got {rank}")
    dist.init_process_group(COUNTING, store=HashStore(), rank=rank, world_size=world)


BACKEND = "simccl"
"""Ordered by streams as NCCL's; data goes through gloo."""

COUNTING = "simcount"
"""The same for one process that is a rank of any world: the others are taken to hold the same values."""


def register_backends(*, alone: bool) -> None:
    """The first is the one that torch takes for the device by default: without gloo where a process is `alone`."""
    names = {BACKEND: _through_gloo, COUNTING: _counting}
    for name in sorted(names, reverse=alone):
        devices = ["simdev"] if name == BACKEND else ["simdev", "cpu"]
        dist.Backend.register_backend(name, names[name], extended_api=True, devices=devices)


def _timeout(options: Any) -> datetime.timedelta:
    given = options.timeout
    return given if isinstance(given, datetime.timedelta) else datetime.timedelta(seconds=float(given))


def _through_gloo(options: Any, _: Any) -> Any:
    store = PrefixStore("simccl", options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, _timeout(options))
    return native().make_group(options.group_rank, options.group_size, gloo, _timeout(options))


def _counting(options: Any, _: Any) -> Any:
    return native().make_group(options.group_rank, options.group_size, None, _timeout(options))
