"""What the collectives need beside the regions they work on: decided with the rest of the memory, per lane."""

from __future__ import annotations

from zeromesh.schedule.transfer import LANES, LaneKind, lane_axes
from zeromesh.strategy import Layout
from zeromesh.wires import coded

GLOO_BYTES = 8 << 20
"""Room for pieces of 1 MiB from one peer and of half a MiB from three."""

DEVICE_BYTES = 64 << 20
"""A 32 MiB message already runs at a NIC's rate; more would not be faster."""


def collective_bytes(backend: str) -> int:
    """Bytes that one collective at a time needs on torch's `backend`."""
    return GLOO_BYTES if backend == "gloo" else DEVICE_BYTES


def workspace_by_lane(layout: Layout, backend: str) -> dict[LaneKind, int]:
    """Bytes that each lane needs: a lane does one collective at a time; none where no axis has a second rank."""
    size = collective_bytes(backend)
    return {lane: size if _needs_workspace(layout, lane) else 0 for lane in LANES}


ALIGN = 64
"""Parts begin at multiples of this many elements, so that vector loads of any dtype are aligned."""


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


def _needs_workspace(layout: Layout, lane: LaneKind) -> bool:
    axes = [axis for axis in lane_axes(layout, lane) if axis.size > 1]
    if lane in ("reduce", "boundary"):
        return bool(axes)
    # A lossless gather works in place; a quantised one needs room for its messages.
    return any(coded(axis.wire.param) for axis in axes)
