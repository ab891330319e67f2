"""Whole tensors that their owners step on at once, as the schedule knows them: what moves for them, and how long a step
takes. Which tensors, and who owns them, is `zeromesh.pieces.owners`'s."""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.strategy import Axis


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
        there: gradients and values, to the owners, in the order of the axes that are crossed.
        back: values, to the state shards.
        step_s: that the owner's step takes, where that is predicted.
    """

    there: tuple[Shipment, ...]
    back: tuple[Shipment, ...]
    step_s: float = 0.0
