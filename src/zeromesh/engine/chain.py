"""Chains of one-axis collectives over one flat buffer, with every view made once.

A chain is a transfer list of the schedule bound to tensors. Gathers grow a region inside its destination, from the
least significant axis to the most; reductions shrink one, the other way. Where a wire's dtype is not the buffer's, the
region passes through staging memory; quantised wires take it as it is, by pieces.

Parameters are quantised to the nearest code: every rank holds the same copy, and its error does not add up. Gradients
are rounded stochastically: their errors add up over steps, and so must have mean zero. With error feedback (`+ef`) they
are rounded to nearest, which errs half as much: what is lost is owed, and sent with the next gradient.

A kept copy is held as it came over the wire of the last gather that fills it: on a quantised wire that is the messages
of all ranks of the axis, which the backward's gather restores first.

With `collective=ho_ring` neighbours in a chain run overlapped where both are lossless and nothing is copied between
them; the values are the same to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zeromesh.comm import (
    AxisGroup,
    all_gather,
    all_reduce,
    ho_ring_all_gather,
    ho_ring_reduce_scatter,
    reduce_scatter,
    sums_in_place,
)
from zeromesh.comm.quantise import QuantFormat
from zeromesh.comm.quantised import (
    check_quantisable,
    noise_generator,
    quantised_all_gather,
    quantised_all_reduce,
    quantised_reduce_scatter,
    restore_kept,
)
from zeromesh.engine.flat import FlatShards
from zeromesh.engine.units import DTYPE_NAMES, DTYPES
from zeromesh.errors import NotationError
from zeromesh.schedule import LaneKind, Transfer, Unit, transfer
from zeromesh.schedule.memory import slot_dtype
from zeromesh.strategy import Axis, Layout
from zeromesh.strategy.stage import quantised

Groups = Mapping[str, AxisGroup]


@dataclass(slots=True)
class Scratch:
    """Memory that one lane's jobs share, one job at a time.

    Args:
        staging: bytes for regions in a wire's dtype.
        workspace: bytes for the collectives.
    """

    staging: Tensor
    workspace: Tensor

    def region(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.staging[: numel * dtype.itemsize].view(dtype)


@dataclass(frozen=True, slots=True)
class Gather:
    """One gather of a chain: `source` into `own`, this rank's chunk of `region`, then all chunks from the others."""

    group: AxisGroup
    region: Tensor
    own: Tensor
    source: Tensor | None
    form: QuantFormat | None
    keep: Tensor | None = None

    def run(self, workspace: Tensor) -> None:
        if self.source is not None:
            self.own.copy_(self.source)
        if self.form is None:
            all_gather(self.region, self.group)
        else:
            quantised_all_gather(self.region, self.group, self.form, workspace=workspace, keep=self.keep)


@dataclass(frozen=True, slots=True)
class Restore:
    """`region` from the messages that an earlier gather over `group` kept."""

    messages: Tensor
    region: Tensor
    group: AxisGroup
    form: QuantFormat

    def run(self, workspace: Tensor) -> None:
        restore_kept(self.messages, self.region, self.group, self.form, workspace=workspace)


@dataclass(frozen=True, slots=True)
class OverlappedGather:
    """Two gathers of which the second's own chunk is the first's region, both levels at work at once."""

    minor: Gather
    major: Gather

    def run(self, workspace: Tensor) -> None:
        if self.minor.source is not None:
            self.minor.own.copy_(self.minor.source)
        ho_ring_all_gather(self.major.region, self.major.group, self.minor.group)


def _overlap_gathers(steps: Sequence[Gather]) -> Iterator[Gather | OverlappedGather]:
    """The same gathers, neighbours overlapped where one works inside the other; a copy between them forbids it."""
    todo = deque(steps)
    while todo:
        step = todo.popleft()
        inside = bool(todo) and todo[0].source is None and step.form is None and todo[0].form is None
        yield OverlappedGather(step, todo.popleft()) if inside else step


@dataclass(frozen=True, slots=True)
class GatherChain:
    """Gathers in order; `last` is copied into `destination` if the chain ended elsewhere. `restore` comes first."""

    steps: tuple[Gather | OverlappedGather, ...]
    destination: Tensor
    last: Tensor | None
    workspace: Tensor
    restore: Restore | None = None

    def run(self) -> None:
        if self.restore is not None:
            self.restore.run(self.workspace)
        for step in self.steps:
            step.run(self.workspace)
        if self.last is not None:
            self.destination.copy_(self.last)


