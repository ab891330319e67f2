"""Waits and orders of the engine on streams, each left out by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from unittest import mock

from tests.dist.engine.delays import without_order_of_lanes, without_wait
from zeromesh.comm import lane
from zeromesh.comm.lane import Ticket
from zeromesh.schedule import lanes

Fault = Callable[[], AbstractContextManager[None]]


@contextmanager
def without_start(kind: str) -> Iterator[None]:
    """The jobs of a lane do not wait for the caller's stream."""
    launch = lane._Stream._launch

    def early(self, job, ticket, start):
        launch(self, job, ticket, self._stream.record_event() if self._lane == kind else start)

    with mock.patch.object(lane._Stream, "_launch", early):
        yield


@contextmanager
def without_end(kind: str) -> Iterator[None]:
    """Whoever waits for a job of a lane waits for the jobs before it alone."""
    launch = lane._Stream._launch

    def early(self, job, ticket, start):
        before = self._stream.record_event()
        launch(self, job, ticket, start)
        if self._lane == kind:
            ticket._event = before

    with mock.patch.object(lane._Stream, "_launch", early):
        yield


@contextmanager
def without_keeping() -> Iterator[None]:
    """A ticket lets go of its job's tensors before the job is waited for."""
    finish = Ticket._finish

    def let_go(self, error=None, event=None, index=None, job=None):
        finish(self, error, event, index, None)

    with mock.patch.object(Ticket, "_finish", let_go):
        yield


@contextmanager
def without_landing(kind: str) -> Iterator[None]:
    """The host does not wait for the copies of a lane before it uses its own memory."""
    synchronize = lane._Stream.synchronize

    def at_once(self):
        if self._lane != kind:
            synchronize(self)

    with mock.patch.object(lane._Stream, "synchronize", at_once):
        yield


def without_shared_lanes() -> AbstractContextManager[None]:
    """Each axis has its own lanes, also where a chain leaves a transfer's result to the next in memory of the lane."""
    of = lanes.Lanes.of

    def apart(placed, lent):
        return lanes.Lanes({key: "/".join(key) for key in of(placed, lent).of_axis})

    return mock.patch.object(lanes.Lanes, "of", apart)


LANES = ("gather/cluster", "gather/node", "reduce/node", "reduce/cluster", "up", "down")
# Where a reduction follows another, it comes after the computation by that; and so does a copy down.
STREAMED = {"step 0": "host=1,node=3,cluster=1;step=device"}
STARTS = {
    "reduce/cluster": "node=1,cluster=3",
    "up": "host=3,node=3,cluster=3",
    "down": "host=2,node=1,cluster=0",
    **STREAMED,
}
ENDS = {"up": "host=3,node=3,cluster=3", "down": "host=2,node=1,cluster=0"} | STREAMED

FAULTS: dict[str, tuple[str, Fault]] = {
    "a gather, before its parameters are used": ("node=3,cluster=1", partial(without_wait, "ticket")),
    "a reduction, before its slot is filled again": ("node=3,cluster=3", partial(without_wait, "taking")),
    "a reduction, before its sums are read": ("node=3,cluster=1", partial(without_wait, "reducing")),
    "a refresh, before its parameters are used": ("node=1,cluster=1", partial(without_wait, "refreshing")),
    "the lane before, on its way to the next": ("node=3,cluster=1", without_order_of_lanes),
    **{
        f"the computation, before {kind} reads it": (STARTS.get(kind, "node=3,cluster=1"), partial(without_start, kind))
        for kind in (*LANES, *STREAMED)
    },
    **{
        f"the end of a job of {kind}": (ENDS.get(kind, "node=3,cluster=1"), partial(without_end, kind))
        for kind in (*LANES, *STREAMED)
    },
    "memory of a lane, that a chain passes on": ("host=3,node=2,cluster=2", without_shared_lanes),
    "a copy down, before the host reads what came": ("host=1,node=3,cluster=1", partial(without_landing, "down")),
}
"""Missing waits, each with a strategy that needs it."""
