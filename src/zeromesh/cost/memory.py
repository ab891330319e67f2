"""Device memory that belongs to no tensor: the driver's context, communicators, the allocator's unusable part."""

from __future__ import annotations

from zeromesh.cost.constants import Constants


def overhead_bytes(constants: Constants, *, messages: bool, communicators: int, dynamic_bytes: float) -> float:
    """Bytes of a process on one device beside model state, buffers and activations.

    Args:
        messages: ranks exchange messages: then there is neither a context, nor do communicators hold buffers.
        communicators: process groups that have been used on the device.
        dynamic_bytes: allocated and freed in the course of a step (activations). Memory allocated once and kept loses
            nothing to fragmentation.
    """
    driver = 0.0 if messages else constants.context_bytes + communicators * constants.communicator_bytes
    return driver + dynamic_bytes * constants.allocator_share
