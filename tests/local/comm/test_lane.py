"""Lanes: order, errors, lifetime."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
import torch

from tests.forks import run_python
from zeromesh.comm.lane import Lane, Ticket, _Stream
from zeromesh.errors import CommunicationError

CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["thread", "inline"])
def lane(request):
    lane = Lane("gather", device=CPU, inline=request.param)
    yield lane
    lane.close()


def fail():
    raise KeyError("broken on purpose")


def test_jobs_run_in_order_of_submission(lane):
    seen: list[int] = []
    tickets = [lane.submit(lambda i=i: seen.append(i)) for i in range(100)]
    tickets[-1].wait()
    assert seen == list(range(100))
    assert all(ticket.done() for ticket in tickets)


def test_jobs_record_no_gradients(lane):
    weight = torch.ones(1, requires_grad=True)
    lane.submit(lambda: weight.add_(1)).wait()  # in place on a leaf: an error if autograd were on
    assert weight.item() == 2


def test_an_error_is_raised_once_and_stops_the_lane(lane):
    ran: list[int] = []
    ticket, later = lane.submit(fail, "unshard block 3"), lane.submit(lambda: ran.append(1), "unshard block 4")
    with pytest.raises(KeyError, match="broken on purpose"):
        ticket.wait()
    ticket.wait()
    words = r"unshard block 4 was not run: on lane 'gather', unshard block 3 failed .*on purpose"
    with pytest.raises(CommunicationError, match=words):
        later.wait()
    assert not ran
    lane.close()
    with pytest.raises(CommunicationError, match="lane 'gather' is closed; reduce block 1 cannot run"):
        lane.submit(lambda: None, "reduce block 1")


def test_a_job_follows_one_of_another_lane():
    first, second = Lane("refresh", device=CPU), Lane("unshard", device=CPU)
    gate, seen = threading.Event(), list[str]()

    def slow() -> None:
        gate.wait()
        seen.append("refresh")

    before = first.submit(slow)
    after = second.submit(lambda: seen.append("unshard"), after=before)
    free = second.submit(lambda: None)
    assert not after.done() and not free.done()
    gate.set()
    free.wait()
    assert seen == ["refresh", "unshard"]
    # A job runs beside the caller.
    lane = Lane("gather", device=CPU)
    gate = threading.Event()
    ticket = lane.submit(gate.wait)
    assert not ticket.done()
    gate.set()
    ticket.wait()
    assert ticket.done()


@pytest.mark.parametrize("told", [False, True])
def test_a_job_fails_with_the_one_that_it_follows(told):
    """Also where somebody has been told of the failure before it comes to run."""
    first, second = Lane("reduce", device=CPU), Lane("boundary", device=CPU)
    gate, ran = threading.Event(), list[int]()
    second.submit(gate.wait)
    before = first.submit(fail, "reduce block 3")
    after = second.submit(lambda: ran.append(1), "boundary block 3", after=before)
    if told:
        with pytest.raises(KeyError, match="broken on purpose"):
            before.wait()
    gate.set()
    words = "since what it follows failed" if told else r"boundary block 3: not run, since .* reduce block 3: .*broken"
    with pytest.raises(CommunicationError, match=words):
        after.wait()
    if not told:
        with pytest.raises(KeyError, match="broken on purpose"):
            before.wait()  # whose own error nobody else has taken
    assert not ran


def test_a_ticket_keeps_what_its_job_refers_to(monkeypatch):
    """As a stream's does: the device may still use it."""
    ticket, held = Ticket("agree"), Owner(inline=True)
    seen = weakref.ref(held)
    ticket._finish(job=partial(print, held))
    del held
    assert seen() is not None
    ticket.wait()
    assert seen() is None
    # Streams go before the computation.
    asked: list[object] = []
    monkeypatch.setattr(torch, "Stream", lambda device, *, priority: asked.append((device, priority)))
    _Stream("gather", torch.device("cuda", 1))
    assert asked == [(torch.device("cuda", 1), -1)]


class Owner:
    def __init__(self, inline):
        self.lane = Lane("owned", device=CPU, inline=inline)
        self.lane.submit(self.job).wait()

    def job(self):
        self.tensor = torch.zeros(3)


@pytest.mark.parametrize("inline", [False, True])
def test_dropping_the_owner_frees_it_at_once(inline):
    gc.disable()
    try:
        owner = Owner(inline)
        threads = [t for t in threading.enumerate() if t.name == "zeromesh-owned"]
        reference = weakref.ref(owner)
        del owner
        assert reference() is None
    finally:
        gc.enable()
    for thread in threads:
        thread.join(timeout=100)
        assert not thread.is_alive()
    assert len(threads) == (0 if inline else 1)


ENDINGS = """
import os, threading, time, torch
from zeromesh.comm import lane
from zeromesh.comm.lane import Lane

child = os.fork()  # its end is a job that is slow, the other's one that is stuck
if child:
    assert os.waitpid(child, 0)[1] == 0
lane.DRAIN_S = 0.1 if child else 600.0
job = threading.Event().wait if child else lambda: (time.sleep(0.3), print("done", flush=True))
Lane("lane", device=torch.device("cpu")).submit(job)
"""


def test_what_is_under_way_ends_before_the_process_does_but_for_a_stuck_job():
    ended = run_python("-c", ENDINGS)
    assert (ended.returncode, ended.stdout) == (1, "done\n")
    assert "lane still waits for other ranks 0.1 s after this one has ended" in ended.stderr
