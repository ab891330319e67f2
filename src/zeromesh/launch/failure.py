"""What a rank that ends badly leaves for the one that has started it. Torch-free."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, Self

from zeromesh.errors import InputError, InternalError, NonFiniteError, ZeromeshError
from zeromesh.files import write_whole


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
        """Every failure in a directory, earliest first."""
        found = [cls(**json.loads(path.read_text())) for path in directory.glob("failure-*.json")]
        return sorted(found, key=lambda failure: failure.at_s)
