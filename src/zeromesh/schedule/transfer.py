"""One collective or copy of a flat buffer, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.strategy import Axis, Layout, Stage
from zeromesh.strategy.stage import DEFAULT_WIRE, HOST
from zeromesh.wires import coded

if TYPE_CHECKING:
    from zeromesh.wires.format import WireFormat

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]

Copying = Literal["up", "down"]
"""Up to the device, or down to its host."""

Direction = Literal["gather", "reduce"]
"""An axis has a communicator for each."""

RouteKind = Literal["refresh", "unshard", "reduce", "boundary", "up", "down"]
"""Kinds of transfers: updated parameters to the parameter shard; parameters into a slot; a micro-batch's gradients into
the accumulator; the accumulated ones to the state shard; copies from the host's memory to the device's, and back."""

HOST_AXIS = Axis(name=HOST, mesh_axis=HOST, size=1, stride=0, stage=Stage.ZERO, wire=DEFAULT_WIRE)
"""Stands for the link between a device and its host, over which ``up`` and ``down`` copy."""

GATHERS: tuple[RouteKind, ...] = ("refresh", "unshard")
REDUCTIONS: tuple[RouteKind, ...] = ("reduce", "boundary")
COPIES: tuple[Copying, ...] = ("up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective over one axis, or one copy to or from the host."""

    operation: Operation | Copying
    axis: Axis
    numel: int  # elements of the whole region: the result of a gather, the input of a reduction, a copy
    wire: str

    @property
    def chunk_numel(self) -> int:
        return self.numel // self.axis.size

    @property
    def line(self) -> str:
        """The link that it uses: its axis, or one direction between device and host."""
        return f"{HOST} {self.operation}" if self.operation in COPIES else self.axis.name

    @property
    def direction(self) -> Direction:
        return "gather" if self.operation == "all_gather" else "reduce"

    @property
    def form(self) -> WireFormat | None:
        """The format of its messages; None if elements are sent unchanged. Sums without error feedback are rounded
        without bias."""
        found = coded(self.wire)
        return found if found is None or self.operation == "all_gather" or self.axis.wire.feedback else found.unbiased()

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends: [Note: Bytes]."""
        if self.operation in COPIES:
            return wire_bytes(self.numel, self.wire)
        turns = 2 if self.operation == "all_reduce" else 1
        return turns * (self.axis.size - 1) * wire_bytes(self.chunk_numel, self.wire)


def wire_bytes(numel: int, wire: str) -> int:
    """Bytes of `numel` elements on a wire, or of their message."""
    form = coded(wire)
    return numel * ITEM_BYTES[wire] if form is None else form.message_bytes(numel)


def axes_of(layout: Layout, kind: RouteKind) -> tuple[Axis, ...]:
    """The axes over which transfers of a kind go; no axis is in two kinds of a direction. Copies go over none."""
    match kind:
        case "refresh":
            return tuple(axis for axis in layout.significant if axis not in layout.param_axes)
        case "unshard":
            return layout.param_axes
        case "reduce":
            return layout.grad_axes
        case "boundary":
            return tuple(axis for axis in layout.axes if axis not in layout.grad_axes)
        case "up" | "down":
            return ()
