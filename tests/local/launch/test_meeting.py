"""Processes of one start find each other in a store that remembers earlier starts. Threads stand for processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from zeromesh.errors import CommunicationError
from zeromesh.launch.ranks import meet


def start(store: Store, ranks: list[int], world: int = 3, wait_s: float = 20.0) -> list[Store]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: meet(store, rank, world, wait_s=wait_s), ranks))


def test_all_share_one_store_of_their_own_start() -> None:
    for order in ([0, 1, 2], [2, 1, 0]):
        first, second, third = start(HashStore(), order)
        first.set("key", "value")
        assert second.get("key") == third.get("key") == b"value"
    # A later start has a store of its own.
    store = HashStore()
    before = start(store, [0, 1, 2])
    before[0].set("address", "of a process that is gone")
    for order in ([0, 1, 2], [1, 2, 0]):  # also those that come before rank 0 has said the new name
        again = start(store, order)
        assert not any(found.check(["address"]) for found in again)
        again[0].set("own", "1")
        assert all(found.check(["own"]) for found in again)
        assert not before[0].check(["own"])


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    ("ranks", "message"), [([0], "ranks 1, 2 did not come within 1 s"), ([1, 2], "rank 0 did not come")]
)
def test_who_did_not_come_is_named(ranks: list[int], message: str, earlier: bool) -> None:
    """Keys of an earlier start let nobody in, unless that start was smaller and complete."""
    store = HashStore()
    if earlier:
        start(store, [0, 1, 2])
        assert len(start(store, [1, 0], world=2)) == 2
    with pytest.raises(CommunicationError, match=message):
        start(store, ranks, wait_s=1.0)
