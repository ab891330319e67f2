"""The collectives of a flat buffer, as data: which axis, how many elements, in which dtype, in which order.

[Note: Bytes] Let F be a buffer's padded length and n_a the size of axis a. A collective over a works on a region of
B_a = F / (product of the sizes of the axes more significant than a) elements (stage 0: of all sharded axes, and of the
axes of stage 0 inside of a). One rank sends (n_a-1)/n_a * B_a per all-gather or reduce-scatter and twice that per
all-reduce.

[Note: By level] Of several axes of stage 0 only the outermost is summed over in place: on the way there each inner axis
scatters, and gathers on the way back, which sends as much on the inner axes as sums over the whole region would, and
divides what the outer ones send by the inner ones' sizes. With `collective=ho_ring` the outermost scatters and gathers
too: the same bytes, in pairs that overlap. Where an inner axis is quantised, which sums as a whole, all axes are summed
over one after the other, and with `collective=flat` all of them as one.

[Note: Order] A gather goes from the least significant axis to the most, so each step's region lies inside the next
one's; a reduction goes the other way. Where stages fall from inner to outer axis the slow link carries the small
pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from zeromesh.schedule.unit import ITEM_BYTES, FlatBuffer
from zeromesh.strategy import Axis, Layout
from zeromesh.strategy.stage import quantised

Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]

LaneKind = Literal["refresh", "unshard", "reduce", "boundary"]
"""Kinds of transfers, each of which has a lane: updated parameters to the parameter shard; parameters into a slot;
a micro-batch's gradients into the accumulator; the accumulated ones to the state shard."""

LANES: tuple[LaneKind, ...] = get_args(LaneKind)

SLICES = 16
"""Where two levels overlap, a shard is cut into that many slices: one level starts on a slice when the other has
delivered it, so the first and the last are not overlapped."""

SLICE_BYTES = range(1 << 18, 1 << 20)
"""Shortest and longest slice: shorter ones cost more CPU time than they hide on gloo."""


