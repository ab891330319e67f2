"""Where the processes of one start of a run find each other, and no others.

A launcher's store outlives the processes: torchrun (2.13, c10d rendezvous) gives the same one to those that it starts
again, with every address that the ones before had left in it. So each start has a name that only its own processes
know, and keeps to keys that begin with it::

    rank 0     says the name, a new one                 every rank   says its own, also new, under rank 0's name
    rank 0     lists all names, once they are there     every rank   goes on when its own is in the list

What is left of an earlier start has another name of rank 0, or a list without this process's.
"""

from __future__ import annotations

import time
import uuid

from torch._C._distributed_c10d import PrefixStore, Store

from zeromesh.errors import CommunicationError

_KEY = "zeromesh/meeting"
_LONGEST_PAUSE_S = 0.5


def meet(store: Store, rank: int, world: int, *, wait_s: float) -> Store:
    """Waits for the other processes of this start; their store.

    Args:
        store: that all of them see.
        rank, world: this process, and how many there are.
        wait_s: what they get to start in.

    Raises:
        CommunicationError: some have not come; names them.
    """
    own, host, pause_s = uuid.uuid4().hex, "", 0.01
    end = time.monotonic() + wait_s
    while True:
        name = own if rank == 0 else _read(store, _KEY)
        if name and name != host:
            host = name
            store.set(f"{_KEY}/{host}/{rank}", own)
            if rank == 0:
                store.set(_KEY, own)
        if host and _complete(store, host, rank, world, own):
            return PrefixStore(host, store)
        if time.monotonic() >= end:
            raise CommunicationError(f"rank{_missing(store, host, world)} did not come within {wait_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _complete(store: Store, host: str, rank: int, world: int, own: str) -> bool:
    everyone = f"{_KEY}/{host}/all"
    if rank:
        return own in _read(store, everyone).split()
    keys = [f"{_KEY}/{host}/{other}" for other in range(world)]
    if not store.check(keys):
        return False
    store.set(everyone, " ".join(_read(store, key) for key in keys))
    return True


def _missing(store: Store, host: str, world: int) -> str:
    absent = [str(rank) for rank in range(world) if not host or not store.check([f"{_KEY}/{host}/{rank}"])]
    if not host:  # without rank 0 nobody knows of the others
        return " 0"
    return f"{'s' * (len(absent) > 1)} {', '.join(absent) or '0'}"


def _read(store: Store, key: str) -> str:
    text: bytes = store.get(key) if store.check([key]) else b""
    return text.decode()
