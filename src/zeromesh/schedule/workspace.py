"""What the collectives need beside the regions they work on: decided with the rest of the memory, per lane."""

from __future__ import annotations

from collections.abc import Sequence

from zeromesh.schedule.placed import Placed
from zeromesh.schedule.transfer import LANES, LaneKind, Transfer, lane_axes
from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.strategy import Layout
from zeromesh.wires import coded

GLOO_BYTES = 8 << 20
"""Room for pieces of 1 MiB from one peer and of half a MiB from three."""

ROUNDS = 2
"""Most exchanges in which a device sums a region itself, or sends it coded: the host launches each, with up to four
kernels beside it, and a lane waits for one before it begins the next. Ten launches are what a unit may take on an axis
in a direction, so that the host keeps ahead. With more rounds the room would be smaller: here it is for messages or
terms of half a chunk from every rank."""

ALIGN = 64
"""Parts begin at multiples of this many elements, so that vector loads of any dtype are aligned."""


def workspace_by_lane(placed: Sequence[Sequence[Placed]], backend: str, triton: bool = True) -> dict[LaneKind, int]:
    """Bytes that each lane needs on torch's `backend` and devices with `triton`: it does one collective at a time."""
    each = {id(buffer): buffer for unit in placed for buffer in unit}.values()  # a model's blocks share theirs
    if backend == "gloo":
        layouts = {id(buffer.layout): buffer.layout for buffer in each}.values()
        return {lane: GLOO_BYTES * any(_needs_pieces(layout, lane) for layout in layouts) for lane in LANES}
    return {
        lane: max(
            (device_bytes(buffer.layout, step, triton) for buffer in each for step in buffer.routes[lane].steps),
            default=0,
        )
        for lane in LANES
    }


def _needs_pieces(layout: Layout, lane: LaneKind) -> bool:
    axes = [axis for axis in lane_axes(layout, lane) if axis.size > 1]
    if lane in ("reduce", "boundary"):
        return bool(axes)
    # A lossless gather works in place; a quantised one needs room for its messages.
    return any(coded(axis.wire.param) for axis in axes)


def device_bytes(layout: Layout, step: Transfer, triton: bool = True) -> int:
    """Of one step; what is native works in place."""
    form = step.form
    if form is not None:
        directions, part = 1 if step.operation == "all_gather" else 2, _part(step, 8 * form.granule)
        codec = 0 if form.kernels and triton else form.memory_bytes(part)
        return codec + directions * step.axis.size * form.message_bytes(part)
    if layout.strategy.sum == "native" or step.operation == "all_gather":
        return 0
    item = ITEM_BYTES[step.wire]
    return _part(step, ALIGN) * (2 * max(item, ITEM_BYTES["fp32"]) + step.axis.size * item)


def _part(step: Transfer, multiple: int) -> int:
    """Elements of a chunk that one of `ROUNDS` takes."""
    return -(-step.chunk_numel // (ROUNDS * multiple)) * multiple


def part_numel(workspace_bytes: int, item_bytes: int, wide_bytes: int, *, terms: int, longest_bytes: int) -> int:
    """Elements of the parts in which a sum is formed: as long as the workspace allows and at most `longest_bytes`.

    Args:
        workspace_bytes: room for the received terms of a part, and for two of it as wide as sums are.
        item_bytes: of an element on the wire.
        wide_bytes: of an element while it is summed.
        terms: received, in flight included.
    """
    each = 2 * wide_bytes + terms * item_bytes
    return min(longest_bytes // item_bytes, workspace_bytes // each) // ALIGN * ALIGN
