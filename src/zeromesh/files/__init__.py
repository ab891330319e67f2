"""Facts about this machine, from the system's files. Users' files are read in `users`."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def usable_cores() -> int:
    return len(core_numbers())


def core_numbers() -> tuple[int, ...]:
    """The processor cores that this process may use, of all of its machine's."""
    return tuple(sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)))


def machine_id() -> str:
    """The kernel's boot id: emulated clusters have several hosts' networks and one kernel."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else platform.node()


def available_memory_bytes(system: Path = Path("/")) -> int | None:
    """Bytes of memory that this process may still take: the machine's free memory, or less if a control group on the
    way to the root allows less. None if the `system` does not say."""
    try:
        meminfo = dict(line.split(":", 1) for line in (system / "proc/meminfo").read_text().splitlines())
        found = [1024 * int(meminfo["MemAvailable"].split()[0])]
        own = (system / "proc/self/cgroup").read_text().partition("0::/")[2].split("\n")[0]
        root = system / "sys/fs/cgroup"
        for group in (root / own, *(root / own).parents):
            limit, current = group / "memory.max", group / "memory.current"
            if limit.exists() and (most := limit.read_text().strip()) != "max":
                # A group's use includes cached files, which Linux drops first: a checkpoint that was just read, say.
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                found.append(int(most) - int(current.read_text()) + int(stat["inactive_file"]))
    except (OSError, KeyError, ValueError):
        return None
    return max(0, min(found))
