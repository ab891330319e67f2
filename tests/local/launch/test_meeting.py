"""Processes of one start find each other in a store that remembers earlier starts. Threads stand for processes."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from zeromesh.comm.lane import Lane
from zeromesh.errors import CheckpointError, CommunicationError, InputError
from zeromesh.launch import ranks
from zeromesh.launch.failure import is_communication
from zeromesh.launch.ranks import join_ranks, meet
from zeromesh.launch.roll_call import RollCall, whereabouts


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


# ---- A process that meets no others joins them all the same


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads that torch is told to use on a machine of 20 cores."""
    told: list[int] = []
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(20)))
    return told


def test_a_rank_alone_has_a_mesh_and_the_cores(tmp_path: Path, threads: list[int]) -> None:
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # which the session has given up
    with join_ranks({"node": 1}, tmp_path / "store", device="cpu") as own:
        assert (own.rank, own.world, own.device.type, own.mesh.mesh_dim_names) == (0, 1, "cpu", ("node",))
        assert dist.is_initialized()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    assert not dist.is_initialized() and threads == [20]


def test_what_is_asked_for_and_not_there_is_said_before_there_is_a_group(tmp_path: Path) -> None:
    missing = pytest.raises(InputError, match=r"0 are to have a device of type nosuch, where torch sees")
    with missing, join_ranks({"node": 1}, tmp_path / "store", device="nosuch"):
        pass
    assert not dist.is_initialized()


def test_cores_are_shared_by_a_machines_ranks(tmp_path: Path, threads: list[int]) -> None:
    with join_ranks({"node": 1}, tmp_path / "store", device="cpu", threads=3):
        ranks._set_threads(None, 8)  # of a rank that has others beside it
    assert threads == [3, 2]


# ---- Which rank is missing, by the word of the others. The ranks here share a process and a store in memory


TIMEOUT = CommunicationError("all_gather over axis node failed.")


def called(store: Store, rank: int, wait_s: float = 200.0) -> RollCall:
    """Where all answer, nobody waits for the 20 s."""
    return RollCall(store, rank, 3, wait_s=wait_s, poll_s=0.01)


class Gone(HashStore):
    """A store whose server does not answer."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection reset")


def test_who_does_not_answer_is_missing() -> None:
    store = HashStore()
    with called(store, 0, wait_s=0.3) as first, called(store, 1, wait_s=0.3) as second:
        told = second.explain(TIMEOUT)
        assert isinstance(told, CommunicationError)
        words = "all_gather over axis node failed. Missing: rank 2, which did not answer within 0.3 s"
        assert str(told).startswith(words)
        assert "Missing: rank 2," in str(first.explain(TIMEOUT))
    roll_call = called(store, 0, wait_s=0.1)
    roll_call._store = Gone()
    assert "Nobody could be asked who is missing" in str(roll_call.explain(TIMEOUT))
    state, text = whereabouts()
    assert state == "busy"
    assert text.startswith("in whereabouts (") and "roll_call.py:" in text


def test_an_error_of_its_own_is_the_cause() -> None:
    error, store = ValueError("no such file"), HashStore()
    with called(store, 0) as first, called(store, 1), called(store, 2) as third:
        assert third.explain(error) is error
        assert "The cause: rank 2 failed with ValueError: no such file." in str(first.explain(TIMEOUT))


def test_who_is_alive_but_elsewhere_is_named_with_the_place() -> None:
    """The main thread is in this test, not in a collective."""
    store = HashStore()
    with called(store, 0), called(store, 1) as second, called(store, 2) as third:
        answers: list[str] = []
        caller = threading.Thread(target=lambda: answers.append(str(second.explain(TIMEOUT))))
        caller.start()
        caller.join()
        assert "Missing: rank 0, which is alive, in test_who_is_alive_but" in answers[0]
        assert "test_meeting.py:" in answers[0] and third is not second
    # Errors about other ranks.
    assert is_communication(TIMEOUT)
    assert is_communication(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not is_communication(CheckpointError("gloo is not a checkpoint"))
    assert not is_communication(RuntimeError("index out of range"))


def test_who_waits_in_a_collective_is_not_missing() -> None:
    store = HashStore()
    lane = Lane("gather", device=torch.device("cpu"))
    asked: list[str] = []

    def ask() -> None:
        with ExitStack() as stack:
            ranks = [stack.enter_context(called(store, rank)) for rank in range(3)]
            asked.append(str(ranks[1].explain(TIMEOUT)))

    lane.submit(ask).wait()  # the main thread is in the lane, as in an unshard
    assert "No rank is missing, all wait" in asked[0]


def test_nobody_listens_after_it() -> None:
    """A thread that came back from the store into an interpreter that is gone would abort the process."""
    before = {*threading.enumerate()}  # of earlier tests, some of which may end meanwhile
    with RollCall(HashStore(), 0, 2):
        (listening,) = {*threading.enumerate()} - before
    assert not listening.is_alive()
