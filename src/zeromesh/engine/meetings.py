"""One exchange of all ranks for a function that users call: [Note: Meetings] of `zeromesh.engine.reductions`."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from zeromesh.errors import CommunicationError, InternalError, MismatchError


@contextmanager
def meeting(
    call: str, progress: Progress, same: Callable[[str], bool], gather: Callable[[str], list[str]]
) -> Iterator[None]:
    """`Control.meeting` of several ranks, with its `same` and `gather`, for a call with its arguments."""
    try:
        progress.arrive(call[:200])
        found = [] if same(call) else gather(f"{call[:200]} ({_users_line()})")
        if not found:
            yield
    except InternalError:
        raise
    except RuntimeError as error:
        missing = "; ".join(progress.missing()) or "a rank that has ended since"
        raise CommunicationError(
            f"{call[:200]} ({_users_line()}) is one value of the whole tensor, so all {progress.size} ranks that have "
            f"a slice of it must call it together. Missing: {missing}. [{str(error).splitlines()[0]}]"
        ) from error
    if found:
        raise MismatchError(f"all ranks must call the same function of the same tensor together; {_by_call(found)}")


def _users_line() -> str:
    """The innermost line that is neither torch's nor ours: who has made the call."""
    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    own = (os.path.dirname(torch.__file__) + os.sep, ours, contextlib.__file__)
    line = next((line for line in reversed(traceback.extract_stack()) if not line.filename.startswith(own)), None)
    return "unknown line" if line is None else f"{line.filename}:{line.lineno}"


def _by_call(calls: Sequence[str]) -> str:
    """Calls, each with the ranks that make it."""
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(rank)
    shown = {call: ", ".join(map(str, own[:8])) + ", ..." * (len(own) > 8) for call, own in ranks.items()}
    return "; ".join(f"rank{'s' * (len(ranks[call]) > 1)} {own} called {call}" for call, own in shown.items())


WAIT_S = 5.0  # how long others get to come to an exchange that failed: this rank may hear of it before they are there
ANSWER_S = 5.0  # on top of that, for the store to answer; it dies with the process that holds it


@dataclass(kw_only=True)
class Progress:
    """Each rank writes to a store that all of them see which exchange it has come to; who has not come to this one is
    missing, which a collective that failed does not say."""

    key: str  # of these ranks, in the store; "" where that keeps nothing
    rank: int  # in the group
    size: int
    count: int = 0  # of the exchanges that this rank has come to, those of the group's users before among them
    store: Store = field(default_factory=dist.distributed_c10d._get_default_store)  # torch has no public way to it
    failure: str = ""  # why one failed; no later one can succeed, since the group is closed then

    def __post_init__(self) -> None:
        self._write("the start")

    def arrive(self, what: str) -> None:
        """This rank takes part in the next exchange."""
        self.count += 1
        self._write(what)

    def fail(self, reason: str) -> None:
        self.failure = reason

    def missing(self) -> list[str]:
        """The ranks that do not come to this exchange, with the last that they came to."""
        answers: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        # In a thread: a store that has gone may never answer.
        threading.Thread(target=lambda: answers.put(self._wait()), daemon=True).start()
        try:
            return answers.get(timeout=WAIT_S + ANSWER_S)
        except queue.Empty:
            return ["the process that holds the ranks' store, which does not answer"]

    def _wait(self) -> list[str]:
        end, missing = time.monotonic() + WAIT_S, list[str]()
        try:
            while (missing := self._look()) and time.monotonic() < end:
                time.sleep(0.05)
        except RuntimeError:  # its process has raised the same error and ended
            return missing or ["the process that holds the ranks' store, which has ended"]
        return missing

    def _look(self) -> list[str]:
        found = []
        for rank in range(self.size) if self.key else ():
            name = f"{self.key}/{rank}"
            seen = self.store.get(name).decode() if self.store.check([name]) else "-1 nothing"
            count, _, what = seen.partition(" ")
            if int(count) < self.count:
                found.append(f"rank {rank} (the last that it came to: {what})")
        return found

    def _write(self, what: str) -> None:
        if self.key:
            self.store.set(f"{self.key}/{self.rank}", f"{self.count} {what}")


@cache
def progress_of(key: str, rank: int, size: int) -> Progress:
    """That of one model: no two of a process have a key."""
    return Progress(key=key, rank=rank, size=size)
