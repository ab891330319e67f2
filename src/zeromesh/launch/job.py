"""Runs a task as ranks of this machine, and says how they ended. Torch-free.

Ranks are told what to do in a folder, and leave there what came of it. They also meet there, in a file, so no port is
guessed; gloo binds its own.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromesh.errors import ConfigError, InputError
from zeromesh.integrations.elastic import EXIT_PREEMPTED
from zeromesh.launch.failure import Failure, report
from zeromesh.launch.processes import RankResult, Sigterm, local_launches, run_ranks

JOB, RESULT, RENDEZVOUS = "job.json", "result.json", "rendezvous"

GRACE_S = 10.0
"""What the other ranks get to end by themselves once one has: to report their own error, or to finish saving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One task of all ranks, and their directory."""

    directory: Path

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "zeromesh.launch.worker", str(self.directory))

    def failures(self) -> list[Failure]:
        """What ranks that failed have left, the cause first."""
        return Failure.read_all(self.directory)

    def result(self) -> Any:
        """What the task has returned on rank 0."""
        return json.loads((self.directory / RESULT).read_text())


@contextmanager
def make_job(task: str, options: Mapping[str, Any], *, local: bool = True, prints: bool = True) -> Iterator[Job]:
    """The folder of a task, for as long as its ranks run.

    Args:
        task: "module:function", named as text since fresh processes must find it. Each rank calls it with the file
            where local ranks meet, or None, and the options; what it returns, JSON can hold.
        options: keyword arguments, which JSON can hold.
        local: whether the ranks meet in a file; else at the address that their environment says.
        prints: whether a rank that fails prints where it happened.

    Raises:
        ConfigError: the folder cannot be made.
    """
    job = {"task": task, "options": dict(options), "local": local, "prints": prints}
    with make_folder(json.dumps(job)) as directory:
        yield Job(directory=directory)


@contextmanager
def make_folder(job: str = "") -> Iterator[Path]:
    """A temporary directory with what is to be done, gone at the end; raises ConfigError if it cannot be made."""
    with ExitStack() as stack:
        try:
            folder = tempfile.TemporaryDirectory(prefix="zeromesh-", ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(folder))
            (directory / JOB).write_text(job)
        except OSError as error:
            raise ConfigError(
                f"processes are started by way of a temporary directory, which cannot be written: {error.strerror}"
                f"{f': {error.filename}' if error.filename else ''}; set TMPDIR to a directory with room"
            ) from error
        yield directory


# ---- a run that may be started again


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run of local processes ended: exit code, a reason for people if it is 1, and whether another start may go
    better."""

    code: int
    reason: str = ""
    again: bool = False


def run_restarted(task: str, options: Mapping[str, Any], world: int, *, restarts: int, saves: bool) -> int:
    """Runs a task as local processes, again after a failure that another start may mend; the exit code.

    Args:
        task, options: as `make_job` takes them.
        world: how many processes.
        restarts: starts after the first, at most.
        saves: whether the task saves and ends with `EXIT_PREEMPTED` when SIGTERM asks for it.

    Raises:
        InputError: the task says that its input is wrong.
    """
    with Sigterm() as sigterm:
        for number in range(restarts + 1):
            with make_job(task, options, prints=False) as job:
                counted = {"TORCHELASTIC_RESTART_COUNT": str(number)}
                results = run_ranks(local_launches(job.command, world, counted), grace_s=GRACE_S, sigterm=sigterm)
                ending = verdict(results, job.failures(), preempted=sigterm.asked and saves)
            if ending.reason:
                print(ending.reason, file=sys.stderr, flush=True)
            if not ending.again or number == restarts or sigterm.asked:
                break
            print(f"zeromesh: restart {number + 1} of {restarts}", file=sys.stderr, flush=True)
    return ending.code


def verdict(results: Sequence[RankResult], failures: Sequence[Failure], *, preempted: bool = False) -> Ending:
    """How the run ended, and why: the first failure is reported.

    Args:
        results: of each rank's process.
        failures: the cause first.
        preempted: whether the ranks were told to save and end, and can save.

    Raises:
        InputError: the first failure was one.
    """
    by_themselves = [result for result in results if result.ended_because is None]
    killed = [(result.rank, -result.returncode) for result in by_themselves if result.returncode < 0]
    if killed:
        if preempted and all(number == signal.SIGTERM for _, number in killed):
            return Ending(code=EXIT_PREEMPTED)  # before it had begun to listen, and so before its first step
        rank, number = min(killed)
        hints = {signal.SIGKILL: "; the machine may be out of memory", signal.SIGTERM: "; nothing was saved"}
        name = signal.Signals(number)
        reason = f"zeromesh: rank {rank} was ended by {name.name}{hints.get(name, '')}"
        return Ending(code=1, reason=reason, again=True)
    if failures:
        reason = report(failures, len(results))
        if failures[0].is_input:
            raise InputError(reason.removeprefix("zeromesh: "))
        return Ending(code=1, reason=reason, again=not failures[0].is_final)
    codes = {result.rank: result.returncode for result in results}
    if set(codes.values()) - {0, EXIT_PREEMPTED}:
        return Ending(code=1, reason=f"zeromesh: ranks ended with {codes} and left no reason", again=True)
    return Ending(code=max(codes.values()))
