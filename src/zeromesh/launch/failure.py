"""The report of a rank that ends badly, for the process that has started it. Torch-free."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, Self

from zeromesh.errors import CommunicationError, InputError, InternalError, NonFiniteError, ZeromeshError
from zeromesh.files.users import write_whole


def end_process(code: int) -> NoReturn:
    """Ends the process at once: after an error, threads of a process group whose peers are gone may never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rank's own report of how it failed."""

    rank: int
    at_s: float  # by the clock that all processes of a machine share
    lost_peer: bool  # whether it could not reach another rank, whose own failure is then the cause
    is_input: bool  # whether the user's input was wrong
    is_final: bool  # whether it would fail again: wrong input, or a run that is to stop
    message: str  # one line
    traceback: str  # empty if the message says it all

    @classmethod
    def now(cls, rank: int, error: BaseException, traceback: str) -> Self:
        expected = isinstance(error, ZeromeshError) and not isinstance(error, InternalError)
        return cls(
            rank=rank,
            at_s=time.monotonic(),
            lost_peer=is_communication(error),
            is_input=isinstance(error, InputError),
            is_final=isinstance(error, InputError | NonFiniteError),
            message=str(error) if expected else f"{type(error).__name__}: {error}",
            traceback="" if expected else traceback,
        )

    def write(self, directory: Path) -> None:
        """Writes it for `read_all`, or to standard error if the directory cannot be written."""
        try:
            write_whole(directory / f"failure-{self.rank}.json", json.dumps(asdict(self)))
        except OSError as error:
            lost = f"zeromesh: {directory} cannot be written: {error.strerror}"
            print(f"{self.traceback}zeromesh: rank {self.rank} failed: {self.message}\n{lost}", file=sys.stderr)

    @classmethod
    def read_all(cls, directory: Path) -> list[Self]:
        """Every failure in a directory: the cause first, then by time, and last those of ranks that lost a peer."""
        found = [cls(**json.loads(path.read_text())) for path in directory.glob("failure-*.json")]
        return sorted(found, key=lambda failure: (failure.lost_peer, failure.at_s))


def report(failures: Sequence[Failure], world: int) -> str:
    """Each different message once, in the order of failures, with its ranks unless all had the same wrong input."""
    by_message: dict[str, list[Failure]] = {}
    for failure in failures:
        by_message.setdefault(failure.message, []).append(failure)
    lines = []
    for message, own in by_message.items():
        ranks = ", ".join(str(rank) for rank in sorted(failure.rank for failure in own))
        who = "" if own[0].is_input and len(own) == world else f"rank{'s' * (len(own) > 1)} {ranks} failed: "
        trace = f"{own[0].traceback.rstrip()}\n" if own[0].traceback else ""
        lines.append(f"{trace}zeromesh: {who}{message}")
    return "\n".join(lines)


def is_communication(error: BaseException) -> bool:
    """Whether `error`, one of ours or of torch's, says that other ranks could not be reached."""
    if isinstance(error, ZeromeshError):
        return isinstance(error, CommunicationError)
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "Connection closed by peer" in text)
