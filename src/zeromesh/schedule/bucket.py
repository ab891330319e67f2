"""Whole tensors that their owners step on at once, as the schedule knows them: what moves for them, and how long a step
takes. Which tensors, and who owns them, is `zeromesh.pieces.owners`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.strategy import Axis

AHEAD = 2
"""Buckets of whole tensors on their way to their owners while one is stepped, or waiting to be: beside them one goes
back. Fewer would leave a lane idle at each turn, more only hold memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """What one rank sends to others over one axis, to each what that is to have.

    Args:
        axis: over which axis of the layout.
        numel: elements, to all others together.
        wire: dtype of what is sent.
    """

    axis: Axis
    numel: int
    wire: str

    @property
    def sent_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.wire]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One bucket of whole tensors, on one rank.

    Args:
        there: gradients, to the owners, in the order of the axes that are crossed.
        back: values, to the state shards.
        anew: values, to the owners, where somebody else than they has changed them since the last step.
        room_bytes: that the bucket takes on this rank from when it is collected until it is settled.
        step_s: that the owner's step takes, where that is predicted.
    """

    there: tuple[Shipment, ...]
    back: tuple[Shipment, ...]
    anew: tuple[Shipment, ...] = ()
    room_bytes: int = 0
    step_s: float = 0.0


def most_room(rooms: Sequence[int]) -> int:
    """Of buckets that take so much each: what is there at once. One is stepped, `AHEAD` are on their way or wait, and
    the one before is settled before another is collected."""
    return max((sum(rooms[first : first + AHEAD + 1]) for first in range(len(rooms))), default=0)
