"""What the collectives need beside the regions they work on: decided with the rest of the memory, per lane."""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.schedule.transfer import QUANTISED_BITS
from zeromesh.strategy import Layout

GLOO_BYTES = 8 << 20
"""Room for pieces of 1 MiB from one peer and of half a MiB from three."""

DEVICE_BYTES = 64 << 20
"""A 32 MiB message already runs at a NIC's rate; more would not be faster."""


def collective_bytes(backend: str) -> int:
    """Bytes that one collective at a time needs on torch's `backend`."""
    return GLOO_BYTES if backend == "gloo" else DEVICE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Bytes by lane: a lane does one collective at a time."""

    gather: int
    reduce: int

    @classmethod
    def of(cls, layout: Layout, backend: str) -> Workspace:
        """The workspaces of a layout's lanes; none where no axis has a second rank."""
        if layout.world == 1:
            return cls(gather=0, reduce=0)
        # A lossless gather works in place; a quantised one needs room for its messages.
        quantised = any(axis.wire.param in QUANTISED_BITS for axis in layout.axes)
        size = collective_bytes(backend)
        return cls(gather=size if quantised else 0, reduce=size)

    @property
    def total(self) -> int:
        return self.gather + self.reduce
