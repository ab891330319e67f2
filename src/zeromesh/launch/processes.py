"""Runs ranks side by side: their output, their deadline, and the end of all that they started. Torch-free.

Each rank leads a session of its own. When it ends, or must be ended, its whole process group goes with it: SIGTERM,
and SIGKILL after a grace period. Ranks die with the thread that called `run_ranks` (their parent-death signal).

Ranks of a training run take SIGTERM as a request to save and end. So only the user sends it to them, and after a
failure the other ranks have the grace period to end by themselves.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from zeromesh.errors import ConfigError, RanksFailedError
from zeromesh.integrations.elastic import EXIT_PREEMPTED, when_asked

#: Called with rank, "stdout" or "stderr", and one line without its end, as soon as the line is there.
OnLine = Callable[[int, str, str], None]

_LONGEST_WAIT_S = 3600.0  # of one wait: the system's bound is far below that of a user's timeout
_DRAIN_S = 1.0  # a process that left the rank's group may hold its pipe open for ever


def schedule_as_batch() -> None:
    """Asks Linux for its policy of programs that compute, for this thread and those that it starts.

    A thread that sends holds a lock of gloo's. If a thread that its message wakes takes its core, gloo's own thread
    tries that lock over and over until the first has a core again. So where threads outnumber cores, gloo's threads
    took up to a third of all processor time. Under this policy a thread that wakes up waits until a core is free.
    """
    with contextlib.suppress(AttributeError, OSError):  # other systems have no policies, or forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process to start: program and arguments, and its whole environment."""

    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The end of one rank: its exit code, or minus the signal that ended it; its output, unless it printed to this
    process's own; seconds from the first rank's start; and the reason if it was ended from here."""

    rank: int
    returncode: int
    stdout: str
    stderr: str
    wall_s: float
    ended_because: str | None = None

    @property
    def failed(self) -> bool:
        return self.returncode != 0 or self.ended_because is not None


def local_launches(command: Sequence[str], world: int, environment: Mapping[str, str]) -> list[Launch]:
    """`command` for each of `world` ranks of this machine, with torchrun's variables, `environment`, and this process's
    own environment."""
    around = {**os.environ, **environment, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    if sys.platform == "linux":
        # On one machine the loopback device works, however the host's name resolves.
        around.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return [
        Launch(rank=rank, argv=tuple(command), env=around | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]


def run_ranks(
    launches: Sequence[Launch],
    *,
    timeout_s: float = float("inf"),
    grace_s: float = 5.0,
    on_line: OnLine | None = None,
    asks: bool = False,
) -> tuple[RankResult, ...]:
    """Starts all of `launches` and waits until each has ended. If one fails, the others are ended. Returns the results
    in the same order.

    Args:
        timeout_s: after which ranks that still run are ended.
        grace_s: between SIGTERM (with `asks`, the first failure) and SIGKILL.
        on_line: called with each line as it comes.
        asks: whether ranks print to this process's own output, and are asked by SIGTERM to save and end if this is.

    Raises:
        ConfigError: a program that it needs is not there.
    """
    if shutil.which("setpriv") is None:
        raise ConfigError("processes are started with setpriv (package util-linux): install it, or start torchrun")
    job = _Job(timeout_s, grace_s, on_line, asks=asks)
    try:
        for launch in launches:
            job.start(launch)
        with when_asked(job.ask_running) if asks else contextlib.nullcontext():
            while job.running:
                job.turn()
    finally:
        job.kill_all()
    return tuple(rank.result() for rank in job.ranks)


def raise_failed(results: Sequence[RankResult]) -> None:
    """Raises RanksFailedError with `describe_failure` if a rank failed."""
    if failure := describe_failure(results):
        raise RanksFailedError(failure)


def describe_failure(results: Sequence[RankResult]) -> str | None:
    """Each failed rank, then the last lines of the one that failed first; None if none failed."""
    failed = [result for result in results if result.failed]
    if not failed:
        return None
    # Ranks that were ended because of another one are not the cause.
    first = min(failed, key=lambda result: (result.ended_because is not None, result.wall_s))
    summary = "; ".join(f"rank {result.rank} {_end(result)}" for result in failed)
    output = (first.stderr.strip() or first.stdout.strip() or "(it printed nothing)").splitlines()
    shown = "\n".join(output[-20:])
    return f"{len(failed)} of {len(results)} ranks failed: {summary}\nrank {first.rank}:\n{shown}"


def _end(result: RankResult) -> str:
    if result.ended_because is not None:
        return f"was ended since {result.ended_because}"
    if result.returncode < 0:
        return f"died of {signal.Signals(-result.returncode).name}"
    return f"exited with {result.returncode}"


@dataclass(slots=True)
class _Rank:
    launch: Launch
    process: subprocess.Popen[bytes]
    printed: dict[str, bytearray]  # by stream
    readers: list[threading.Thread] = field(default_factory=list)
    wall_s: float = 0.0
    ended_because: str | None = None

    def signal(self, number: signal.Signals) -> None:
        # The leader is reaped after its group has been signalled, since the group has its number: threads only watch.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def result(self) -> RankResult:
        printed = {name: bytes(text).decode("utf-8", errors="replace") for name, text in self.printed.items()}
        return RankResult(
            rank=self.launch.rank,
            returncode=-signal.SIGKILL if self.process.returncode is None else self.process.returncode,
            stdout=printed["stdout"],
            stderr=printed["stderr"],
            wall_s=self.wall_s,
            ended_because=self.ended_because,
        )


class _Job:
    """The ranks of one run: running; stopping, once one of them has to be ended; killed, after the grace period.
    Threads read the pipes and watch the processes; the caller's thread handles their events."""

    def __init__(self, timeout_s: float, grace_s: float, on_line: OnLine | None, *, asks: bool) -> None:
        self.ranks: list[_Rank] = []
        self.running: list[_Rank] = []
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._grace_s, self._on_line, self._asks = grace_s, on_line, asks
        self._start_s, self._timeout_s = time.monotonic(), timeout_s
        self._deadline_s = self._start_s + timeout_s
        self._stopping = ""  # why, once ranks have to be ended

    def start(self, launch: Launch) -> None:
        output = None if self._asks else subprocess.PIPE
        process = subprocess.Popen(
            ("setpriv", "--pdeathsig", "KILL", *launch.argv),
            env=dict(launch.env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        rank = _Rank(launch, process, {"stdout": bytearray(), "stderr": bytearray()})
        self.ranks.append(rank)
        self.running.append(rank)
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            if pipe is not None:
                rank.readers.append(threading.Thread(target=self._read, args=(rank, name, pipe), daemon=True))
        for thread in (*rank.readers, threading.Thread(target=self._watch, args=(rank,), daemon=True)):
            thread.start()

    def turn(self) -> None:
        """Waits for the next event or deadline, and handles it."""
        left_s = max(0.0, self._deadline_s - time.monotonic())
        with contextlib.suppress(queue.Empty):
            self._events.get(timeout=min(left_s, _LONGEST_WAIT_S))()
        if self.running and time.monotonic() >= self._deadline_s:
            if self._stopping:
                self._end_running(signal.SIGKILL)
                self._deadline_s = float("inf")
            else:
                self._stop(f"it ran past the timeout of {self._timeout_s:g} s")

    def ask_running(self) -> None:
        """Sends SIGTERM to each rank that runs, but not to its child processes."""
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGTERM)

    def kill_all(self) -> None:
        self._end_running(signal.SIGKILL)
        for rank in self.running:
            rank.process.wait()

    def _read(self, rank: _Rank, name: str, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._events.put(lambda line=line: self._printed(rank, name, line))  # type: ignore[misc]

    def _watch(self, rank: _Rank) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
            self._events.put(lambda: self._ended(rank))

    def _printed(self, rank: _Rank, name: str, line: bytes) -> None:
        rank.printed[name] += line
        if self._on_line is not None:
            self._on_line(rank.launch.rank, name, line.decode("utf-8", errors="replace").removesuffix("\n"))

    def _ended(self, rank: _Rank) -> None:
        rank.wall_s = time.monotonic() - self._start_s
        rank.signal(signal.SIGKILL)
        for reader in rank.readers:
            reader.join(_DRAIN_S)
        self._events.put(lambda: self._gone(rank))  # after the lines that it has printed

    def _gone(self, rank: _Rank) -> None:
        self.running.remove(rank)
        code = rank.process.wait()
        failed = code not in ((0, EXIT_PREEMPTED) if self._asks else (0,))
        if failed and self.running and not self._stopping:
            self._stop(f"rank {rank.launch.rank} failed", killed=code == -signal.SIGKILL)

    def _stop(self, reason: str, *, killed: bool = False) -> None:
        # Other ranks know no more about a rank that was killed from outside than this process does.
        self._stopping = reason
        self._deadline_s = time.monotonic() + (0.0 if killed and self._asks else self._grace_s)
        if not self._asks:
            self._end_running(signal.SIGTERM)

    def _end_running(self, number: signal.Signals) -> None:
        for rank in self.running:
            rank.ended_because = rank.ended_because or self._stopping or "the caller has failed"
            rank.signal(number)
