"""The schedule's view of a unit: lengths and dtypes of its flat buffers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from zeromesh.errors import InternalError, one_of

FROZEN_BYTES = {
    "code i8": 1,
    "code i16": 2,
    "code i32": 4,
    "code i64": 8,
    "code u8": 1,
    "code bool": 1,
    "code e4m3": 1,
    "code e5m2": 1,
}
"""Bytes of one element of the dtypes that only frozen parameters may have. They cross every wire in this dtype. No
wire, not even a user's own, has such a name: names of wires have no spaces."""

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2} | FROZEN_BYTES
"""Bytes of one element of each dtype."""

BUCKET_BYTES = 25 << 20
"""Size of joined units if no parameters are sharded; DDP's default. On 4 ranks that share 2 cores, a step of a model of
29 MB takes 1.00x DDP's time with it, 1.07x with 8 MiB and 1.15x unit by unit: each collective has a fixed cost. Behind
1 Gbit/s, 8 MiB are 7 % faster since they hide more. Blocks of models that need a cluster are larger than either."""


class Role(enum.Enum):
    """How long a unit's gathered parameters live. BLOCK units share gather slots: gathered before each use, released
    after it. RESIDENT units (root, embedding, output head, units nested in others) have a slot of their own and stay
    gathered from forward to backward."""

    BLOCK = "block"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBuffer:
    """The parameters of a unit that share a dtype and a part, all trainable or all frozen, as one flat buffer."""

    numel: int  # without padding
    param_dtype: str  # in the compute copy, and on the wire unless an axis says otherwise
    master_dtype: str | None  # in the optimizer's copy; None if frozen: they have neither gradient nor states
    grad_dtype: str = "fp32"  # in the accumulated gradient shard
    reduce_dtype: str = "fp32"  # of gradients on the wire unless an axis says otherwise
    part: str = ""  # the part of the model that they belong to, with its own layout; "" outside of all parts
    on_device: bool = False  # whether its tensors are outside of the share to which the host's stage applies

    def __post_init__(self) -> None:
        for dtype in (self.param_dtype, self.master_dtype or "fp32", self.grad_dtype, self.reduce_dtype):
            if dtype not in ITEM_BYTES:
                raise InternalError(f"dtype must be {one_of(dtype, ITEM_BYTES)}")
        if self.trainable and self.param_dtype in FROZEN_BYTES:
            raise InternalError(f"a buffer of {self.param_dtype} must be frozen")

    @property
    def trainable(self) -> bool:
        return self.master_dtype is not None


class HostShare:
    """Decides to which tensors of a model, or of a part, the host's stage applies: the last ones, up to `percent` of
    all `trained` elements."""

    def __init__(self, percent: int, trained: int) -> None:
        self._left = (100 - percent) * trained

    def stays(self, trained: int) -> bool:
        """Whether the next tensor, in the order of units, with so many trained elements, stays on the device."""
        self._left -= 100 * trained
        return self._left >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A group of modules gathered together."""

    name: str  # the module's qualified name; "" for the root
    role: Role
    buffers: tuple[FlatBuffer, ...]  # at most one for each (dtype, trainable or frozen, part, place)

    @property
    def trainable(self) -> bool:
        return any(buffer.trainable for buffer in self.buffers)

    @property
    def bytes(self) -> int:
        """Bytes of its parameters in the compute dtype."""
        return sum(buffer.numel * ITEM_BYTES[buffer.param_dtype] for buffer in self.buffers)


def neighbours(units: Sequence[Unit], bucket_bytes: int) -> list[list[int]]:
    """The units to join, by index: neighbours, until their parameters take `bucket_bytes`. For strategies that shard no
    parameters: a unit then only groups gradients that are reduced together, and each collective has a fixed cost. Units
    nested in others are not joined. The root, which has few parameters, joins the first units: their gradients come
    last."""
    groups: list[list[int]] = []
    room = 0
    for index, unit in enumerate(units):
        alone = not bucket_bytes or _alone(unit, units)
        if room > 0 and not alone:
            groups[-1].append(index)
            room -= unit.bytes
        else:
            groups.append([index])
            room = 0 if alone else bucket_bytes - unit.bytes
    return groups


def _alone(unit: Unit, units: Sequence[Unit]) -> bool:
    pairs = [(unit.name, other.name) for other in units if other.name and unit.name]
    return any(one.startswith(f"{other}.") or other.startswith(f"{one}.") for one, other in pairs)


def joined_name(names: Sequence[str]) -> str:
    """Name of joined units; the root's if it is one of them."""
    return names[0] if len(names) == 1 or not names[0] else f"{names[0]} to {names[-1]}"
