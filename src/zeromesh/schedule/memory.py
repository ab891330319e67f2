"""Every buffer that the engine allocates, in bytes, decided before anything is allocated.

The engine allocates exactly these, once; the planner adds them up. Lengths are padded as in
[Note: Significance]; without padding the sums are those of `zeromesh.planner.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeromesh.schedule import transfer
from zeromesh.schedule.transfer import LaneKind
from zeromesh.schedule.unit import ITEM_BYTES, FlatBuffer, Role, Unit
from zeromesh.strategy import Layout
from zeromesh.strategy.stage import quantised

ALIGN_BYTES = 64
"""Each flat buffer starts on a cache line inside its slot, so that vector loads of any dtype are aligned."""

REDUCE_SLOTS = 1
"""Block gradients in flight, beside those that autograd leaves of the unit whose backward runs. More would only help if
one unit's reduction took longer than another's backward, and then the wire is the bound anyway."""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Persistent:
    """Bytes of one flat buffer's persistent shards on one device; 0 where a shard does not exist or is another's alias.

    Args:
        params: compute copy, the parameter shard.
        master: the optimizer's copy, the state shard; 0 where it is a part of the parameter shard.
        grads: the accumulated gradient shard.
        kept: copy that stays gathered over the kept axes from forward to backward.
        feedback: what quantised reductions with error feedback have lost and still owe.
    """

    params: int
    master: int
    grads: int
    kept: int
    feedback: int = 0

    @classmethod
    def of(cls, layout: Layout, unit: Unit, buffer: FlatBuffer) -> Persistent:
        padded = layout.padded(buffer.numel)
        master = grads = 0
        if buffer.master_dtype is not None:
            grads = padded // layout.degree(layout.grad_axes) * ITEM_BYTES[buffer.grad_dtype]
            if not master_in_params(layout, buffer):
                master = padded // layout.degree(layout.significant) * ITEM_BYTES[buffer.master_dtype]
        return cls(
            params=padded // layout.degree(layout.param_axes) * ITEM_BYTES[buffer.param_dtype],
            master=master,
            grads=grads,
            kept=kept_bytes(layout, unit, buffer),
            feedback=feedback_numel(layout, buffer) * ITEM_BYTES[FEEDBACK_DTYPE],
        )


def master_in_params(layout: Layout, buffer: FlatBuffer) -> bool:
    """Whether the optimizer's copy is this rank's part of the compute copy: same dtype, and a refresh brings the others
    just what this rank has. Through a wire with less precision all compute with what came over it, this rank too."""
    wires = {step.wire for step in transfer.refresh(layout, buffer)}
    return buffer.master_dtype == buffer.param_dtype and wires <= {buffer.param_dtype}


def kept_numel(layout: Layout, unit: Unit, buffer: FlatBuffer) -> int:
    """Elements of the kept copy; none where the unit stays gathered anyway, since then its slot is the copy."""
    if layout.degree(layout.kept_axes) == 1 or stays_gathered(layout, unit):
        return 0
    dropped = [axis for axis in layout.param_axes if not axis.stage.kept]
    return layout.padded(buffer.numel) // layout.degree(dropped)


def kept_wire(layout: Layout, buffer: FlatBuffer) -> str:
    """How the kept copy is held: as it came over the wire of the last gather that fills it."""
    axis = transfer.kept_axis(layout)
    return (axis.wire.param if axis else None) or buffer.param_dtype


def kept_bytes(layout: Layout, unit: Unit, buffer: FlatBuffer) -> int:
    """Bytes of the kept copy; a quantised one is the messages of all ranks of its axis, scales and all."""
    numel, axis = kept_numel(layout, unit, buffer), transfer.kept_axis(layout)
    if not numel or axis is None:
        return 0
    return axis.size * transfer.wire_bytes(numel // axis.size, kept_wire(layout, buffer))


FEEDBACK_DTYPE = "fp32"
"""Of what is owed: then what was sent and what is owed add up to the gradient to within fp32's rounding."""


def feedback_numel(layout: Layout, buffer: FlatBuffer) -> int:
    """Elements of the residuals: for each reduction with error feedback, the region that it quantises."""
    parts = transfer.feedback(layout, buffer)
    return parts[-1][1].stop if parts else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """Which slot each unit uses, and how long the slots are.

    Args:
        slot_of: by unit index, the slot's index; None for units that need none.
        slot_bytes: by slot index.
    """

    slot_of: tuple[int | None, ...]
    slot_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.slot_bytes)


def unshard_bytes(layout: Layout, unit: Unit) -> int:
    """Bytes of the unit's gathered parameters."""
    return sum(aligned(layout.padded(b.numel) * ITEM_BYTES[b.param_dtype]) for b in unit.buffers)


def slot_dtype(layout: Layout, buffer: FlatBuffer) -> str:
    """Dtype in which a gradient waits in its reduce slot, as what each axis has summed does there for the next: the one
    that holds every lossless wire it will cross, and fp32 where such a sum is quantised, which rounds it once."""
    steps = transfer.reduce_micro(layout, buffer)
    held = {step.wire for step in steps} & set(ITEM_BYTES) or {buffer.reduce_dtype}
    if len(held) > 1 or any(quantised(step.wire) for step in steps[1:]):
        held |= {"fp32"}
    return max(held, key=ITEM_BYTES.__getitem__)


