"""Where every rank is, in a store that all of them see: a collective that failed does not say who was missing."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

WAIT_S = 5.0
"""How long the others get to come to an exchange that has failed: this rank may hear of that before they are there."""

ANSWER_S = 5.0
"""What the store gets to answer on top of that; it dies with the process that holds it."""


@dataclass(kw_only=True)
class Progress:
    """Each rank writes down which exchange it has come to; who has not come to this one is missing.

    Args:
        store: torch's.
        key: of these ranks, in the store.
        rank, size: in the group.
        count: of the exchanges that this rank has come to, those of the group's users before among them.
        failure: why one failed; no later one can succeed, since the group is closed then.
    """

    store: Store
    key: str
    rank: int
    size: int
    count: int = 0
    failure: str = ""

    def __post_init__(self) -> None:
        self._write("the start")

    def arrive(self, what: str) -> None:
        """This rank takes part in the next exchange."""
        self.count += 1
        self._write(what)

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
        for rank in range(self.size):
            name = f"{self.key}/{rank}"
            seen = self.store.get(name).decode() if self.store.check([name]) else "-1 nothing"
            count, _, what = seen.partition(" ")
            if int(count) < self.count:
                found.append(f"rank {rank} (the last that it came to: {what})")
        return found

    def _write(self, what: str) -> None:
        self.store.set(f"{self.key}/{self.rank}", f"{self.count} {what}")
