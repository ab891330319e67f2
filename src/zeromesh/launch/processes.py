"""Runs ranks side by side: their output, their deadline, and the end of all that they started. Torch-free.

Each rank leads a session of its own. When it ends, or must be ended, its whole process group goes with it: SIGTERM,
and SIGKILL after a grace period. Ranks die with the thread that called `run_ranks` (their parent-death signal), also if
that gets SIGKILL. Nothing here knows about namespaces.

Ranks of a run that is trained take SIGTERM for the request to save and to end. So it comes to them from the user alone,
by `Sigterm`, and after a failure the others have the grace period to end by themselves.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

from zeromesh.errors import ConfigError, RanksFailedError

#: Called with rank, "stdout" or "stderr", and one line without its end, as soon as the line is there.
OnLine = Callable[[int, str, str], None]

EXIT_PREEMPTED = 75
"""Of a rank that has saved and ended because it was asked to: no failure, and all ranks end so."""

_CHUNK_BYTES = 1 << 16
_LONGEST_WAIT_S = 3600.0  # of one wait: the system's takes a number of milliseconds of 31 bits
_SHOWN_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process to start.

    Args:
        rank: who it is.
        argv: program and arguments.
        env: its whole environment.
        cwd: its directory; None: the caller's.
    """

    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """How one rank ended.

    Args:
        rank: which.
        returncode: its exit code, or minus the signal that ended it.
        stdout: all that it printed; what is not UTF-8 is replaced; empty where it printed to this process's own.
        stderr: likewise.
        wall_s: from the start of the first rank to the end of this one.
        ended_because: why it was ended from here; None if it ended by itself.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    wall_s: float
    ended_because: str | None = None

    @property
    def failed(self) -> bool:
        """Whether it ended badly, by itself or from here."""
        return self.returncode != 0 or self.ended_because is not None


class Sigterm:
    """Hands SIGTERM on to the ranks, which may save first; Ctrl-C raises KeyboardInterrupt as ever.

    In another thread than the main one, which receives no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._job: _Job | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._hand_on)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def to(self, job: _Job) -> None:
        """From now on to this one's ranks; at once, if the signal has come meanwhile."""
        self._job = job
        if self.asked:
            job.ask_running()

    def _hand_on(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        if self._job is not None:
            self._job.ask_running()


def local_launches(command: Sequence[str], world: int, environment: Mapping[str, str]) -> list[Launch]:
    """`command` for each of `world` ranks of this machine, with the names that torchrun gives them.

    Args:
        command: of every rank.
        world: how many.
        environment: of each, beside its names and this process's own.
    """
    around = {**os.environ, **environment, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    if sys.platform == "linux":
        # On one machine the loopback device is there, whatever the host's name resolves to.
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
    stop_on_failure: bool = True,
    on_line: OnLine | None = None,
    sigterm: Sigterm | None = None,
) -> tuple[RankResult, ...]:
    """Start all of `launches`, wait until each has ended, and return their results in the same order.

    Args:
        launches: at least one.
        timeout_s: after which those that still run are ended.
        grace_s: between SIGTERM, or the first failure where ranks take SIGTERM otherwise, and SIGKILL.
        stop_on_failure: end the others when one fails, as torchrun does.
        on_line: sees each line as it comes.
        sigterm: the ranks are those of a run: they print to this process's own output, and take SIGTERM as requests.

    Raises:
        ConfigError: a program that it needs is not there.
    """
    if shutil.which("setpriv") is None:
        raise ConfigError("processes are started with setpriv (package util-linux): install it, or start torchrun")
    with selectors.DefaultSelector() as selector:
        job = _Job(selector, timeout_s, grace_s, stop_on_failure, on_line, sigterm)
        try:
            for launch in launches:
                job.start(launch)
            if sigterm is not None:
                sigterm.to(job)
            while job.running:
                job.turn()
        finally:
            job.kill_all()
        return tuple(rank.result() for rank in job.ranks)


def describe_failure(results: Sequence[RankResult]) -> str | None:
    """A line that names each failed rank, then the last lines of the one that failed first; None if none failed."""
    failed = [result for result in results if result.failed]
    if not failed:
        return None
    # Those that the lab ended because of another rank are not the cause.
    first = min(failed, key=lambda result: (result.ended_because is not None, result.wall_s))
    summary = "; ".join(f"rank {result.rank} {_end(result)}" for result in failed)
    output = (first.stderr.strip() or first.stdout.strip() or "(it printed nothing)").splitlines()
    shown = "\n".join(output[-_SHOWN_LINES:])
    return f"{len(failed)} of {len(results)} ranks failed: {summary}\nrank {first.rank}:\n{shown}"


def raise_failed(results: Sequence[RankResult]) -> None:
    """Raise if a rank failed.

    Raises:
        RanksFailedError: `describe_failure`.
    """
    if (failure := describe_failure(results)) is not None:
        raise RanksFailedError(failure)


@dataclass(slots=True)
class _Stream:
    """One pipe of a rank: what came, and the line that is still growing."""

    name: str
    pipe: IO[bytes]
    received: bytearray = field(default_factory=bytearray)
    shown_bytes: int = 0


@dataclass(slots=True)
class _Rank:
    """One rank while it runs. `process_fd` becomes readable when the process ends."""

    launch: Launch
    process: subprocess.Popen[bytes]
    process_fd: int
    streams: tuple[_Stream, ...]
    wall_s: float = 0.0
    returncode: int | None = None
    ended_because: str | None = None

    def signal(self, number: signal.Signals) -> None:
        # The leader is not reaped before its group has been signalled, so the group's number cannot be another's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def result(self) -> RankResult:
        printed = {stream.name: stream.received.decode("utf-8", errors="replace") for stream in self.streams}
        return RankResult(
            rank=self.launch.rank,
            returncode=-signal.SIGKILL if self.returncode is None else self.returncode,
            stdout=printed.get("stdout", ""),
            stderr=printed.get("stderr", ""),
            wall_s=self.wall_s,
            ended_because=self.ended_because,
        )


class _Job:
    """The ranks of one run: running; stopping, once one of them has to be ended; killed, after the grace period."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        timeout_s: float,
        grace_s: float,
        stop_on_failure: bool,
        on_line: OnLine | None,
        sigterm: Sigterm | None,
    ) -> None:
        self.ranks: list[_Rank] = []
        self.running: list[_Rank] = []
        self._selector = selector
        self._grace_s = grace_s
        self._stop_on_failure = stop_on_failure
        self._on_line = on_line
        self._asks = sigterm is not None
        self._start_s = time.monotonic()
        self._timeout_s = timeout_s
        self._deadline_s = self._start_s + timeout_s
        self._stopping = ""

    def start(self, launch: Launch) -> None:
        process = subprocess.Popen(
            ("setpriv", "--pdeathsig", "KILL", *launch.argv),
            env=dict(launch.env),
            cwd=launch.cwd,
            stdin=subprocess.DEVNULL,
            stdout=None if self._asks else subprocess.PIPE,
            stderr=None if self._asks else subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        pipes = {"stdout": process.stdout, "stderr": process.stderr}
        streams = tuple(_Stream(name, pipe) for name, pipe in pipes.items() if pipe is not None)
        rank = _Rank(launch, process, os.pidfd_open(process.pid), streams)
        self.ranks.append(rank)
        self.running.append(rank)
        self._selector.register(rank.process_fd, selectors.EVENT_READ, lambda: self._ended(rank))
        for stream in streams:
            os.set_blocking(stream.pipe.fileno(), False)
            self._selector.register(stream.pipe, selectors.EVENT_READ, self._reader(rank, stream))

    def turn(self) -> None:
        """Wait for the next event or deadline, and handle it."""
        left_s = max(0.0, self._deadline_s - time.monotonic())
        for key, _ in self._selector.select(min(left_s, _LONGEST_WAIT_S)):
            key.data()
        if self.running and time.monotonic() >= self._deadline_s:
            if self._stopping:
                self._end_running(signal.SIGKILL)
                self._deadline_s = float("inf")
            else:
                self._stop(f"it ran past the timeout of {self._timeout_s:g} s")

    def ask_running(self) -> None:
        """SIGTERM to each rank that runs, and not to what it has started: that is its own to end."""
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.process_fd, signal.SIGTERM)

    def kill_all(self) -> None:
        """End whatever still runs, whatever happened."""
        self._on_line = None  # it may be what raised
        self._end_running(signal.SIGKILL)
        for rank in list(self.running):
            self._ended(rank)

    def _reader(self, rank: _Rank, stream: _Stream) -> Callable[[], object]:
        return lambda: self._read(rank, stream)

    def _read(self, rank: _Rank, stream: _Stream) -> bool:
        if stream.pipe.closed:
            return False  # the rank's end, handled in the same turn, has taken the rest
        chunk = stream.pipe.read(_CHUNK_BYTES)
        if chunk:
            stream.received += chunk
            self._show_lines(rank, stream)
        elif chunk is not None:
            self._close(stream)
        return bool(chunk)

    def _show_lines(self, rank: _Rank, stream: _Stream, *, last: bool = False) -> None:
        if self._on_line is None:
            return
        while (end := stream.received.find(b"\n", stream.shown_bytes)) >= 0 or (
            last and stream.shown_bytes < len(stream.received)
        ):
            line = stream.received[stream.shown_bytes : end if end >= 0 else None]
            stream.shown_bytes += len(line) + 1
            self._on_line(rank.launch.rank, stream.name, line.decode("utf-8", errors="replace"))

    def _ended(self, rank: _Rank) -> None:
        self.running.remove(rank)
        rank.wall_s = time.monotonic() - self._start_s
        rank.signal(signal.SIGKILL)
        rank.returncode = rank.process.wait()
        self._selector.unregister(rank.process_fd)
        os.close(rank.process_fd)
        for stream in rank.streams:
            # Someone who left the group may hold the pipe open for ever: take what is there, wait for no more.
            while self._read(rank, stream):
                pass
            self._show_lines(rank, stream, last=True)
            self._close(stream)
        failed = rank.returncode not in ((0, EXIT_PREEMPTED) if self._asks else (0,))
        if failed and self._stop_on_failure and self.running and not self._stopping:
            self._stop(f"rank {rank.launch.rank} failed", killed=rank.returncode == -signal.SIGKILL)

    def _close(self, stream: _Stream) -> None:
        if not stream.pipe.closed:
            self._selector.unregister(stream.pipe)
            stream.pipe.close()

    def _stop(self, reason: str, *, killed: bool = False) -> None:
        # Of a rank that was killed from outside the others know no more than this process does.
        self._stopping = reason
        self._deadline_s = time.monotonic() + (0.0 if killed and self._asks else self._grace_s)
        if not self._asks:
            self._end_running(signal.SIGTERM)

    def _end_running(self, number: signal.Signals) -> None:
        for rank in self.running:
            rank.ended_because = rank.ended_because or self._stopping or "the caller has failed"
            rank.signal(number)


def _end(result: RankResult) -> str:
    if result.ended_because is not None:
        return f"was ended since {result.ended_because}"
    if result.returncode < 0:
        return f"died of {signal.Signals(-result.returncode).name}"
    return f"exited with {result.returncode}"
