"""The device itself, which a process starts once and in one mode, and process groups for its tensors."""

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
        memory_bytes_per_s: rate of all other kernels, over the bytes that they read and write.
        host_copy_bytes_per_s: rate of copies between device and host, in each direction.
        host_memory_bytes_per_s: rate of operators on the host's memory, if that is virtual: a rank's share.
        dilation: the machine's seconds for one second of the device. Links must be slower by the same factor.

    Raises:
        InputError: a value is not positive.
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

    virtual: bool  # memory is only reserved, and kernels only compute shapes
    clock: Clock | None = None  # of a clocked device, which is also virtual

    @property
    def mode(self) -> str:
        return "real" if not self.virtual else "virtual" if self.clock is None else f"clocked by {self.clock}"

    @property
    def torch(self) -> torch.device:
        return torch.device(NAME, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Figures of the device's allocator, which works like torch's for CUDA."""

    allocated_bytes: int  # that live tensors requested
    peak_allocated_bytes: int
    rounded_bytes: int  # of their blocks, as in torch.cuda.memory_allocated()
    peak_rounded_bytes: int
    reserved_bytes: int  # of segments that were taken from the device
    peak_reserved_bytes: int
    blocks: int
    segments: int
    retries: int  # how often free segments were given back, since a further one would have exceeded `memory_limit`


LaunchOrder = Literal["none", "implicit"]

_started: Device | None = None


def start(virtual: bool = False, *, clock: Clock | None = None) -> Device:
    """Returns the device of this process. Compiles it if necessary, and registers it with torch as "simdev".

    Args:
        virtual: True for the virtual mode, False for the real one.
        clock: rates for the clocked mode, which is virtual with time.

    Raises:
        InputError: it cannot be compiled, it was started in another mode, or torch has another device of this kind.
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
    """Sets the order of collectives of different communicators on the device, inside the context. "none": no order
    between streams, as outside. "implicit": each begins once all that were launched before have begun, as with
    NCCL_LAUNCH_ORDER_IMPLICIT."""
    native().keep_launch_order(order == "implicit")
    try:
        yield
    finally:
        native().keep_launch_order(False)


def memory_stats(*, host: bool = False) -> MemoryStats:
    """Returns figures of the device's memory, with peaks since `reset_peak_memory`. With `host`, of a virtual device's
    host: memory that was requested as the host's, and results of operators on it."""
    return as_value(MemoryStats, native().memory_stats(host))


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[None]:
    """Limits the device's memory inside the context. Like torch's allocator for CUDA, it first gives back free segments
    if a further one would exceed the limit. Unlike torch's, it then takes the segment even if there is no room."""
    native().limit_memory(limit_bytes)
    try:
        yield
    finally:
        native().limit_memory(0)


def reset_peak_memory() -> None:
    """Starts peaks anew, from the memory that is held now."""
    native().reset_peaks()


def counting_group(rank: int, world: int) -> None:
    """Makes this process one rank of `world` in torch's default process group, for tensors of device and host. Raises
    InputError if the device has not been started, or the rank is not in the world."""
    if _started is None:
        raise InputError("counting_group needs the simulated device: call zeromesh.simdev.start() first")
    if not 0 <= rank < world:
        raise InputError(f"rank must be 0 to {world - 1} in a world of {world}; got {rank}")
    dist.init_process_group(COUNTING, store=HashStore(), rank=rank, world_size=world)


BACKEND = "simccl"
"""A process group whose collectives are ordered by streams, as with NCCL. Data goes through gloo."""

COUNTING = "simcount"
"""The same for a single process as a rank of any world: other ranks are assumed to hold the same values."""


def register_backends(*, alone: bool) -> None:
    """Registers both backends. Torch takes the first one for the device by default: the one without gloo if a process
    is `alone`."""
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
