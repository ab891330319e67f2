"""Device memory that belongs to no tensor: the driver's context, communicators, the allocator's unusable part."""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.cost.constants import Constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Bytes on one device beside model state, buffers and activations; sources stand in `data/constants.toml`."""

    context_bytes: float
    communicator_bytes: float
    allocator_bytes: float

    @classmethod
    def of(cls, constants: Constants, *, messages: bool, communicators: int, dynamic_bytes: float) -> Overhead:
        """The overhead of a process.

        Args:
            constants: of the cost model, which know devices with a driver.
            messages: ranks exchange messages: then there is neither a context, nor do communicators hold buffers.
            communicators: process groups that have been used on the device.
            dynamic_bytes: allocated and freed in the course of a step (activations). Memory allocated once and kept
                loses nothing to fragmentation.
        """
        contexts = 0 if messages else 1
        return cls(
            context_bytes=contexts * constants.context_bytes,
            communicator_bytes=contexts * communicators * constants.communicator_bytes,
            allocator_bytes=dynamic_bytes * constants.allocator_share,
        )

    @property
    def total_bytes(self) -> float:
        return self.context_bytes + self.communicator_bytes + self.allocator_bytes
