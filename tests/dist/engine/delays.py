"""Random delays in communication and computation, so that a wait that is missing shows as wrong numbers.

On CPU a delay is a sleep in a lane's thread, or of the computation between two points of the schedule. On CUDA it is a
spinning kernel on the stream in question: the host goes on, and nothing but an event keeps one stream from overtaking
another. There, collectives over gloo block the host, so the delay also lies before their results
are copied back to the device (`comm.messages`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from unittest import mock

import torch
import torch.distributed as dist

from zeromesh.comm import messages
from zeromesh.comm.lane import Lane, Ticket
from zeromesh.schedule.interpreter import Interpreter

CYCLES_PER_S = 1.5e9
"""About a GPU's clock, whose cycles `torch.cuda._sleep` counts."""


@dataclass(slots=True, kw_only=True)
class Delays:
    """Draws delays, other ones on every rank; all are drawn by one thread, so a seed means the same ones again.

    Args:
        seed: of them all.
        lane_s, point_s: longest delay of a job, and at a point of the schedule.
        device: of the tensors.
        count: delays so far.
    """

    seed: int
    lane_s: float
    point_s: float
    device: str
    count: int = 0
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(f"{self.seed} on rank {dist.get_rank()}")

    def draw(self, longest_s: float) -> float:
        """Mostly short ones: the order of two things changes most where some delays are much longer than others."""
        self.count += 1
        return longest_s * self._random.random() ** 3

    def spend(self, delay_s: float) -> None:
        """In the calling thread, or on its current stream."""
        if self.device == "cpu":
            time.sleep(delay_s)
        else:
            torch.cuda._sleep(int(delay_s * CYCLES_PER_S))


@contextmanager
def delays(seed: int, *, lane_s: float = 3e-3, point_s: float = 3e-3, device: str = "cpu") -> Iterator[Delays]:
    """On a rank: delays the jobs of every lane, and the computation at every point of the schedule."""
    drawn = Delays(seed=seed, lane_s=lane_s, point_s=point_s, device=device)
    submit, run, bring_back = Lane.submit, Interpreter._run, messages.bring_back

    def delayed_submit(self, job, label="", *, after=None):
        delay_s = drawn.draw(lane_s)

        def delayed():
            drawn.spend(delay_s)
            job()

        return submit(self, delayed, label, after=after)

    def delayed_run(self, point, unit=-1):
        drawn.spend(drawn.draw(point_s))  # all that this point issues is late
        run(self, point, unit)
        drawn.spend(drawn.draw(point_s))  # and is ahead of the computation that follows

    def delayed_bring_back(tensors, copies):
        if device != "cpu":
            drawn.spend(drawn.draw(lane_s))
        bring_back(tensors, copies)

    with (
        mock.patch.object(Lane, "submit", delayed_submit),
        mock.patch.object(Interpreter, "_run", delayed_run),
        mock.patch.object(messages, "bring_back", delayed_bring_back),
    ):
        yield drawn


@contextmanager
def without_wait(kind: str) -> Iterator[None]:
    """A wait of the interpreter's is left out: for `ticket` (a gather), `taking` or `reducing`.

    The jobs are waited for at the end: a communicator must not be left with one of them under way.
    """
    settle, left = Interpreter._settle, list[Ticket]()

    def leave(self, state, *tickets):
        for what in tickets:
            ticket = getattr(state, what)
            if what == kind and ticket is not None:
                setattr(state, what, None)
                left.append(ticket)
            else:
                settle(self, state, what)

    with mock.patch.object(Interpreter, "_settle", leave):
        try:
            yield
        finally:
            for ticket in left:
                ticket.wait()


@contextmanager
def without_order_of_lanes() -> Iterator[None]:
    """No job follows that of another lane: a gather its unit's refresh, a boundary the reductions before it."""
    submit = Lane.submit

    def alone(self, job, label="", *, after=None):
        if after is not None:
            left.append(after)
        return submit(self, job, label)

    left = list[Ticket]()
    with mock.patch.object(Lane, "submit", alone):
        try:
            yield
        finally:
            for ticket in left:
                ticket.wait()
