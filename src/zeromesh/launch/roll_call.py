"""Who is still there, once something has gone wrong.

A rank that waits in vain in a collective knows whom it waits for, and that one may be waiting in vain itself: in a mesh
the first rank to give up rarely waits for the one that stalled. So it calls all ranks, in the store where they met. On
each a thread looks for the call once a second, and answers where the main thread is, even while that one waits in a
collective. Who does not answer is missing; who answers from elsewhere than a collective is; who has left an error of
its own is the cause.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, Self

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from zeromesh.errors import CommunicationError
from zeromesh.launch.failure import is_communication

POLL_S = 1.0
WAIT_S = 3.0
"""What the others get to answer: some polls."""

_STORE_S = 2.0
"""What the store gets to answer; it dies with the rank that holds it, where no launcher holds it."""

_CALLED = "called"
_LIBRARY = sysconfig.get_path("stdlib")
_PACKAGE = Path(__file__).parents[1]
_WAITING = tuple(
    str(path) for path in (*map(_PACKAGE.joinpath, ("comm", "engine", "checkpoint")), Path(dist.__file__).parent)
)
"""Where a main thread is that waits for other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one rank says.

    Args:
        state: `waits` in a collective or has given up waiting, is `busy` with something else, or has `failed`.
        text: where it is; its error.
    """

    state: Literal["waits", "busy", "failed"]
    text: str


class RollCall:
    """Answers the other ranks' calls while it is open, and calls them.

    Args:
        store: where the ranks met, of this start alone.
        rank, world: this rank, and how many there are.
        wait_s: what the others get to answer.
        poll_s: how often a rank looks whether it is called.
    """

    def __init__(self, store: Store, rank: int, world: int, *, wait_s: float = WAIT_S, poll_s: float = POLL_S) -> None:
        self._store = PrefixStore("zeromesh/roll-call", store)
        self._rank = rank
        self._world = world
        self._wait_s = wait_s
        self._poll_s = poll_s
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        if self._world > 1:
            threading.Thread(target=self._respond, name="zeromesh-roll-call", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def explain(self, error: Exception) -> Exception:
        """Tells the others of `error`; what to raise for it, which names the ranks that are missing or have failed."""
        if self._world == 1:
            return error
        waited = is_communication(error)
        self._closed.set()
        own = (
            Answer(state="waits", text="")
            if waited
            else Answer(state="failed", text=f"{type(error).__name__}: {error}")
        )
        answers = self._call(own, wait=waited)
        return CommunicationError(f"{error} {_verdict(answers, self._world, self._wait_s)}") if waited else error

    def _respond(self) -> None:
        try:
            while not self._closed.wait(self._poll_s):
                if self._store.check([_CALLED]):
                    self._store.set(str(self._rank), json.dumps(asdict(whereabouts())))
                    return
        except RuntimeError:
            return  # the store is gone: nobody can call

    def _call(self, own: Answer, *, wait: bool) -> dict[int, Answer] | None:
        """What each rank says, by rank; None where the store does not answer."""
        answers: dict[int, Answer] = {}
        done = threading.Event()

        def call() -> None:
            try:
                self._store.set(str(self._rank), json.dumps(asdict(own)))
                if wait:
                    self._store.set(_CALLED, "")
                    missing = _wait_for_keys(self._store, [str(rank) for rank in range(self._world)], self._wait_s)
                    for rank in set(range(self._world)) - set(map(int, missing)):
                        answers[rank] = Answer(**json.loads(self._store.get(str(rank))))
            except RuntimeError:
                return
            done.set()

        # A store that is gone may never answer.
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(self._wait_s * wait + _STORE_S)
        return dict(answers) if done.is_set() else None


def _verdict(answers: dict[int, Answer] | None, world: int, wait_s: float) -> str:
    if answers is None:
        return "Nobody could be asked who is missing: the process that holds the ranks' store does not answer."
    failed = [f"rank {rank} failed with {a.text}" for rank, a in sorted(answers.items()) if a.state == "failed"]
    if failed:
        return f"The cause: {'; '.join(failed)}."
    silent = [str(rank) for rank in range(world) if rank not in answers]
    busy = [f"rank {rank}, which is alive, {a.text}" for rank, a in sorted(answers.items()) if a.state == "busy"]
    if silent:
        busy.insert(
            0,
            f"rank{'s' * (len(silent) > 1)} {', '.join(silent)}, which did not answer within {wait_s:g} s: dead, "
            f"stopped or unreachable",
        )
    if busy:
        return f"Missing: {'; '.join(busy)}."
    return (
        "No rank is missing, all wait: the network between them, or one that issued another collective, is the cause."
    )


def whereabouts() -> Answer:
    """Where this process's main thread is: the innermost call outside of Python's own library."""
    identifier = threading.main_thread().ident
    frame: FrameType | None = sys._current_frames().get(identifier) if identifier is not None else None
    while frame is not None and _of_python(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return Answer(state="busy", text="outside of Python")
    file = frame.f_code.co_filename
    text = f"in {frame.f_code.co_name} ({file}:{frame.f_lineno})"
    return Answer(state="waits" if file.startswith(_WAITING) else "busy", text=text)


def _of_python(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_LIBRARY) and "site-packages" not in file)


def _wait_for_keys(store: Store, keys: list[str], wait_s: float) -> list[str]:
    """Waits until all are set or the time is over; those that are not. The stores' own waits overshoot by seconds."""
    end = time.monotonic() + wait_s
    pause_s = 0.01
    while not store.check(keys):
        if time.monotonic() >= end:
            return [key for key in keys if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)
    return []
