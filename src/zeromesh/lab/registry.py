"""Which labs exist on this machine, whose they are, and how they are removed.

Namespaces outlive the process that made them, so each lab is written down, before its first namespace exists, in a file
named after it. A lab is *live* while its owner runs and *leftover* after. A namespace without a record (someone
emptied the directory) is found by its name, `zmlab-<owner's pid>-<number>-<path>`. Both directories are on tmpfs: a
reboot forgets the records and the namespaces together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zeromesh.errors import LabError
from zeromesh.lab.plan import Command
from zeromesh.lab.shell import execute

PREFIX = "zmlab"

# A process that got SIGKILL is gone in milliseconds, unless it hangs in the kernel.
KILL_TIMEOUT_S = 10.0

_NAMESPACE = re.compile(rf"(?P<lab>{PREFIX}-(?P<pid>\d+)-\w+)-.+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRecord:
    """One lab, as written down by its owner.

    Args:
        name: prefix of its namespaces.
        owner_pid: the process that made it.
        owner_start: when that process started, in the kernel's ticks since boot, since pids are used again; None if
            the record was lost.
        tree: the text of its tree; None if the record was lost.
        started_unix_s: when it was made; None if the record was lost.
    """

    name: str
    owner_pid: int
    owner_start: int | None = None
    tree: str | None = None
    started_unix_s: float | None = None

    def __str__(self) -> str:
        return f"lab {self.name} ({self.tree or 'tree not known'}, of process {self.owner_pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """The labs of this machine.

    Args:
        directory: where records lie.
        netns: where `ip netns` keeps its names.
        proc: the proc file system.
    """

    directory: Path = Path("/run/zeromesh/labs")
    netns: Path = Path("/run/netns")
    proc: Path = Path("/proc")

    def labs(self) -> tuple[LabRecord, ...]:
        """Every lab that is written down or has a namespace, by name."""
        found = {record.name: record for record in self._unrecorded()} | {r.name: r for r in self._recorded()}
        return tuple(found[name] for name in sorted(found))

    def leftovers(self) -> tuple[LabRecord, ...]:
        """The labs whose owner runs no more."""
        return tuple(record for record in self.labs() if not self.is_live(record))

    def is_live(self, record: LabRecord) -> bool:
        """Whether the owner of a lab still runs."""
        start = self._process_start(record.owner_pid)
        return start is not None and record.owner_start in (start, None)

    def namespaces(self, name: str) -> tuple[str, ...]:
        """The namespaces of lab `name` that exist."""
        return tuple(entry for entry in self._names() if _lab_of(entry) == name)

    def add(self, name: str, *, tree: str) -> LabRecord:
        """Write down that this process makes lab `name`; before its first namespace exists."""
        record = LabRecord(
            name=name,
            owner_pid=os.getpid(),
            owner_start=self._process_start(os.getpid()),
            tree=tree,
            started_unix_s=time.time(),
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        draft = self.directory / f"{name}.draft"
        draft.write_text(json.dumps(dataclasses.asdict(record)) + "\n", encoding="utf-8")
        draft.replace(self._file(name))
        return record

    def remove(self, name: str) -> None:
        """End every process in the namespaces of lab `name`, delete them with all links, and forget the lab.

        Raises:
            LabError: a process or a namespace cannot be removed; the record stays, so that it can be tried again.
        """
        namespaces = self.namespaces(name)
        self._end_processes(name, namespaces)
        if namespaces:
            lines = "".join(f"netns del {namespace}\n" for namespace in namespaces)
            # -force goes on after a line that failed: a second process may be removing the same lab.
            argv = ("ip", "-force", "-batch", "-")
            try:
                execute(Command(argv=argv, stdin=lines, purpose=f"remove lab {name}"))
            except LabError:
                if self.namespaces(name):
                    raise
        self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def _names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self.netns))
        return []

    def _recorded(self) -> Iterator[LabRecord]:
        for path in self.directory.glob(f"{PREFIX}-*.json"):
            try:
                yield LabRecord(**json.loads(path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                continue  # removed since the listing
            except (ValueError, TypeError) as error:
                raise LabError(
                    f"{path}: not a record of a lab: {error}; delete it, then run: zeromesh lab down"
                ) from error

    def _unrecorded(self) -> Iterator[LabRecord]:
        for entry in self._names():
            if match := _NAMESPACE.fullmatch(entry):
                yield LabRecord(name=match["lab"], owner_pid=int(match["pid"]))

    def _process_start(self, pid: int) -> int | None:
        """Ticks since boot at which process `pid` started (proc(5), field 22 of stat); None if it does not run."""
        try:
            stat = (self.proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The name, field 2, stands in parentheses and may hold anything.
        state, *fields = stat.rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])

    def _end_processes(self, name: str, namespaces: tuple[str, ...]) -> None:
        deadline = time.monotonic() + KILL_TIMEOUT_S
        # A process may fork while it is being looked for, so look until none is found.
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


def _lab_of(namespace: str) -> str | None:
    match = _NAMESPACE.fullmatch(namespace)
    return match["lab"] if match else None


def _identity(namespace_file: Path) -> tuple[int, int] | None:
    try:
        status = namespace_file.stat()
    except OSError:
        return None  # the process or the namespace has gone since it was listed, or is a zombie
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
