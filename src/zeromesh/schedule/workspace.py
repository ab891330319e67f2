"""What the collectives need beside the regions they work on: decided with the rest of the memory, per lane."""

from __future__ import annotations

from collections.abc import Sequence

from zeromesh.schedule.placed import Placed
from zeromesh.schedule.transfer import LANES, LaneKind, Transfer, lane_axes
from zeromesh.strategy import Layout
from zeromesh.wires import coded

GLOO_BYTES = 8 << 20
"""Room for pieces of 1 MiB from one peer and of half a MiB from three."""

ROUNDS = 2
"""Most exchanges in which a device sends a region coded: the host launches each with up to four kernels, and a lane
waits for one before it begins the next. A unit may take ten launches on an axis in a direction, so that the host
keeps ahead. With more rounds the room would be smaller: here it holds messages of half a chunk from every rank."""

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
            (device_bytes(step, triton) for buffer in each for step in buffer.routes[lane].steps),
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


def device_bytes(step: Transfer, triton: bool = True) -> int:
    """Bytes that one step needs; a native collective works in place."""
    form = step.form
    if form is None:
        return 0
    directions, multiple = 1 if step.operation == "all_gather" else 2, 8 * form.granule
    part = -(-step.chunk_numel // (ROUNDS * multiple)) * multiple  # elements of a chunk that one of `ROUNDS` takes
    codec = 0 if form.kernels and triton else form.memory_bytes(part)
    return codec + directions * step.axis.size * form.message_bytes(part)


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
