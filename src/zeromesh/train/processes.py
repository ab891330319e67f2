"""Local processes of a run: started together, ended together, and the first failure among them is what is reported."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from zeromesh.errors import InputError, InternalError, NonFiniteError, ZeromeshError

EXIT_INPUT = 2
EXIT_PREEMPTED = 75
GRACE_S = 10.0
"""What the other ranks get to end by themselves once one has: to report their own error, or to finish saving."""


def end_process(code: int) -> NoReturn:
    """Not by an ordinary exit: after an error, threads of a process group whose peers are gone may never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a rank ended, as it wrote it down: the first one is the cause, what follows are its consequences.

    Args:
        rank: whose.
        at_s: of the clock that all processes of a machine share.
        is_input: whether the user's input was wrong.
        is_final: whether it would come again: input that is wrong, a run that is to stop.
        message: one line, without a traceback.
        traceback: where it happened; empty for what the message says all about.
    """

    rank: int
    at_s: float
    is_input: bool
    is_final: bool
    message: str
    traceback: str

    @classmethod
    def now(cls, rank: int, error: BaseException, traceback: str) -> Self:
        expected = isinstance(error, ZeromeshError) and not isinstance(error, InternalError)
        return cls(
            rank=rank,
            at_s=time.monotonic(),
            is_input=isinstance(error, InputError),
            is_final=isinstance(error, InputError | NonFiniteError),
            message=str(error) if expected else f"{type(error).__name__}: {error}",
            traceback="" if expected else traceback,
        )

    def write(self, directory: Path) -> None:
        (directory / f"failure-{self.rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read_all(cls, directory: Path) -> list[Self]:
        """Every failure in a directory, earliest first."""
        found = [cls(**json.loads(path.read_text())) for path in directory.glob("failure-*.json")]
        return sorted(found, key=lambda failure: failure.at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run of local processes ended.

    Args:
        code: the exit code.
        reason: for a person, where the code is 1.
        again: whether another start may go better.
    """

    code: int
    reason: str = ""
    again: bool = False


def verdict(
    codes: dict[int, int], failures: Sequence[Failure], ended_by_us: set[int], *, preempted: bool = False
) -> Ending:
    """How the run ended, and why.

    Args:
        codes: of each rank's process, negative for the signal that ended it.
        failures: earliest first.
        ended_by_us: ranks that only ended because others had.
        preempted: whether the ranks were told to save and end, and can save.

    Raises:
        InputError: the first failure was one.
    """
    killed = [(rank, -code) for rank, code in codes.items() if code < 0 and rank not in ended_by_us]
    if killed:
        if preempted and all(number == signal.SIGTERM for _, number in killed):
            return Ending(code=EXIT_PREEMPTED)  # before it had begun to listen, and so before its first step
        return Ending(code=1, reason=_killed(*min(killed)), again=True)
    if failures:
        first = failures[0]
        if first.is_input:
            raise InputError(first.message)
        trace = f"{first.traceback.rstrip()}\n" if first.traceback else ""
        reason = f"{trace}zeromesh: rank {first.rank} failed: {first.message}"
        return Ending(code=1, reason=reason, again=not first.is_final)
    ended = set(codes.values())
    if ended - {0, EXIT_PREEMPTED}:
        return Ending(code=1, reason=f"zeromesh: ranks ended with {codes} and left no reason", again=True)
    return Ending(code=max(ended))


def _killed(rank: int, number: int) -> str:
    hints = {
        signal.SIGKILL: "; the machine may be out of memory",
        signal.SIGTERM: "; nothing was saved",
    }
    name = signal.Signals(number)
    return f"zeromesh: rank {rank} was ended by {name.name}{hints.get(name, '')}"


class LocalProcesses:
    """The ranks of a run on this machine; leaving the context ends those that still run.

    Args:
        command: of every rank; its environment names the rank as torchrun's does.
        world: number of ranks.
        grace_s: what the others get once one has ended with another code than 0.
        environment: of each, beside its rank.
    """

    def __init__(
        self,
        command: Sequence[str],
        world: int,
        *,
        grace_s: float = GRACE_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.ended_by_us: set[int] = set()
        self._grace_s = grace_s
        self._ended: queue.Queue[tuple[int, int]] = queue.Queue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(world):
            own = {**os.environ, **_environment(rank, world), **(environment or {})}
            # Nobody writes to the pipe: its end tells a rank that this process is gone.
            self._processes[rank] = subprocess.Popen(command, env=own, stdin=subprocess.PIPE)
            threading.Thread(target=self._await_end, args=(rank,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def signal(self, number: int) -> None:
        """Send a signal to the ranks that still run."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> dict[int, int]:
        """Exit codes by rank, once all have ended. After the first that is not 0 the others have `grace_s`."""
        codes: dict[int, int] = {}
        deadline: float | None = None
        while len(codes) < len(self._processes):
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                rank, code = self._ended.get(timeout=left)
            except queue.Empty:
                self._end()
                deadline = None
                continue
            codes[rank] = code
            failed = code not in (0, EXIT_PREEMPTED)  # a preempted run ends when all have saved
            if failed and deadline is None and not self.ended_by_us:
                # Of a rank that was killed from outside the others know no more than this process does.
                deadline = time.monotonic() + self._grace_s * (code != -signal.SIGKILL)
        return codes

    def _await_end(self, rank: int) -> None:
        self._ended.put((rank, self._processes[rank].wait()))

    def _end(self) -> None:
        running = {rank: process for rank, process in self._processes.items() if process.poll() is None}
        self.ended_by_us |= set(running)
        for process in running.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
            if process.stdin:
                process.stdin.close()


def _environment(rank: int, world: int) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    environment = {name: str(value) for name, value in names.items()}
    if sys.platform == "linux":
        # On one machine the loopback device is there, whatever the host's name resolves to.
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return environment


class Forwarder:
    """Hands SIGTERM on to the ranks, which may save first; Ctrl-C raises KeyboardInterrupt as ever.

    In another thread than the main one, which receives no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._processes: LocalProcesses | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def to(self, processes: LocalProcesses) -> None:
        """From now on to these; at once, if the signal has come meanwhile."""
        self._processes = processes
        if self.asked:
            processes.signal(signal.SIGTERM)

    def _forward(self, number: int, _: FrameType | None) -> None:
        self.asked = True
        if self._processes is not None:
            self._processes.signal(number)
