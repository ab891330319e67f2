"""What a rank that ends badly leaves for the one that has started it. Torch-free."""

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
from zeromesh.files import write_whole


def end_process(code: int) -> NoReturn:
    """Not by an ordinary exit: after an error, threads of a process group whose peers are gone may never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a rank ended, as it wrote it down.

    Args:
        rank: whose.
        at_s: of the clock that all processes of a machine share.
        lost_peer: whether the rank could not reach another one, whose own failure is then the cause.
        is_input: whether the user's input was wrong.
        is_final: whether it would come again: input that is wrong, a run that is to stop.
        message: one line, without a traceback.
        traceback: where it happened; empty for what the message says all about.
    """

    rank: int
    at_s: float
    lost_peer: bool
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
            lost_peer=is_communication(error),
            is_input=isinstance(error, InputError),
            is_final=isinstance(error, InputError | NonFiniteError),
            message=str(error) if expected else f"{type(error).__name__}: {error}",
            traceback="" if expected else traceback,
        )

    def write(self, directory: Path) -> None:
        """For `read_all`; where that cannot be done, to standard error."""
        try:
            write_whole(directory / f"failure-{self.rank}.json", json.dumps(asdict(self)))
        except OSError as error:
            print(
                f"{self.traceback}zeromesh: rank {self.rank} failed: {self.message}\nzeromesh: {directory} cannot be "
                f"written: {error.strerror}",
                file=sys.stderr,
            )

    @classmethod
    def read_all(cls, directory: Path) -> list[Self]:
        """Every failure in a directory: the cause first, then by time, and last those of ranks that lost a peer."""
        found = [cls(**json.loads(path.read_text())) for path in directory.glob("failure-*.json")]
        return sorted(found, key=lambda failure: (failure.lost_peer, failure.at_s))


def report(failures: Sequence[Failure], world: int) -> str:
    """Each different message once, with the ranks that have it; wrong input of all ranks without them.

    Args:
        failures: in the order in which they are shown.
        world: how many ranks there are.
    """
    by_message: dict[str, list[Failure]] = {}
    for failure in failures:
        by_message.setdefault(failure.message, []).append(failure)
    lines = []
    for message, own in by_message.items():
        ranks = ", ".join(str(rank) for rank in sorted(failure.rank for failure in own))
        who = f"rank{'s' * (len(own) > 1)} {ranks} failed: "
        trace = f"{own[0].traceback.rstrip()}\n" if own[0].traceback else ""
        lines.append(f"{trace}zeromesh: {'' if own[0].is_input and len(own) == world else who}{message}")
    return "\n".join(lines)


def is_communication(error: BaseException) -> bool:
    """Whether `error` says that others could not be reached: ours, and what torch raises for it."""
    if isinstance(error, ZeromeshError):
        return isinstance(error, CommunicationError)
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "Connection closed by peer" in text)
