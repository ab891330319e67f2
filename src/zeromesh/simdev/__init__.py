"""A simulated accelerator: torch's device "simdev", with streams, events, an allocator and process groups.

It is for tests and rehearsals on machines without a device; nothing that trains needs it. Its C++ is compiled on first
use, in about a minute, into torch's cache of extensions, and needs a C++ compiler and ninja.

Three modes, one a process:

    real      kernels compute, on memory of the host; ranks exchange through gloo
    virtual   memory is reserved and not touched, kernels compute shapes; one process is a rank of any world
    clocked   as virtual, and streams run on a wall clock; ranks exchange as many bytes through gloo

In all, a `Checker` holds every access of every kernel against what streams, events and the host have waited for.

Stable, for what builds on this:

    start(virtual=False, clock=None)      Device: builds, registers; again is free, another mode is an error
    Clock(flops=..., ...)                 rates of the clocked mode
    counting_group(rank, world)           torch's default process group, of any world, in this process
    launch_order("implicit")              context; collectives of all communicators begin in the order of launch
    memory_stats() -> MemoryStats         and reset_peak_memory()
    memory_limit(bytes)                   context; beyond it the allocator gives its cache back first
    Checker()                             context; races, early_frees, host_reads, host_waits, checked
    Recorder(listener)                    context; tells of every kernel, collective and order of streams
    BACKEND, COUNTING                     names of the process groups' backends

docs/simdev.md says what it sees and what it cannot.
"""

from zeromesh.simdev.checker import Checker, EarlyFree, HostRead, HostWait, Race
from zeromesh.simdev.device import (
    BACKEND,
    COUNTING,
    Clock,
    Device,
    MemoryStats,
    counting_group,
    launch_order,
    memory_limit,
    memory_stats,
    reset_peak_memory,
    start,
)
from zeromesh.simdev.recorder import Collective, Kernel, Order, Recorder

__all__ = [
    "BACKEND",
    "COUNTING",
    "Checker",
    "Clock",
    "Collective",
    "Device",
    "EarlyFree",
    "HostRead",
    "HostWait",
    "Kernel",
    "MemoryStats",
    "Order",
    "Race",
    "Recorder",
    "counting_group",
    "launch_order",
    "memory_limit",
    "memory_stats",
    "reset_peak_memory",
    "start",
]
