"""What the collectives need beside the regions they work on: decided with the rest of the memory, per lane."""

from __future__ import annotations

from zeromesh.schedule.transfer import LANES, QUANTISED_BITS, LaneKind, lane_axes
from zeromesh.strategy import Layout

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


def _needs_workspace(layout: Layout, lane: LaneKind) -> bool:
    axes = [axis for axis in lane_axes(layout, lane) if axis.size > 1]
    if lane in ("reduce", "boundary"):
        return bool(axes)
    # A lossless gather works in place; a quantised one needs room for its messages.
    return any(axis.wire.param in QUANTISED_BITS for axis in axes)
