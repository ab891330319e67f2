"""Who is still there, once something has gone wrong.

A rank that waits in vain in a collective knows whom it waits for, and that one may be waiting in vain itself: in a mesh
the first rank to give up rarely waits for the one that stalled. So each rank that ends with an error leaves a word in
the store where the ranks met, and looks for the others'. Who has left none is missing; who has left an error of its own
is the cause.
"""

from __future__ import annotations

import threading
import time

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from zeromesh.errors import CommunicationError, ZeromeshError

WAIT_S = 5.0
"""All ranks of a stalled step began to wait within a step's time of each other, and give up as far apart."""

_ANSWER_S = 2.0
"""What the store gets to answer; it dies with the rank that holds it, where no launcher holds it."""

_POLL_S = 0.05

_GONE = "lost its connection or waited in vain"


class RollCall:
    """What ranks that end with an error tell each other.

    Args:
        store: where the ranks met.
        rank, world: this rank, and how many there are.
        wait_s: how long the others get to end with an error as well.
    """

    def __init__(self, store: Store, rank: int, world: int, *, wait_s: float = WAIT_S) -> None:
        self._store = PrefixStore("zeromesh/ended", store)
        self._rank = rank
        self._world = world
        self._wait_s = wait_s
        # A launcher's store outlives the run's restarts.
        self._store.delete_key(str(rank))

    def explain(self, error: Exception) -> Exception:
        """Tells the others of `error`; what to raise for it, which names the ranks that are missing or have failed."""
        waited = is_communication(error)
        told = self._ask(_GONE if waited else f"{type(error).__name__}: {error}", wait=waited)
        if not waited or self._world == 1:
            return error
        return CommunicationError(f"{error} {self._verdict(told)}")

    def _verdict(self, told: dict[int, str] | None) -> str:
        if told is None:
            return "Nobody could be asked: the process that holds the ranks' store, rank 0 or the launcher, is gone."
        failed = [f"rank {rank} failed with {text}" for rank, text in sorted(told.items()) if text != _GONE]
        missing = [str(rank) for rank in range(self._world) if rank not in told]
        if failed:
            return f"The cause: {'; '.join(failed)}."
        if missing:
            plural = len(missing) > 1
            return (
                f"Missing: rank{'s' * plural} {', '.join(missing)}, which did not answer within {self._wait_s:g} s: "
                f"dead, stopped or unreachable."
            )
        return (
            "All ranks answered: the network, or a rank that issued another collective than the others, is the cause."
        )

    def _ask(self, word: str, *, wait: bool) -> dict[int, str] | None:
        """What each rank has said, by rank; None where the store does not answer."""
        told: dict[int, str] = {}
        done = threading.Event()

        def ask() -> None:
            try:
                self._store.set(str(self._rank), word)
                if wait:
                    self._wait_for_all()
                for rank in range(self._world):
                    if self._store.check([str(rank)]):
                        told[rank] = self._store.get(str(rank)).decode()
            except RuntimeError:
                return
            done.set()

        # A store that is gone may never answer.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(self._wait_s * wait + _ANSWER_S)
        return dict(told) if done.is_set() else None

    def _wait_for_all(self) -> None:
        """Until all have left a word or the time is over; the stores' own waits overshoot by seconds."""
        everyone = [str(rank) for rank in range(self._world)]
        end = time.monotonic() + self._wait_s
        while not self._store.check(everyone) and time.monotonic() < end:
            time.sleep(_POLL_S)


def is_communication(error: BaseException) -> bool:
    """Whether `error` says that others could not be reached: ours, and what torch raises for it."""
    if isinstance(error, ZeromeshError):
        return isinstance(error, CommunicationError)
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "Connection closed by peer" in text)