def unshard_chain(shards: FlatShards, groups: Groups, scratch: Scratch, *, from_kept: bool) -> GatherChain:
    """Gathers `params` (or `kept`) into `full`, filling `kept` on the way."""
    steps = transfer.unshard(shards.layout, shards.spec, from_kept=from_kept)
    whole = slice(0, shards.padded)
    if not from_kept or shards.kept is None:
        return _gather_chain(shards, steps, shards.params, shards.full, whole, groups, scratch, shards.kept)
    if shards.kept.dtype != torch.uint8:
        return _gather_chain(shards, steps, shards.kept, shards.full, whole, groups, scratch, None)
    restore = _restore(shards, groups)
    chain = _gather_chain(shards, steps, restore.region, shards.full, whole, groups, scratch, None)
    return replace(chain, restore=restore)


def _restore(shards: FlatShards, groups: Groups) -> Restore:
    """From the kept messages into the part of `full` that the gather over the kept axes filled."""
    axis = transfer.kept_axis(shards.layout)
    assert axis is not None and shards.kept is not None
    step = next(s for s in transfer.unshard(shards.layout, shards.spec) if s.axis is axis)
    region = _region(shards, shards.full, slice(0, shards.padded), step)
    return Restore(shards.kept, region, groups[axis.name], QuantFormat.of(step.wire))


def refresh_chain(shards: FlatShards, groups: Groups, scratch: Scratch) -> GatherChain | None:
    """Casts `master` and gathers it into `params`; None if nothing is left to do."""
    steps = transfer.refresh(shards.layout, shards.spec)
    if shards.master is None or (shards.master_in_params and not steps):
        return None
    # The alias keeps autograd's version counter out of it: no graph outlives the optimizer's step.
    return _gather_chain(shards, steps, shards.master, shards.params.data, shards.param_range, groups, scratch, None)


def _gather_chain(
    shards: FlatShards,
    transfers: Sequence[Transfer],
    source: Tensor,
    destination: Tensor,
    held: slice,
    groups: Groups,
    scratch: Scratch,
    kept: Tensor | None,
) -> GatherChain:
    steps, current = [], source
    for step in transfers:
        region, keep = _region(shards, destination, held, step), None
        if kept is not None and step.axis is transfer.kept_axis(shards.layout):
            if kept.dtype == torch.uint8:
                keep = kept
            else:
                region = kept
        elif DTYPES.get(step.wire, destination.dtype) != destination.dtype:
            region = scratch.region(step.numel, DTYPES[step.wire])
        group = groups[step.axis.name]
        own = _own_chunk(region, group)
        form = _form(step, stochastic=False)
        steps.append(Gather(group, region, own, None if _same(own, current) else current, form, keep))
        current = region
    last = None if _same(destination, current) else current
    # Not where regions are staged: whether one lies inside the next would then depend on the rank.
    staged = any(DTYPES.get(step.wire) != destination.dtype for step in transfers)
    overlapped = shards.layout.strategy.collective == "ho_ring" and not staged
    return GatherChain(tuple(_overlap_gathers(steps) if overlapped else steps), destination, last, scratch.workspace)


def require_wires(layout: Layout, units: Iterable[Unit], device_type: str) -> None:
    """Refuses wires that no chain can be made of, while the model is still as it was given.

    Raises:
        InputError: an axis cannot quantise these values, or not on this device.
        NotationError: a gather would stage regions of two widths.
    """
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        held = DTYPES[buffer.param_dtype]
        for gathers in (transfer.unshard(layout, buffer), transfer.refresh(layout, buffer)):
            _require_one_width(gathers, held)
            _require_quantisable(gathers, held, device_type)
        if buffer.trainable:
            waiting, summed = DTYPES[slot_dtype(layout, buffer)], DTYPES[buffer.grad_dtype]
            _require_quantisable(transfer.reduce_micro(layout, buffer), waiting, device_type)
            _require_quantisable(transfer.reduce_boundary(layout, buffer), summed, device_type)


def _require_one_width(transfers: Sequence[Transfer], dtype: torch.dtype) -> None:
    """Staged regions lie in the same memory: a rank's chunk of the next one is where the one before left it, or beside
    that. Of another width it would overlap."""
    staged = {step.wire: DTYPES[step.wire] for step in transfers if DTYPES.get(step.wire, dtype) != dtype}
    if len({wire.itemsize for wire in staged.values()}) > 1:
        raise NotationError(
            f"parameters in {DTYPE_NAMES[dtype]} cannot be gathered over axes in {' and in '.join(staged)}, of other "
            f"widths: give these axes one wire dtype, or let one of them have the parameters' own"
        )