def reduce_bytes(layout: Layout, unit: Unit) -> int:
    """Bytes of the unit's unreduced gradients in a reduce slot."""
    return sum(aligned(layout.padded(b.numel) * ITEM_BYTES[slot_dtype(layout, b)]) for b in unit.buffers if b.trainable)


def stays_gathered(layout: Layout, unit: Unit) -> bool:
    """Whether the unit's parameters stay gathered from forward to backward, in a slot of their own."""
    every_axis_kept = all(axis.stage.kept for axis in layout.param_axes if axis.size > 1)
    return unit.role is Role.RESIDENT or every_axis_kept


def plan_gather_slots(layout: Layout, units: Sequence[Unit], prefetch: int) -> SlotPlan:
    """prefetch + 1 slots of the largest block, one more for each unit that stays gathered.

    A unit always lands in the same slot, since tensors that autograd saved point into it.
    """
    if layout.degree(layout.param_axes) == 1:
        return SlotPlan(slot_of=(None,) * len(units), slot_bytes=())
    sizes = [unshard_bytes(layout, unit) for unit in units]
    return _plan_slots([stays_gathered(layout, unit) for unit in units], sizes, prefetch + 1)


def plan_reduce_slots(layout: Layout, units: Sequence[Unit]) -> SlotPlan:
    """REDUCE_SLOTS slots of the largest block, one more for each resident unit; none where gradients of a micro-batch
    are added where they stay (no stage 2 or 3)."""
    if layout.degree(layout.grad_axes) == 1:
        return SlotPlan(slot_of=(None,) * len(units), slot_bytes=())
    sizes = [reduce_bytes(layout, unit) for unit in units]
    return _plan_slots([unit.role is Role.RESIDENT for unit in units], sizes, REDUCE_SLOTS)


def _plan_slots(own: Sequence[bool], sizes: Sequence[int], shared: int) -> SlotPlan:
    sharing = [index for index, size in enumerate(sizes) if size and not own[index]]
    shared = min(shared, len(sharing))
    slot_bytes = [max((sizes[index] for index in sharing), default=0)] * shared
    slot_of: list[int | None] = [None] * len(sizes)
    for position, index in enumerate(sharing):
        slot_of[index] = position % shared
    for index, size in enumerate(sizes):
        if size and own[index]:
            slot_of[index] = len(slot_bytes)
            slot_bytes.append(size)
    return SlotPlan(slot_of=tuple(slot_of), slot_bytes=tuple(slot_bytes))


def staging_bytes(layout: Layout, units: Sequence[Unit], lane: LaneKind) -> int:
    """Longest region that a lane sends on a lossless wire of another dtype than it is held in."""
    return max((_staged(layout, buffer, lane) for unit in units for buffer in unit.buffers), default=0)


def _staged(layout: Layout, buffer: FlatBuffer, lane: LaneKind) -> int:
    held = {"reduce": slot_dtype(layout, buffer), "boundary": buffer.grad_dtype}.get(lane, buffer.param_dtype)
    steps = transfer.lane_transfers(layout, buffer, lane)
    cast = [step for step in steps if step.wire in ITEM_BYTES and step.wire != held]
    return max((step.numel * ITEM_BYTES[step.wire] for step in cast), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device of everything the engine allocates.

    Args:
        persistent: by unit, by flat buffer.
        gather, reduce: the slots.
        staging: by lane, casts between dtypes around a wire.
        workspace: what the collectives need, as the communication layer states it.
    """

    persistent: tuple[tuple[Persistent, ...], ...]
    gather: SlotPlan
    reduce: SlotPlan
    staging: Mapping[LaneKind, int]
    workspace: int = field(default=0)

    @classmethod
    def of(cls, layout: Layout, units: Sequence[Unit], prefetch: int, workspace_bytes: int = 0) -> MemoryPlan:
        return cls(
            persistent=tuple(tuple(Persistent.of(layout, unit, b) for b in unit.buffers) for unit in units),
            gather=plan_gather_slots(layout, units, prefetch),
            reduce=plan_reduce_slots(layout, units),
            staging={lane: staging_bytes(layout, units, lane) for lane in transfer.LANES},
            workspace=workspace_bytes,
        )

    @property
    def params_bytes(self) -> int:
        return sum(buffer.params for unit in self.persistent for buffer in unit)

    @property
    def master_bytes(self) -> int:
        return sum(buffer.master for unit in self.persistent for buffer in unit)

    @property
    def grads_bytes(self) -> int:
        return sum(buffer.grads for unit in self.persistent for buffer in unit)

    @property
    def buffers_bytes(self) -> int:
        """Slots, kept copies, residuals, staging and workspace."""
        kept = sum(buffer.kept + buffer.feedback for unit in self.persistent for buffer in unit)
        staging = sum(self.staging.values())
        return self.gather.total_bytes + self.reduce.total_bytes + kept + staging + self.workspace
