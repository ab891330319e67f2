"""Which labs exist on this machine, which processes own them, and how they are removed.

Namespaces outlive the process that made them. So their names tell their owner: `zmlab-<pid>-<start>-<number>-<path>`.
`start` tells a process from a later one with its pid. A lab is *leftover* when its owner no longer runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from lab.plan import Command
from lab.shell import execute
from lab.tree import LabError

# A process that got SIGKILL ends within milliseconds, unless it hangs in the kernel.
KILL_TIMEOUT_S = 10.0

_NAMESPACE = re.compile(r"(?P<lab>zmlab-(?P<pid>\d+)-(?P<start>\d+)-\d+)-.+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """The labs of this machine."""

    netns: Path = Path("/run/netns")  # where `ip netns` keeps its names
    proc: Path = Path("/proc")

    def own_name(self, number: int) -> str:
        """Returns the name for this process's lab with this number."""
        return f"zmlab-{os.getpid()}-{self._process_start(os.getpid()) or 0}-{number}"

    def labs(self) -> tuple[str, ...]:
        """The names of all labs that have a namespace."""
        return tuple(sorted({match["lab"] for match in map(_NAMESPACE.fullmatch, self._names()) if match}))

    def leftovers(self) -> tuple[str, ...]:
        """The labs whose owner no longer runs."""
        return tuple(name for name in self.labs() if not self._is_live(name))

    def namespaces(self, name: str) -> tuple[str, ...]:
        """The existing namespaces of lab `name`."""
        return tuple(entry for entry in self._names() if (m := _NAMESPACE.fullmatch(entry)) and m["lab"] == name)

    def remove(self, name: str) -> None:
        """Ends every process in the namespaces of lab `name`, and deletes these with all links."""
        namespaces = self.namespaces(name)
        self._end_processes(name, namespaces)
        if namespaces:
            lines = "".join(f"netns del {namespace}\n" for namespace in namespaces)
            # -force continues after a failed line: another process may be removing the same lab.
            argv = ("ip", "-force", "-batch", "-")
            try:
                execute(Command(argv=argv, stdin=lines, purpose=f"remove lab {name}"))
            except LabError:
                if self.namespaces(name):
                    raise

    def _names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self.netns))
        return []

    def _is_live(self, name: str) -> bool:
        _, pid, start, _ = name.split("-")
        return self._process_start(int(pid)) == int(start)

    def _process_start(self, pid: int) -> int | None:
        """Ticks since boot at which process `pid` started (proc(5), field 22 of stat); None if it does not run."""
        try:
            stat = (self.proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The name, field 2, is in parentheses and may contain anything.
        state, *fields = stat.rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])

    def _end_processes(self, name: str, namespaces: tuple[str, ...]) -> None:
        deadline = time.monotonic() + KILL_TIMEOUT_S
        # A process may fork during the search, so search until none is found.
        while pids := self._processes_in(namespaces):
            if os.getpid() in pids:
                raise LabError(f"lab {name} cannot be removed from inside: this process runs in it")
            for pid in pids:
                _kill_and_wait(pid, deadline)
            if time.monotonic() > deadline:
                raise LabError(
                    f"lab {name}: processes {sorted(pids)} did not end within {KILL_TIMEOUT_S:g} s of SIGKILL"
                )

    def _processes_in(self, namespaces: tuple[str, ...]) -> set[int]:
        wanted = {identity for name in namespaces if (identity := _identity(self.netns / name)) is not None}
        pids = (int(entry) for entry in os.listdir(self.proc) if entry.isdecimal())
        return {pid for pid in pids if _identity(self.proc / str(pid) / "ns" / "net") in wanted}


def _identity(namespace_file: Path) -> tuple[int, int] | None:
    try:
        status = namespace_file.stat()
    except OSError:
        return None  # gone since it was listed, or a zombie
    return status.st_dev, status.st_ino


def _kill_and_wait(pid: int, deadline: float) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(process)
