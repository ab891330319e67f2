"""Which rank is missing, by the word of the others. The ranks here share a process and a store in memory."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import torch
from torch._C._distributed_c10d import HashStore, Store

from zeromesh.comm import Lane
from zeromesh.errors import CheckpointError, CommunicationError
from zeromesh.launch.failure import is_communication
from zeromesh.launch.roll_call import RollCall, whereabouts

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
        assert "test_roll_call.py:" in answers[0] and third is not second
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