def _require_quantisable(transfers: Sequence[Transfer], dtype: torch.dtype, device_type: str) -> None:
    for step in transfers:
        if quantised(step.wire):
            check_quantisable(dtype, step.axis.name, device_type)


def _form(step: Transfer, *, stochastic: bool) -> QuantFormat | None:
    """The quantised format of a transfer; None for a lossless wire."""
    return QuantFormat.of(step.wire, stochastic=stochastic) if quantised(step.wire) else None


def _region(shards: FlatShards, buffer: Tensor, held: slice, step: Transfer) -> Tensor:
    """The region of `buffer`, which covers `held`, that this rank's collective over `step.axis` works on."""
    order: tuple[Axis, ...] = shards.layout.significant
    above = order[: order.index(step.axis)] if step.axis in order else order
    region = shards.layout.shard(shards.padded, above, shards.coordinates)
    return buffer[region.start - held.start : region.stop - held.start]


def _own_chunk(region: Tensor, group: AxisGroup) -> Tensor:
    length = region.numel() // group.size
    return region[group.rank * length : (group.rank + 1) * length]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


@dataclass(frozen=True, slots=True)
class Reduce:
    """One step of a reduction, of `region` (through `staged` if the wire has another dtype) into `out`."""

    operation: str
    group: AxisGroup
    region: Tensor
    staged: Tensor | None
    out: Tensor
    accumulates: bool
    form: QuantFormat | None
    noise: torch.Generator | None
    owed: Tensor | None
    scale: float

    @property
    def native(self) -> bool:
        """Whether it is the backend's own all-reduce, in place."""
        wire = self.region if self.staged is None else self.staged
        return self.operation == "all_reduce" and self.form is None and sums_in_place(wire.dtype)

    @property
    def plain(self) -> bool:
        """Whether it is lossless and in the region's own dtype."""
        return self.form is None and self.staged is None

    def leads_to(self, other: Reduce) -> bool:
        """Whether both can work at once: scatters, the other on what this one leaves, or gathers of the sum, the other
        with this one's region as its chunk."""
        if not (self.plain and other.plain and self.operation == other.operation != "all_reduce"):
            return False
        if self.operation == "reduce_scatter":
            return _same(self.out, other.region)
        return _same(self.region, _own_chunk(other.region, other.group))

    def run(self, workspace: Tensor, accumulate: bool) -> None:
        add = accumulate and self.accumulates
        if self.form is not None:
            self._run_quantised(self.form, workspace, add)
            return
        wire = self.region
        if self.staged is not None:
            wire = self.staged
            wire.copy_(self.region)
        if self.operation == "reduce_scatter":
            reduce_scatter(wire, self.out, self.group, workspace=workspace, scale=self.scale, accumulate=add)
            return
        if self.operation == "all_reduce":
            all_reduce(wire, self.group, workspace=workspace, scale=self.scale)
        else:
            all_gather(wire, self.group, reduced=True)
        if self.staged is not None:
            self.region.copy_(wire)

    def _run_quantised(self, form: QuantFormat, workspace: Tensor, add: bool) -> None:
        scale, noise = self.scale, self.noise
        if self.operation == "all_reduce":
            quantised_all_reduce(
                self.region,
                self.group,
                form,
                workspace=workspace,
                scale=scale,
                residual=self.owed,
                generator=noise,
            )
        else:
            quantised_reduce_scatter(
                self.region,
                self.out,
                self.group,
                form,
                workspace=workspace,
                scale=scale,
                accumulate=add,
                residual=self.owed,
                generator=noise,
            )


@dataclass(frozen=True, slots=True)
class OverlappedReduce:
    """Two reduce-scatters, `major` first, or two gathers of their sum, `minor` first, both levels at work at once."""

    major: Reduce
    minor: Reduce

    @property
    def operation(self) -> str:
        return self.major.operation

    def run(self, workspace: Tensor, accumulate: bool) -> None:
        major, minor = self.major, self.minor
        if self.operation == "all_gather":
            ho_ring_all_gather(major.region, major.group, minor.group, reduced=True)
            return
        ho_ring_reduce_scatter(
            major.region,
            minor.out,
            major.group,
            minor.group,
            workspace=workspace,
            scales=(major.scale, minor.scale),
            accumulate=accumulate and minor.accumulates,
        )


