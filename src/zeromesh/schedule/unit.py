"""What the schedule needs to know of a unit: how long its flat buffers are, in which dtypes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from zeromesh.errors import InternalError

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one element of each dtype that parameters, gradients and states may have."""


class Role(enum.Enum):
    """How long a unit's gathered parameters live.

    BLOCK units share gather slots: gathered before each use, released after it. RESIDENT units (root, embedding, output
    head, units nested in others) have a slot of their own and stay gathered from forward to backward.
    """

    BLOCK = "block"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBuffer:
    """The parameters of one unit that share a dtype and are all trainable or all frozen, as one flat buffer.

    Args:
        numel: elements, without padding.
        param_dtype: of the compute copy, and on the wire unless an axis says otherwise.
        master_dtype: of the optimizer's copy; None for frozen parameters, which have neither gradient nor states.
        grad_dtype: of the accumulated gradient shard.
        reduce_dtype: of gradients on the wire unless an axis says otherwise.
    """

    numel: int
    param_dtype: str
    master_dtype: str | None
    grad_dtype: str = "fp32"
    reduce_dtype: str = "fp32"

    def __post_init__(self) -> None:
        for dtype in (self.param_dtype, self.master_dtype or "fp32", self.grad_dtype, self.reduce_dtype):
            if dtype not in ITEM_BYTES:
                raise InternalError(f"dtype must be one of {', '.join(ITEM_BYTES)}; got {dtype!r}")

    @property
    def trainable(self) -> bool:
        return self.master_dtype is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A group of modules gathered together.

    Args:
        name: the module's qualified name; "" for the root.
        role: how long its gathered parameters live.
        buffers: its flat buffers, at most one for each (dtype, trainable or frozen).
    """

    name: str
    role: Role
    buffers: tuple[FlatBuffer, ...]

    @property
    def trainable(self) -> bool:
        return any(buffer.trainable for buffer in self.buffers)

    def encloses(self, other: Unit) -> bool:
        """Whether `other` is registered inside this unit."""
        return self.name == "" or other.name.startswith(f"{self.name}.")
