"""A folder in which a process tells the ranks that it starts what is to be done, and they what came of it.

Local ranks meet there, in a file, so no port is guessed; gloo binds its own. Torch-free.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromesh.errors import ConfigError
from zeromesh.launch.failure import Failure

JOB, RESULT, RENDEZVOUS = "job.json", "result.json", "rendezvous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One task of all ranks.

    Args:
        directory: theirs and this process's.
    """

    directory: Path

    @property
    def command(self) -> tuple[str, ...]:
        """Of every rank."""
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
    with make_folder() as directory:
        try:
            job = {"task": task, "options": dict(options), "local": local, "prints": prints}
            (directory / JOB).write_text(json.dumps(job))
        except OSError as error:
            raise _cannot_write(error) from error
        yield Job(directory=directory)


@contextmanager
def make_folder() -> Iterator[Path]:
    """A temporary directory, gone at the end; raises ConfigError where it cannot be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="zeromesh-", ignore_cleanup_errors=True)
    except OSError as error:
        raise _cannot_write(error) from error
    with folder as name:
        yield Path(name)


def _cannot_write(error: OSError) -> ConfigError:
    return ConfigError(
        f"processes are started by way of a temporary directory, which cannot be written: {error.strerror}"
        f"{f': {error.filename}' if error.filename else ''}; set TMPDIR to a directory with room"
    )
