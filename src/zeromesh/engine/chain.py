"""Chains of one-axis collectives over one flat buffer, with every view made once.

A chain is a transfer list of the schedule bound to tensors. Gathers grow a region inside its destination, from the
least significant axis to the most; reductions shrink one, the other way. Where a wire's dtype is not the buffer's, the
region passes through staging memory; quantised wires take it as it is, by pieces.

Parameters are quantised to the nearest code: every rank holds the same copy, and its error does not add up. Gradients
are rounded stochastically: their errors add up over steps, and so must have mean zero. With error feedback (`+ef`) they
are rounded to nearest, which errs half as much: what is lost is owed, and sent with the next gradient.

A kept copy is held as it came over the wire of the last gather that fills it: on a quantised wire that is the messages
of all ranks of the axis, which the backward's gather restores first.

Neighbours that a route has put together are one call of the strategy's collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from zeromesh.comm import AxisGroup, all_gather, all_reduce, reduce_scatter, sums_natively
from zeromesh.comm.collectives import own_chunk
from zeromesh.comm.quantised import (
    check_quantisable,
    noise_generator,
    quantised_all_gather,
    quantised_all_reduce,
    quantised_reduce_scatter,
    restore_kept,
)
from zeromesh.engine.flat import FlatShards, Homes, inside
from zeromesh.engine.units import DTYPES
from zeromesh.errors import InputError, NotationError
from zeromesh.schedule import FROZEN_BYTES, ITEM_BYTES, LaneKind, Route, Transfer, Unit, place
from zeromesh.strategy import Collective, Layout
from zeromesh.wires import WireFormat

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
    form: WireFormat | None
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
    form: WireFormat

    def run(self, workspace: Tensor) -> None:
        restore_kept(self.messages, self.region, self.group, self.form, workspace=workspace)


@dataclass(frozen=True, slots=True)
class GatherPair:
    """Two gathers of which the second's own chunk is the first's region, at once."""

    collective: Collective
    minor: Gather
    major: Gather

    def run(self, workspace: Tensor) -> None:
        if self.minor.source is not None:
            self.minor.own.copy_(self.minor.source)
        self.collective.all_gather(self.major.region, self.major.group, self.minor.group, reduced=False)


@dataclass(frozen=True, slots=True)
class GatherChain:
    """Gathers in order; `last` is copied into `destination` if the chain ended elsewhere. `restore` comes first."""

    steps: tuple[Gather | GatherPair, ...]
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
    placed, whole = shards.placed, slice(0, shards.padded)
    if not from_kept or shards.kept is None:
        route = placed.routes["unshard"]
        return _gather_chain(shards, route, shards.params, shards.full, whole, groups, scratch, shards.kept)
    restore = _restore(shards, groups) if placed.keeps_messages else None
    source = shards.kept if restore is None else restore.region
    chain = _gather_chain(shards, placed.from_kept, source, shards.full, whole, groups, scratch, None)
    return replace(chain, restore=restore)


def _restore(shards: FlatShards, groups: Groups) -> Restore:
    """From the kept messages into the part of `full` that the gather over the kept axes filled."""
    placed = shards.placed
    step = next(s for s in placed.routes["unshard"].steps if s.axis is placed.kept_axis)
    form = step.form
    assert shards.kept is not None and form is not None
    region = shards.full[placed.region(step, shards.coordinates)]
    return Restore(shards.kept, region, groups[step.axis.name], form)


def refresh_chain(shards: FlatShards, groups: Groups, scratch: Scratch) -> GatherChain | None:
    """Casts `master` and gathers it into `params`; None if nothing is left to do."""
    route = shards.placed.routes["refresh"]
    if shards.master is None or (shards.master_in_params and not route.steps):
        return None
    # The alias keeps autograd's version counter out of it: no graph outlives the optimizer's step.
    return _gather_chain(shards, route, shards.master, shards.params.data, shards.param_range, groups, scratch, None)


def _gather_chain(
    shards: FlatShards,
    route: Route,
    source: Tensor,
    destination: Tensor,
    held: slice,
    groups: Groups,
    scratch: Scratch,
    kept: Tensor | None,
) -> GatherChain:
    """Along `route`, in `destination`, which covers `held` of the buffer."""
    placed, steps = shards.placed, list[Gather]()

    def sent(values: Tensor) -> Tensor:
        """Codes as bytes: backends know fewer dtypes than torch."""
        return values.view(torch.uint8) if placed.buffer.param_dtype in FROZEN_BYTES else values

    current = sent(source)
    for step in route.steps:
        region, keep = sent(inside(destination, held, placed.region(step, shards.coordinates))), None
        if kept is not None and step.axis is placed.kept_axis:
            region, keep = (region, kept) if placed.keeps_messages else (sent(kept), None)
        elif step in route.staged:
            region = scratch.region(step.numel, DTYPES[step.wire])
        group = groups[step.axis.name]
        own = own_chunk(region, group)
        moved = None if _same(own, current) else current
        steps.append(Gather(group, region, own, moved, step.form, keep))
        current = region
    todo, end = iter(steps), sent(destination)
    last = None if _same(end, current) else current
    grouped = [[next(todo) for _ in group] for group in route.groups]
    together = tuple(GatherPair(placed.layout.collective, *pair) if len(pair) > 1 else pair[0] for pair in grouped)
    return GatherChain(together, end, last, scratch.workspace)


def require_wires(
    layouts: Mapping[str, Layout], units: Iterable[Unit], repeated: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuses wires that no chain can be made of, while the model is still as it was given.

    Args:
        layouts: of the model, under "", and of its parts.
        units: of the model.
        repeated: by part, a parameter that ranks beyond the mesh have too, each in a buffer of its own.

    Raises:
        InputError: an axis cannot quantise these values, or would make copies drift apart.
        NotationError: a gather would stage regions of two widths.
    """
    for placed in {placed for unit in place(layouts[""], units, layouts) for placed in unit}:
        _require_one_width(placed.routes["unshard"])
        _require_one_width(placed.routes["refresh"])
        for route in placed.routes.values():
            for step in route.steps:
                if step.form is not None:
                    check_quantisable(DTYPES[route.held], step.axis.name)
                    if placed.buffer.part in repeated:
                        raise InputError(
                            f"axis {step.axis.name} cannot quantise what it sends: {repeated[placed.buffer.part]} is "
                            f"the same on ranks that other parameters are divided over (tensor parallelism), and each "
                            f"would round its own copy differently, so that they drift apart: use wires in fp32 or bf16"
                        )


