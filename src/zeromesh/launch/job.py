"""A folder with a task for ranks, in which they leave results and failures. Torch-free.

Local ranks also meet there, in a file, so no port is guessed; gloo binds its own. A rank is
`python -m zeromesh.launch.job DIRECTORY`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromesh.errors import ConfigError
from zeromesh.files.users import write_whole
from zeromesh.launch.failure import Failure, end_process

JOB, RESULT, RENDEZVOUS = "job.json", "result.json", "rendezvous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One task of all ranks, and their directory."""

    directory: Path

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "zeromesh.launch.job", str(self.directory))

    def failures(self) -> list[Failure]:
        """Failures that ranks reported, the cause first."""
        return Failure.read_all(self.directory)

    def result(self) -> Any:
        """The task's result on rank 0."""
        return json.loads((self.directory / RESULT).read_text())


@contextmanager
def make_job(task: str, options: Mapping[str, Any], *, local: bool = True, prints: bool = True) -> Iterator[Job]:
    """The folder of a task, for as long as its ranks run.

    Args:
        task: "module:function". Each rank calls it with the file where local ranks meet, or None, and the options. It
            returns something that JSON can hold.
        options: keyword arguments that JSON can hold.
        local: whether the ranks meet in a file; else at the address in their environment.
        prints: whether a rank that fails prints its traceback.
    """
    job = {"task": task, "options": dict(options), "local": local, "prints": prints}
    with make_folder(json.dumps(job)) as directory:
        yield Job(directory=directory)


@contextmanager
def make_folder(job: str = "") -> Iterator[Path]:
    """A temporary directory with the text of a job, removed at the end; raises ConfigError if it cannot be made."""
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


def main(directory: Path) -> int:
    """Runs this rank's part; rank 0 leaves the result in the directory, a rank that fails its reason."""
    rank = int(os.environ["RANK"])
    job = json.loads((directory / JOB).read_text())
    try:
        result = find_task(job["task"])(directory / RENDEZVOUS if job["local"] else None, **job["options"])
        if rank == 0:
            write_whole(directory / RESULT, json.dumps(result))
    except Exception as error:
        failure = Failure.now(rank, error, traceback.format_exc())
        if job["prints"]:
            print(failure.traceback or failure.message, file=sys.stderr)
        failure.write(directory)
        return 1
    return 0


def find_task(task: str) -> Any:
    """The function that "module:function" names."""
    module, _, function = task.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    if code := main(Path(sys.argv[1])):
        end_process(code)
