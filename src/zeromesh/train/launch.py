"""Starts a run: as one of torchrun's processes, alone, or as the parent of local processes.

Local processes meet in a file, so no port is guessed; gloo binds its own. Each is a fresh interpreter, and ends when
its parent does: it reads from a pipe that nobody writes to, and the end of that pipe is the parent's end.

Exit codes: 0 done; 2 wrong input; 75 preempted and saved; 1 anything else.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from zeromesh.errors import InputError
from zeromesh.train.config import TrainConfig, load_config

EXIT_INPUT = 2
EXIT_PREEMPTED = 75
GRACE_S = 10.0
"""What the other ranks get to end by themselves once one has: to report their own error, or to finish saving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a rank ended, as it wrote it down: the first one is the cause, what follows are its consequences.

    Args:
        rank: whose.
        at_s: of the clock that all processes of a machine share.
        is_input: whether the user's input was wrong.
        message: one line, without a traceback.
        traceback: where it happened.
    """

    rank: int
    at_s: float
    is_input: bool
    message: str
    traceback: str

    @classmethod
    def now(cls, rank: int, error: BaseException, traceback: str) -> Self:
        is_input = isinstance(error, InputError)
        message = str(error) if is_input else f"{type(error).__name__}: {error}"
        return cls(rank=rank, at_s=time.monotonic(), is_input=is_input, message=message, traceback=traceback)

    def write(self, directory: Path) -> None:
        (directory / f"failure-{self.rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read_all(cls, directory: Path) -> list[Self]:
        """Every failure in a directory, earliest first."""
        found = [cls(**json.loads(path.read_text())) for path in directory.glob("failure-*.json")]
        return sorted(found, key=lambda failure: failure.at_s)


def train(config_path: Path, overrides: Sequence[str] = ()) -> int:
    """Run what a configuration describes; returns the exit code.

    Raises:
        InputError: the configuration is wrong; raised before any process starts where that can be known.
    """
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    try:
        config = load_config(config_path, overrides)
        if under_torchrun:
            config.check_world(int(os.environ["WORLD_SIZE"]))
    except InputError:
        if under_torchrun and os.environ["RANK"] != "0":
            return EXIT_INPUT  # all ranks read the same file: rank 0 says it once
        raise
    if under_torchrun or config.world == 1:
        return _run_here(config, under_torchrun=under_torchrun)
    return _run_local(config)


def _run_here(config: TrainConfig, *, under_torchrun: bool) -> int:
    from zeromesh.train.loop import run_training
    from zeromesh.train.ranks import join_ranks

    with tempfile.TemporaryDirectory(prefix="zeromesh-") as directory:
        store_file = None if under_torchrun else Path(directory) / "rendezvous"
        with join_ranks(config.run, config.mesh, store_file) as ranks:
            finished = run_training(config, ranks)
    return 0 if finished else EXIT_PREEMPTED


def _run_local(config: TrainConfig) -> int:
    with tempfile.TemporaryDirectory(prefix="zeromesh-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(config.model_dump_json())
        with _LocalProcesses(config, directory) as processes, _forward_signals(processes):
            codes = processes.wait()
        return _verdict(codes, Failure.read_all(directory), processes.ended_by_us)


def _verdict(codes: dict[int, int], failures: list[Failure], ended_by_us: set[int]) -> int:
    """The run's exit code, after saying why on stderr where it is not 0."""
    killed = [(rank, -code) for rank, code in codes.items() if code < 0 and rank not in ended_by_us]
    if not any(codes.values()):
        return 0
    if killed:
        rank, number = min(killed)
        hints = {
            signal.SIGKILL: "; the machine may be out of memory",
            signal.SIGTERM: "; nothing was saved, since checkpoint.every is 0",
        }
        name, hint = signal.Signals(number).name, hints.get(signal.Signals(number), "")
        print(f"zeromesh: rank {rank} was ended by {name}{hint}", file=sys.stderr)
        return 1
    if failures:
        first = failures[0]
        if first.is_input:
            raise InputError(first.message)
        print(f"{first.traceback.rstrip()}\nzeromesh: rank {first.rank} failed: {first.message}", file=sys.stderr)
        return 1
    return EXIT_PREEMPTED if set(codes.values()) <= {0, EXIT_PREEMPTED} else 1


class _LocalProcesses:
    """The ranks of a run on this machine; leaving the context ends those that still run."""

    def __init__(self, config: TrainConfig, directory: Path) -> None:
        self.ended_by_us: set[int] = set()
        self._ended: queue.Queue[tuple[int, int]] = queue.Queue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        command = [sys.executable, "-m", "zeromesh.train.worker", str(directory)]
        for rank in range(config.world):
            environment = os.environ | _environment(rank, config.world)
            self._processes[rank] = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
            threading.Thread(target=self._await_end, args=(rank,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def signal(self, number: int) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> dict[int, int]:
        """Exit codes by rank, once all have ended. After the first that is not 0 the others have `GRACE_S`."""
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
            if code != 0 and deadline is None and not self.ended_by_us:
                deadline = time.monotonic() + GRACE_S
        return codes

    def _await_end(self, rank: int) -> None:
        self._ended.put((rank, self._processes[rank].wait()))

    def _end(self) -> None:
        running = {rank: process for rank, process in self._processes.items() if process.poll() is None}
        self.ended_by_us |= set(running)
        for process in running.values():
            process.kill()
        for process in running.values():
            process.wait()


def _environment(rank: int, world: int) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    # On one machine the loopback device is there whatever the host's name resolves to.
    interface = (
        {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ else {}
    )
    return {name: str(value) for name, value in names.items()} | interface


@contextmanager
def _forward_signals(processes: _LocalProcesses) -> Iterator[None]:
    """SIGTERM goes to the ranks, which may save first. Ctrl-C raises KeyboardInterrupt here, and leaving ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, _: FrameType | None) -> None:
        processes.signal(number)

    before: Any = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
