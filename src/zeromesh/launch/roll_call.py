"""Names the ranks that are missing, once something has gone wrong.

The rank that a collective waits for may be waiting in vain itself. So a rank that gives up calls all ranks, in the
store where they met. On each rank a thread looks for the call once a second, and answers where the main thread is. A
rank that does not answer, or is not in a collective, is missing. A rank that has left an error is the cause.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Self

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from zeromesh.errors import CommunicationError
from zeromesh.launch.failure import is_communication

POLL_S, WAIT_S = 1.0, 3.0
_STORE_S = 2.0  # the store's time to answer: it dies with the rank that holds it, unless a launcher holds it

_CALLED = "called"
_LIBRARY = sysconfig.get_path("stdlib")
_OWN = map(Path(__file__).parents[1].joinpath, ("comm", "engine", "checkpoint"))
_WAITING = tuple(str(path) for path in (*_OWN, Path(dist.__file__).parent))
"""Folders of the code in which a main thread waits for other ranks."""

Answer = tuple[str, str]
"""A rank's state ("waits" in a collective, "busy" elsewhere, or "failed"), and its place or error."""


class RollCall:
    """While open, looks for other ranks' calls every `poll_s` seconds and answers. Its own calls wait `wait_s`."""

    def __init__(self, store: Store, rank: int, world: int, *, wait_s: float = WAIT_S, poll_s: float = POLL_S) -> None:
        self._store = PrefixStore("zeromesh/roll-call", store)
        self._rank, self._world, self._wait_s, self._poll_s = rank, world, wait_s, poll_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._respond, name="zeromesh-roll-call", daemon=True)

    def __enter__(self) -> Self:
        if self._world > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread.is_alive():  # back from the store after the interpreter is gone, it would abort the process
            self._thread.join(_STORE_S)

    def explain(self, error: Exception) -> Exception:
        """Tells the other ranks of `error`. Returns the error to raise, which names missing or failed ranks."""
        if self._world == 1:
            return error
        self._closed.set()
        waited = is_communication(error)
        answers: dict[int, Answer] = {}
        done = threading.Event()

        def call() -> None:
            try:
                self._say(("waits", "") if waited else ("failed", f"{type(error).__name__}: {error}"))
                if waited:
                    self._store.set(_CALLED, "")
                    answers.update(self._answers())
            except RuntimeError:
                return
            done.set()

        # In a thread, since a store that is gone may never answer.
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(self._wait_s * waited + _STORE_S)
        return CommunicationError(f"{error} {self._verdict(answers if done.is_set() else None)}") if waited else error

    def _respond(self) -> None:
        try:
            while not self._closed.wait(self._poll_s):
                if self._store.check([_CALLED]):
                    self._say(whereabouts())
                    return
        except RuntimeError:
            return  # the store is gone: nobody can call

    def _say(self, answer: Answer) -> None:
        self._store.set(str(self._rank), json.dumps(answer))

    def _answers(self) -> dict[int, Answer]:
        """The ranks' answers, once all have given one or after the wait. A store's own wait overshoots by seconds."""
        keys, end, pause_s = [str(rank) for rank in range(self._world)], time.monotonic() + self._wait_s, 0.01
        while not self._store.check(keys) and time.monotonic() < end:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)
        there = [key for key in keys if self._store.check([key])]
        return {int(key): tuple(json.loads(self._store.get(key))) for key in there}

    def _verdict(self, answers: dict[int, Answer] | None) -> str:
        if answers is None:
            return "Nobody could be asked who is missing: the process that holds the ranks' store does not answer."
        said = sorted(answers.items())
        failed = [f"rank {rank} failed with {text}" for rank, (state, text) in said if state == "failed"]
        if failed:
            return f"The cause: {'; '.join(failed)}."
        missing = [f"rank {rank}, which is alive, {text}" for rank, (state, text) in said if state == "busy"]
        silent = [str(rank) for rank in range(self._world) if rank not in answers]
        if silent:
            who = f"rank{'s' * (len(silent) > 1)} {', '.join(silent)}"
            why = f"did not answer within {self._wait_s:g} s: dead, stopped or unreachable"
            missing.insert(0, f"{who}, which {why}")
        if missing:
            return f"Missing: {'; '.join(missing)}."
        return "No rank is missing, all wait: the network, or one that issued another collective, is the cause."


def whereabouts() -> Answer:
    """The state and place of this process's main thread: its innermost call outside of Python's own library."""
    identifier = threading.main_thread().ident
    frame: FrameType | None = sys._current_frames().get(identifier) if identifier is not None else None
    while frame is not None and _of_python(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "busy", "outside of Python"
    file = frame.f_code.co_filename
    return ("waits" if file.startswith(_WAITING) else "busy"), f"in {frame.f_code.co_name} ({file}:{frame.f_lineno})"


def _of_python(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_LIBRARY) and "site-packages" not in file)
