"""One collective of a flat buffer, as data, and the lanes that collectives run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.strategy import Axis, Layout
from zeromesh.wires import WireFormat, coded

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]

LaneKind = Literal["refresh", "unshard", "reduce", "boundary"]
"""Kinds of transfers, each of which has a lane: updated parameters to the parameter shard; parameters into a slot;
a micro-batch's gradients into the accumulator; the accumulated ones to the state shard."""

LANES: tuple[LaneKind, ...] = get_args(LaneKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective over one axis.

    Args:
        operation: what it does.
        axis: over which axis of the layout.
        numel: elements of the whole region: the result of a gather, the input of a reduction.
        wire: dtype of what is sent.
    """

    operation: Operation
    axis: Axis
    numel: int
    wire: str

    @property
    def chunk_numel(self) -> int:
        return self.numel // self.axis.size

    @property
    def form(self) -> WireFormat | None:
        """Of its messages; None where elements are sent as they are. Sums that owe nothing are rounded without bias."""
        found = coded(self.wire)
        if found is None or self.operation == "all_gather" or self.axis.wire.feedback:
            return found
        return found.unbiased()

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends: [Note: Bytes]."""
        turns = 2 if self.operation == "all_reduce" else 1
        return turns * (self.axis.size - 1) * wire_bytes(self.chunk_numel, self.wire)


def wire_bytes(numel: int, wire: str) -> int:
    """Bytes of `numel` elements on a wire, or of their message."""
    form = coded(wire)
    return numel * ITEM_BYTES[wire] if form is None else form.message_bytes(numel)


def lane_axes(layout: Layout, lane: LaneKind) -> tuple[Axis, ...]:
    """The axes over which a lane sends. No axis is in both lanes of a direction, so that its communicator for that
    direction belongs to one lane."""
    match lane:
        case "refresh":
            return tuple(axis for axis in layout.significant if axis not in layout.param_axes)
        case "unshard":
            return layout.param_axes
        case "reduce":
            return layout.grad_axes
        case "boundary":
            return tuple(axis for axis in layout.axes if axis not in layout.grad_axes)
