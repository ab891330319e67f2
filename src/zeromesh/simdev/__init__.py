"""A simulated accelerator: torch's device "simdev", with streams, events, an allocator and process groups.

It is for tests and rehearsals on machines without a device; training never needs it. Its C++ is compiled on first use,
in about a minute, into torch's cache of extensions, which needs a C++ compiler and ninja.

There are three modes; a process uses one:

    real      kernels compute, on memory of the host; ranks exchange through gloo
    virtual   memory is reserved and not touched, kernels compute shapes; one process is a rank of any world
    clocked   as virtual, and streams run on a wall clock; ranks exchange as many bytes through gloo

In all modes, a `Checker` compares every access of every kernel with the waits of streams, events and the host.

Names in `__all__` are stable, for code that builds on them. docs/simdev.md describes their use and the limits of the
simulation.
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