def slice_bytes(shard_bytes: int) -> int:
    """Length of the slices of a shard; a multiple of every element's size."""
    return min(max(shard_bytes // SLICES, SLICE_BYTES.start), SLICE_BYTES.stop) // 64 * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective over one axis.

    Args:
        operation: what it does.
        axis: over which axis of the layout.
        numel: elements of the whole region: the result of a gather, the input of a reduction.
        wire: dtype of what is sent.
    """

    operation: Operation
    axis: Axis
    numel: int
    wire: str

    @property
    def chunk_numel(self) -> int:
        return -(-self.numel // self.axis.size)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends: [Note: Bytes]. The last chunks of an all-reduce may be shorter, or empty, and with
        them what the ranks of a longer axis send: this is their mean, rounded up, and exact for two."""
        others = self.axis.size - 1
        if self.operation != "all_reduce":
            return others * wire_bytes(self.chunk_numel, self.wire)
        full, rest = divmod(self.numel, max(1, self.chunk_numel))
        chunks = full * wire_bytes(self.chunk_numel, self.wire) + wire_bytes(rest, self.wire)
        return -(-2 * others * chunks // self.axis.size)


def kept_axis(layout: Layout) -> Axis | None:
    """The axis whose gather fills the kept copy: the last of the kept ones to be gathered; None without any."""
    return next((axis for axis in layout.kept_axes if axis.size > 1), None)


def feedback(layout: Layout, buffer: FlatBuffer) -> list[tuple[Transfer, slice]]:
    """The reductions with error feedback, each with its part of the buffer's residuals, in the order of the chain."""
    parts, start = [], 0
    for step in (*reduce_micro(layout, buffer), *reduce_boundary(layout, buffer)):
        if step.axis.wire.feedback:
            parts.append((step, slice(start, start + step.numel)))
            start += step.numel
    return parts


def wire_bytes(numel: int, wire: str) -> int:
    """Bytes of `numel` elements on a wire; quantised ones are padded to whole blocks and carry a scale for each."""
    form = quantised(wire)
    if form is None:
        return numel * ITEM_BYTES[wire]
    blocks = -(-numel // form.block)
    return blocks * (form.block * form.bits // 8 + 4)


def regions(layout: Layout, padded: int, axes: Iterable[Axis]) -> list[tuple[Axis, int]]:
    """Each axis with the length B_a of the region that a collective over it works on; size-1 axes need none."""
    order = layout.significant
    pairs = []
    for axis in axes:
        above = order[: order.index(axis)] if axis in order else order
        if axis.size > 1:
            pairs.append((axis, padded // layout.degree(above)))
    return pairs


def lane_axes(layout: Layout, lane: LaneKind) -> tuple[Axis, ...]:
    """The axes over which a lane sends. No axis is in both lanes of a direction, so that its communicator for that
    direction belongs to one lane."""
    match lane:
        case "refresh":
            return tuple(axis for axis in layout.significant if axis not in layout.param_axes)
        case "unshard":
            return layout.param_axes
        case "reduce":
            return layout.grad_axes
        case "boundary":
            return tuple(axis for axis in layout.axes if axis not in layout.grad_axes)


def lane_transfers(layout: Layout, buffer: FlatBuffer, lane: LaneKind) -> list[Transfer]:
    """What a lane sends of one buffer, in order."""
    made = {"refresh": refresh, "unshard": unshard, "reduce": reduce_micro, "boundary": reduce_boundary}
    return made[lane](layout, buffer)


def unshard(layout: Layout, buffer: FlatBuffer, *, from_kept: bool = False) -> list[Transfer]:
    """Gathers of the parameters, in order; from the kept copy only the axes that are not kept."""
    axes = [axis for axis in reversed(layout.param_axes) if not (from_kept and axis.stage.kept)]
    return _gathers(layout, buffer, axes)


def refresh(layout: Layout, buffer: FlatBuffer) -> list[Transfer]:
    """Gathers of the updated parameters, from the state shard to the parameter shard (stages 1 and 2)."""
    if not buffer.trainable:
        return []
    axes = [axis for axis in reversed(layout.significant) if axis not in layout.param_axes]
    return _gathers(layout, buffer, axes)


def reduce_micro(layout: Layout, buffer: FlatBuffer) -> list[Transfer]:
    """Reductions of one micro-batch's gradient into the gradient shard (stages 2 and 3)."""
    if not buffer.trainable:
        return []
    return _reductions(layout, buffer, "reduce_scatter", layout.grad_axes)


def reduce_boundary(layout: Layout, buffer: FlatBuffer) -> list[Transfer]:
    """Reductions of the accumulated gradient to the state shard: scatter (1, 3d), then all-reduce (0)."""
    if not buffer.trainable:
        return []
    scatter = [axis for axis in layout.significant if axis not in layout.grad_axes]
    inner = layout.scattered_replicas
    steps = [
        *_reductions(layout, buffer, "reduce_scatter", scatter),
        *_reductions(layout, buffer, "all_reduce", [axis for axis in layout.replica_axes if axis not in inner]),
    ]
    for axis in reversed(inner):
        steps = _by_level(steps, axis, layout, buffer)
    return steps


def _by_level(steps: list[Transfer], axis: Axis, layout: Layout, buffer: FlatBuffer) -> list[Transfer]:
    """The all-reduces at the end of `steps` on this rank's chunk over `axis` alone: [Note: By level]."""
    (scatter,) = _reductions(layout, buffer, "reduce_scatter", [axis])
    sums = [step for step in steps if step.axis in layout.replica_axes]
    parts = [replace(step, numel=step.numel // axis.size) for step in sums]
    return [*steps[: len(steps) - len(sums)], scatter, *parts, replace(scatter, operation="all_gather")]


def overlapped(steps: Sequence[Transfer], held: str, *, kept: bool = False) -> list[tuple[Transfer, ...]]:
    """The steps of a chain as `collective=ho_ring` carries them out: neighbours in pairs, both levels at work at once.

    A step has a partner where both scatter, or both gather, lossless and in the dtype of the region, so that nothing is
    copied between them; a chain of gathers with any other wire is staged as a whole and has none.

    Args:
        steps: of `unshard`, `refresh`, `reduce_micro` or `reduce_boundary`.
        held: dtype of the region.
        kept: a copy is kept of what the last of the kept axes has gathered, in memory of its own.
    """
    gathers = all(step.operation == "all_gather" for step in steps)
    if gathers and any(step.wire != held for step in steps):
        return [(step,) for step in steps]
    copied = next((step for step in reversed(steps) if kept and step.axis.stage.kept), None)
    groups: list[tuple[Transfer, ...]] = []
    for step in steps:
        alone = len(groups[-1]) == 1 if groups else False
        if alone and copied not in (groups[-1][0], step) and _follows(groups[-1][0], step, held):
            groups[-1] += (step,)
        else:
            groups.append((step,))
    return groups


def _follows(first: Transfer, second: Transfer, held: str) -> bool:
    return first.operation == second.operation != "all_reduce" and first.wire == second.wire == held


def _gathers(layout: Layout, buffer: FlatBuffer, axes: Sequence[Axis]) -> list[Transfer]:
    return [
        Transfer(operation="all_gather", axis=axis, numel=numel, wire=axis.wire.param or buffer.param_dtype)
        for axis, numel in regions(layout, layout.padded(buffer.numel), axes)
    ]


def _reductions(layout: Layout, buffer: FlatBuffer, operation: Operation, axes: Sequence[Axis]) -> list[Transfer]:
    return [
        Transfer(operation=operation, axis=axis, numel=numel, wire=axis.wire.grad or buffer.reduce_dtype)
        for axis, numel in regions(layout, layout.padded(buffer.numel), axes)
    ]