def _require_one_width(route: Route) -> None:
    """Staged regions lie in the same memory: a rank's chunk of the next one is where the one before left it, or beside
    that. Of another width it would overlap."""
    wires = dict.fromkeys(step.wire for step in route.staged)
    if len({ITEM_BYTES[wire] for wire in wires}) > 1:
        raise NotationError(
            f"parameters in {route.held} cannot be gathered over axes in {' and in '.join(wires)}, of other "
            f"widths: give these axes one wire dtype, or let one of them have the parameters' own"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


@dataclass(frozen=True, slots=True)
class Reduce:
    """One step of a reduction, of `region` into `out`; through `staged`, in the wire's dtype, if that is another or if
    they share memory in two."""

    operation: str
    group: AxisGroup
    region: Tensor
    staged: Tensor | None
    out: Tensor
    accumulates: bool
    form: WireFormat | None
    noise: torch.Generator | None
    owed: Tensor | None
    scale: float

    @property
    def native(self) -> bool:
        """Whether it is the backend's own reduction, in place."""
        wire = self.region if self.staged is None else self.staged
        return self.form is None and sums_natively(self.operation, wire.dtype, self.group)

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
            self.out.copy_(wire)

    def _run_quantised(self, form: WireFormat, workspace: Tensor, add: bool) -> None:
        options: dict[str, Any] = {"scale": self.scale, "residual": self.owed, "generator": self.noise}
        if self.operation == "all_reduce":
            quantised_all_reduce(self.region, self.group, form, workspace=workspace, **options)
        else:
            quantised_reduce_scatter(
                self.region, self.out, self.group, form, workspace=workspace, accumulate=add, **options
            )


@dataclass(frozen=True, slots=True)
class ReducePair:
    """Two reduce-scatters, `major` first, or two gathers of their sum, `minor` first, at once."""

    collective: Collective
    major: Reduce
    minor: Reduce

    @property
    def operation(self) -> str:
        return self.major.operation

    def run(self, workspace: Tensor, accumulate: bool) -> None:
        major, minor = self.major, self.minor
        if self.operation == "all_gather":
            self.collective.all_gather(major.region, major.group, minor.group, reduced=True)
            return
        self.collective.reduce_scatter(
            major.region,
            minor.out,
            major.group,
            minor.group,
            workspace=workspace,
            scales=(major.scale, minor.scale),
            accumulate=accumulate and minor.accumulates,
        )


@dataclass(frozen=True, slots=True)
class ReduceChain:
    """A unit's reductions of one buffer: a micro-batch's into the accumulator, and the boundary's from there.

    Each axis averages over its ranks as it sums: fp16 wires then never carry a sum larger than the gradient. Where the
    backend sums in place, though, that would be a pass over the memory of its own; what comes before scales instead.
    So it does for ranks that the axes do not reach, where a part of the model is shared by fewer than feed it.

    Args:
        micro, boundary: steps of the two lanes, each with its memory.
        alone: where gradients that nothing is added to are copied to: [Note: Alone] of `zeromesh.schedule.placed`.
        boundary_alone: the boundary's steps from there.
        first: factor that whoever fills the chain's source gives to it, on the way.
    """

    micro: tuple[Reduce | ReducePair, ...]
    boundary: tuple[Reduce | ReducePair, ...]
    alone: Homes
    boundary_alone: tuple[Reduce | ReducePair, ...]
    micro_scratch: Scratch
    boundary_scratch: Scratch
    first: float

    def run_micro(self, *, accumulate: bool) -> None:
        for step in self.micro:
            step.run(self.micro_scratch.workspace, accumulate)

    def run_boundary(self, *, alone: bool) -> None:
        for step in self.boundary_alone if alone else self.boundary:
            step.run(self.boundary_scratch.workspace, accumulate=False)


def reduce_chain(
    shards: FlatShards, groups: Groups, scratch: Mapping[LaneKind, Scratch], accumulator: Tensor
) -> ReduceChain:
    """From `waiting` into `accumulator` (of the gradient shard's length), and on to its state shard's part."""
    early, late = shards.placed.routes["reduce"], shards.placed.routes["boundary"]
    steps: list[Reduce] = []
    source = shards.waiting
    owed = {} if shards.owed is None else {axis: shards.owed[part] for axis, part in shards.placed.feedback.items()}
    for step in early.steps:
        assert source is not None
        into = accumulator if step is early.steps[-1] else None
        steps.append(_reduction(step, source, groups, scratch["reduce"], into, owed.get(step.axis.name), shards))
        source = steps[-1].out
    current, scattered = accumulator, dict[str, Tensor]()
    for step in late.steps:
        if step.operation == "all_gather":  # back to the region that was scattered over the same axis
            current = scattered[step.axis.name]
        scattered[step.axis.name] = current
        steps.append(_reduction(step, current, groups, scratch["boundary"], None, owed.get(step.axis.name), shards))
        current = steps[-1].out
    first, steps = _scaled_early(steps)
    first *= shards.placed.layout.share
    todo, collective = iter(steps), shards.placed.layout.collective
    micro, boundary = (
        tuple(_together(collective, [next(todo) for _ in group]) for group in r.groups) for r in (early, late)
    )
    alone, boundary_alone = _alone(shards, boundary)
    return ReduceChain(micro, boundary, alone, boundary_alone, scratch["reduce"], scratch["boundary"], first)


def _alone(
    shards: FlatShards, boundary: tuple[Reduce | ReducePair, ...]
) -> tuple[Homes, tuple[Reduce | ReducePair, ...]]:
    """Where gradients that nothing is added to are copied to, and the boundary's steps from there: at the end of the
    accumulator that is apart from what the first of them writes, so that it may send from there; through its staging
    memory if neither end is."""
    whole, dtype = shards.collected, DTYPES[shards.placed.collected_dtype(alone=True)]
    if dtype == whole.dtype:
        return shards.homes, boundary
    first, *rest = boundary
    assert isinstance(first, Reduce)  # a pair has no wire of its own
    cut = whole.view(dtype)
    ends = cut[: shards.padded], cut[-shards.padded :]
    free = next((end for end in ends if _apart(end, first.out)), None)
    first = replace(first, region=ends[0]) if free is None else replace(first, region=free, staged=None)
    return shards.homes_in(first.region), (first, *rest)


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors have no memory in common."""
    first, second = sorted((one, other), key=Tensor.data_ptr)
    return first.data_ptr() + first.nbytes <= second.data_ptr()


def _together(collective: Collective, steps: Sequence[Reduce]) -> Reduce | ReducePair:
    if len(steps) == 1:
        return steps[0]
    first, second = steps
    pair = (second, first) if first.operation == "all_gather" else (first, second)
    return ReducePair(collective, *pair)


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
    out = into if into is not None else (own_chunk(region, group) if scatter else region)
    form = step.form
    noise = None
    if form is not None and form.stochastic:
        # One for all chains of the buffer: begun anew, it would round each backward's gradient the same way.
        noise = shards.noise.setdefault(group.name, noise_generator(group, shards.name))
    scale = 1.0 if step.operation == "all_gather" else 1 / group.size
    return Reduce(step.operation, group, region, staged, out, into is not None, form, noise, owed, scale)