def _overlap_reductions(steps: Sequence[Reduce]) -> Iterator[Reduce | OverlappedReduce]:
    """The same reductions, neighbours overlapped where one leads to the other."""
    todo = deque(steps)
    while todo:
        step = todo.popleft()
        if not (todo and step.leads_to(todo[0])):
            yield step
        elif step.operation == "all_gather":
            yield OverlappedReduce(major=todo.popleft(), minor=step)
        else:
            yield OverlappedReduce(major=step, minor=todo.popleft())


@dataclass(frozen=True, slots=True)
class ReduceChain:
    """A unit's reductions of one buffer: a micro-batch's into the accumulator, and the boundary's from there.

    Each axis averages over its ranks as it sums: fp16 wires then never carry a sum larger than the gradient. Where the
    backend sums in place, though, that would be a pass over the memory of its own; what comes before scales instead.

    Args:
        micro, boundary: steps of the two lanes, each with its memory.
        first: factor that whoever fills the chain's source gives to it, on the way.
    """

    micro: tuple[Reduce | OverlappedReduce, ...]
    boundary: tuple[Reduce | OverlappedReduce, ...]
    micro_scratch: Scratch
    boundary_scratch: Scratch
    first: float

    def run_micro(self, *, accumulate: bool) -> None:
        for step in self.micro:
            step.run(self.micro_scratch.workspace, accumulate)

    def run_boundary(self) -> None:
        for step in self.boundary:
            step.run(self.boundary_scratch.workspace, accumulate=False)


def reduce_chain(
    shards: FlatShards, groups: Groups, scratch: Mapping[LaneKind, Scratch], accumulator: Tensor
) -> ReduceChain:
    """From `waiting` into `accumulator` (of the gradient shard's length), and on to its state shard's part."""
    micro: list[Reduce] = []
    transfers = transfer.reduce_micro(shards.layout, shards.spec)
    current = shards.waiting
    owed = _owed(shards)
    for step in transfers:
        assert current is not None
        into = accumulator if step is transfers[-1] else None
        reduction = _reduction(step, current, groups, scratch["reduce"], into, owed.get(step.axis.name), shards)
        micro.append(reduction)
        current = reduction.out
    boundary: list[Reduce] = []
    current = accumulator
    for step in transfer.reduce_boundary(shards.layout, shards.spec):
        if step.operation == "all_gather":  # back to the region that was scattered over the same axis
            current = next(before.region for before in boundary if before.group.name == step.axis.name)
        reduction = _reduction(step, current, groups, scratch["boundary"], None, owed.get(step.axis.name), shards)
        boundary.append(reduction)
        current = reduction.out
    first, steps = _scaled_early([*micro, *boundary])
    overlapping = shards.layout.strategy.collective == "ho_ring"
    early, late = (
        tuple(_overlap_reductions(part) if overlapping else part) for part in (steps[: len(micro)], steps[len(micro) :])
    )
    return ReduceChain(early, late, scratch["reduce"], scratch["boundary"], first)


def _owed(shards: FlatShards) -> dict[str, Tensor]:
    """What error feedback owes, by axis."""
    if shards.owed is None:
        return {}
    return {step.axis.name: shards.owed[part] for step, part in transfer.feedback(shards.layout, shards.spec)}


def _scaled_early(steps: Sequence[Reduce]) -> tuple[float, list[Reduce]]:
    """The same steps, those that the backend sums in place with their factor at the step before, or before all."""
    factor, scaled = 1.0, deque[Reduce]()
    for step in reversed(steps):
        factor *= step.scale
        scaled.appendleft(replace(step, scale=1.0 if step.native else factor))
        factor = factor if step.native else 1.0
    return factor, list(scaled)


def _reduction(
    step: Transfer,
    region: Tensor,
    groups: Groups,
    scratch: Scratch,
    into: Tensor | None,
    owed: Tensor | None,
    shards: FlatShards,
) -> Reduce:
    group = groups[step.axis.name]
    wire = DTYPES.get(step.wire, region.dtype)
    staged = None if wire == region.dtype else scratch.region(step.numel, wire)
    scatter = step.operation == "reduce_scatter"
    out = into if into is not None else (_own_chunk(region, group) if scatter else region)
    form = _form(step, stochastic=owed is None)
    noise = None
    if form is not None and form.stochastic:
        # One for all chains of the buffer: begun anew, it would round each backward's gradient the same way.
        noise = shards.noise.setdefault(group.name, noise_generator(group, shards.name))
    scale = 1.0 if step.operation == "all_gather" else 1 / group.size
    return Reduce(step.operation, group, region, staged, out, into is not None, form, noise, owed, scale)
