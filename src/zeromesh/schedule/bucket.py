"""Buckets of whole tensors that their owners step on: their messages, and the order of the steps.
`zeromesh.pieces.owners` chooses tensors and owners."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.strategy import Axis

B = TypeVar("B", contravariant=True)
T = TypeVar("T")

AHEAD = 2
"""How many buckets travel to their owners, or wait there, while one is stepped on and one goes back. Fewer leave a lane
idle at each turn, more only hold memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """The messages that one rank sends to others over one axis."""

    axis: Axis
    numel: int  # to all others together
    wire: str

    @property
    def sent_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.wire]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One bucket of whole tensors, on one rank."""

    there: tuple[Shipment, ...]  # gradients, to the owners, in the order of the axes that are crossed
    back: tuple[Shipment, ...]  # values, to the state shards
    anew: tuple[Shipment, ...] = ()  # values, to the owners, where others have changed them since the last step
    room_bytes: int = 0  # taken on this rank from when the bucket is collected until it is settled
    step_s: float = 0.0  # time of the owner's step, where that is predicted


def most_room(rooms: Sequence[int]) -> int:
    """Peak memory of buckets of these sizes. One is stepped, `AHEAD` are on their way or wait, and
    the previous one is settled before another is collected."""
    return max((sum(rooms[first : first + AHEAD + 1]) for first in range(len(rooms))), default=0)


class BucketBackend(Protocol[B, T]):
    """Runs buckets on devices or on a virtual clock. A ticket is None if there was nothing to do."""

    def collect(self, bucket: B) -> T | None:
        """Starts to bring a bucket's gradients and values to the owners of its tensors."""

    def update(self, bucket: B) -> T | None:
        """Steps on the tensors that this rank owns of an arrived bucket, and starts to bring their values back."""

    def wait(self, ticket: T) -> None:
        """Makes the computation from here on come after the ticket's work."""


@dataclass(slots=True)
class BucketSteps(Generic[B, T]):
    """Steps on whole tensors: on each bucket while the next ones arrive and the one before goes back."""

    # Tickets, in the order in which they are waited for. A step that raised leaves them to `settle`.
    under_way: deque[T | None] = field(default_factory=deque)

    def step(self, backend: BucketBackend[B, T], buckets: Sequence[B]) -> None:
        """Steps on all buckets, in order; when this returns, masters are up to date."""
        self.settle(backend)  # or tickets of a step that raised would be taken for this one's
        ahead = iter(buckets)
        self.under_way.extend(map(backend.collect, islice(ahead, AHEAD)))
        for index, bucket in enumerate(buckets):
            self._settle_oldest(backend)
            self.under_way.append(backend.update(bucket))
            if index:
                self._settle_oldest(backend)
            self.under_way.extend(map(backend.collect, islice(ahead, 1)))
        self.settle(backend)

    def settle(self, backend: BucketBackend[B, T]) -> None:
        while self.under_way:
            self._settle_oldest(backend)

    def _settle_oldest(self, backend: BucketBackend[B, T]) -> None:
        ticket = self.under_way[0]
        if ticket is not None:
            backend.wait(ticket)
        self.under_way.popleft()  # only now: a Ctrl-C may end the wait, and whoever comes next must wait again
