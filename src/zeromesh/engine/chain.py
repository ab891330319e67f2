"""Chains of collectives over one flat buffer, with every view made once.

A chain is a transfer list of the schedule bound to tensors. Gathers grow a region inside their destination, from the
least significant axis to the most; reductions shrink one, the other way. Where a wire's dtype is not the buffer's, the
region passes through staging memory; quantised wires take it as it is, by pieces.

Parameters are quantised to the nearest code: every rank holds the same copy, and its error does not add up. Gradients
are rounded stochastically: their errors add up over steps, and so must have mean zero. With error feedback (`+ef`) they
are rounded to nearest, which errs half as much: the loss is owed, and sent with the next gradient.

A kept copy is held as it came over the wire of the last gather that fills it: on a quantised wire those are the
messages of all ranks of the axis, which the backward's gather restores first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zeromesh.collectives import runnable
from zeromesh.comm.collectives import all_gather, all_reduce, reduce_scatter
from zeromesh.comm.exchange import AxisGroup, Chain, Copy, Step, own_chunk
from zeromesh.engine.flat import FlatShards, GradDestinations, inside
from zeromesh.engine.units import DTYPES
from zeromesh.schedule.buffer_layout import Route
from zeromesh.schedule.lanes import Lanes, in_lanes, side_by_side
from zeromesh.schedule.transfer import RouteKind, Transfer
from zeromesh.schedule.unit import FROZEN_BYTES

if TYPE_CHECKING:
    from zeromesh.comm.host import HostLink


@dataclass(slots=True)
class Scratch:
    """Memory that one lane's jobs share, one job at a time."""

    staging: Tensor  # bytes for regions in a wire's dtype
    workspace: Tensor

    def region(self, numel: int, dtype: torch.dtype, start: int = 0) -> Tensor:
        return self.staging[start : start + numel * dtype.itemsize].view(dtype)


ByLane = tuple[tuple[str, Chain], ...]
"""A chain cut up by lane, each part after the one before."""


def by_lane(chains: Iterable[Chain], default: str) -> ByLane:
    """The chains of several buffers as one; steps of no lane are in the `default` one."""
    parts = side_by_side(in_lanes(chain, attrgetter("lane"), default) for chain in chains)
    return tuple((lane, tuple(steps)) for lane, steps in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceChains:
    """A unit's reductions of one buffer: a micro-batch's into the accumulator, and the boundary's from there.

    Each axis averages over its ranks as it sums: fp16 wires then never carry a sum larger than the gradient. Where the
    backend sums in place, and has no such mean, the step before it scales instead. Ranks that the axes do not reach,
    where a part of the model is shared by fewer than feed it, count in the last step's factor."""

    micro: ByLane
    boundary: ByLane
    alone: GradDestinations  # of gradients that nothing is added to: [Note: Alone] of `zeromesh.schedule.buffer_layout`
    boundary_alone: ByLane  # the boundary's steps from there
    first: float  # factor that whoever fills the chain's source gives to it, on the way
    micro_down: ByLane = ()  # to the host, the sum of micro-batches
    up: ByLane = ()  # from there, the sum of those before, added to a micro-batch's
    down: ByLane = ()  # to the host, the state shard's part


@dataclass(frozen=True, slots=True)
class Binding:
    """Binds the transfers of one flat buffer to its tensors."""

    shards: FlatShards
    groups: Mapping[str, AxisGroup]
    lanes: Lanes
    scratch: Mapping[str, Scratch]  # by lane
    host: HostLink | None  # where anything lies in its memory

    def _lane(self, step: Transfer) -> tuple[str, Scratch]:
        name = self.lanes.lane(step.direction, step.axis.name)
        return name, self.scratch[name]

    @property
    def _link(self) -> HostLink:
        assert self.host is not None  # a route copies only where there is one
        return self.host

    def unshard(self, *, from_kept: bool) -> Chain:
        """Gathers `params` (or `kept`) into `full`, filling `kept` on the way."""
        shards, placed = self.shards, self.shards.placed
        route, own = placed.routes["unshard"], shards.full[shards.param_range]
        gathers = partial(self._gathers, destination=shards.full, held=slice(0, shards.padded))
        kept_step = next((step for step in route.steps if step.axis is placed.kept_axis), None)
        if shards.kept is None or kept_step is None:
            return self._brought(shards.params, own, route, gathers)
        region = shards.full[placed.region(kept_step, shards.coordinates)]
        if not from_kept:
            gathers = gathers if route.down else partial(gathers, kept=shards.kept)
            chain = self._brought(shards.params, own, route, gathers)
            return (*chain, self._link.step("down", shards.kept, region)) if route.down else chain
        if not placed.keeps_messages:
            return self._brought(shards.kept, region, placed.from_kept, gathers)
        from zeromesh.comm.quantised import restore_kept  # a quantised wire is asked for by name

        # The messages give back the part of `full` that the gather over the kept axis filled.
        assert kept_step.form is not None
        group, (lane, scratch) = self.groups[kept_step.axis.name], self._lane(kept_step)
        restore = partial(restore_kept, shards.kept, region, group, kept_step.form, workspace=scratch.workspace)
        return (Step(lane=lane, call=restore), *gathers(placed.from_kept, region))

    def refresh(self) -> Chain:
        """Casts `master` and gathers it into `params`; empty if nothing is left to do."""
        shards, route, held = self.shards, self.shards.placed.routes["refresh"], self.shards.param_range
        source = shards.master
        if source is None or (shards.master_in_params and not route.steps):
            return ()
        # The alias keeps autograd's version counter out of it: no graph outlives the optimizer's step.
        params = destination = shards.params.data
        cast: Copy | None = None
        if shards.placed.streamed:
            source = inside(params, held, shards.state_range)  # which a step, or `bring`, has filled
        if route.up is not None:
            compute = inside(params, held, shards.state_range) if route.down else shards.cast
            if compute is not None and not _same(compute, source):
                cast, source = (compute, source), compute
            if route.down:
                _, scratch = self._lane(route.steps[0])
                destination = scratch.region(route.passing, params.dtype)
        gathers = partial(self._gathers, destination=destination, held=held)
        chain = self._brought(source, inside(destination, held, shards.state_range), route, gathers, cast)
        return (*chain, self._link.step("down", params, destination, aside=False)) if route.down else chain

    def _brought(
        self, source: Tensor, lands: Tensor, route: Route, gathers: Callable[..., Chain], cast: Copy | None = None
    ) -> Chain:
        """The gathers of `source`; if it lies on the host, after a copy up to where it `lands`, and a `cast` before
        that. Where that is memory of the lane, which does one job at a time, the copy is a part of the job."""
        if route.up is None:
            return gathers(route, source)
        return (self._link.step("up", lands, source, before=cast, aside=not route.passing), *gathers(route, lands))

    def _gathers(
        self,
        route: Route,
        source: Tensor,
        *,
        destination: Tensor,
        held: slice,
        kept: Tensor | None = None,
    ) -> Chain:
        """Along `route`, in `destination`, which covers `held` of the buffer."""
        placed = self.shards.placed

        def sent(values: Tensor) -> Tensor:
            """Codes as bytes: backends know fewer dtypes than torch."""
            return values.view(torch.uint8) if placed.buffer.param_dtype in FROZEN_BYTES else values

        chain, current, end = list[Step](), sent(source), sent(destination)
        for step in route.steps:
            lane, scratch = self._lane(step)
            region = sent(inside(destination, held, placed.region(step, self.shards.coordinates)))
            work, keep = region, None
            if kept is not None and step.axis is placed.kept_axis:
                work, keep = (region, kept) if placed.keeps_messages else (sent(kept), None)
            elif step in route.staged:  # only for this step: the next one may be in another lane
                work = scratch.region(step.numel, DTYPES[step.wire], route.passing_bytes)
            group = self.groups[step.axis.name]
            own = own_chunk(work, group)
            before = None if _same(own, current) else (own, current)
            after = None if work is region else (region, work)
            current = region
            call = partial(all_gather, work, group)
            if step.form is not None:
                call = partial(all_gather, work, group, step.form, workspace=scratch.workspace, keep=keep)
            made = Step(operation="all_gather", groups=(group,), lane=lane, call=call, before=before, after=after)
            chain.append(made)
        bound = runnable(placed.layout).bind(route, chain)
        return bound if _same(end, current) else (*bound, Step(after=(end, current)))

    def reductions(self) -> ReduceChains:
        """From `waiting` into the accumulator, and on to its state shard's part."""
        shards, placed, grads = self.shards, self.shards.placed, self.shards.grads
        assert grads is not None
        early, late = placed.routes["reduce"].steps, placed.routes["boundary"].steps
        first, scales = self._scales([*early, *late])
        micro = self._reductions("reduce", shards.waiting, grads, scales[: len(early)])
        boundary = self._reductions("boundary", grads, None, scales[len(early) :])
        alone, boundary_alone = shards.destinations, boundary
        dtype = DTYPES[placed.collected_dtype(alone=True)]
        if dtype != shards.collected.dtype:
            # At the end of the accumulator that is apart from the first step's result, so that it may send from there;
            # through its staging memory if neither end is.
            scatters, cut = late[0].operation == "reduce_scatter", grads.view(dtype)
            out = own_chunk(grads, self.groups[late[0].axis.name]) if scatters else grads
            ends = cut[: shards.padded], cut[-shards.padded :]
            free = next((end for end in ends if _apart(end, out)), None)
            region = ends[0] if free is None else free
            sent = self._reduction(late[0], region, out, scales[len(early)], staged=free is None)
            alone, boundary_alone = shards.destinations_in(region), (sent, *boundary[1:])
        chains = {"micro": micro, "boundary": boundary, "boundary_alone": boundary_alone, **self._grad_copies(grads)}
        lane = self.lanes.lane("reduce")
        return ReduceChains(
            alone=alone, first=first, **{name: by_lane([chain], lane) for name, chain in chains.items()}
        )

    def _grad_copies(self, grads: Tensor) -> dict[str, Chain]:
        """The copies between `grads` and `host_grads`."""
        shards, routes, found = self.shards, self.shards.placed.routes, dict[str, Chain]()
        if (held := shards.host_grads) is None:
            return found
        if routes["boundary"].down is not None:
            found["down"] = (self._link.step("down", shards.shown, shards.reduced),)
        if routes["reduce"].down is not None:
            found["micro_down"] = (self._link.step("down", held, grads),)
        if (up := routes["up"].up) is not None:
            if routes["up"].passing:
                landing = self.scratch["up"].region(up.numel, grads.dtype)
            else:
                assert shards.waiting is not None  # it is long enough
                landing = shards.waiting.view(torch.uint8)[: grads.nbytes].view(grads.dtype)
            found["up"] = (self._link.step("up", landing, held), Step(call=partial(grads.add_, landing)))
        return found

    def _scales(self, steps: Sequence[Transfer]) -> tuple[float, list[float]]:
        """The factor of each step, and before them that of whoever fills the first one's source: a step leaves its
        factor to the one before if it would be a pass over the memory."""
        factor, scales = self.shards.placed.layout.share, list[float]()
        for step in reversed(steps):
            transport, size = self.groups[step.axis.name].transport, step.axis.size
            factor *= 1.0 if step.operation == "all_gather" else 1 / size
            later = step.operation == "all_gather"
            if step.form is None and transport.sums(step.operation, DTYPES[step.wire]):
                later = later or transport.scaled_sum(size, DTYPES[step.wire], factor)[1] != 1
            scales.append(1.0 if later else factor)
            factor = factor if later else 1.0
        return factor, scales[::-1]

    def _reductions(
        self, kind: RouteKind, source: Tensor | None, into: Tensor | None, scales: Sequence[float]
    ) -> Chain:
        """From `source`, the last step's sum into `into`, or in place."""
        route, chain, current, scattered = self.shards.placed.routes[kind], list[Step](), source, dict[str, Tensor]()
        for step, scale in zip(route.steps, scales, strict=True):
            region = current
            if step.operation == "all_gather":  # back to the region that was scattered over the same axis
                region = scattered[step.axis.name]
            assert region is not None
            scattered[step.axis.name] = region
            scatters = step.operation == "reduce_scatter"
            current = own_chunk(region, self.groups[step.axis.name]) if scatters else region
            last = into is not None and step is route.steps[-1]
            current = into if last else current
            assert current is not None
            chain.append(replace(self._reduction(step, region, current, scale), accumulates=last))
        return runnable(self.shards.placed.layout).bind(route, chain)

    def _reduction(
        self,
        step: Transfer,
        region: Tensor,
        out: Tensor,
        scale: float,
        *,
        staged: bool = False,
    ) -> Step:
        """A step over one axis, through staging memory if its wire's dtype is not that of `region`, or if `staged`."""
        shards, group, (lane, scratch) = self.shards, self.groups[step.axis.name], self._lane(step)
        wire, operation, form = DTYPES.get(step.wire, region.dtype), step.operation, step.form
        sent = scratch.region(step.numel, wire) if staged or wire != region.dtype else region
        before, after = (None, None) if sent is region else ((sent, region), (out, sent))
        options: dict[str, Any] = {"workspace": scratch.workspace, "scale": scale}
        if form is not None:
            owed = shards.placed.feedback.get(step.axis.name)
            options["residual"] = None if owed is None or shards.owed is None else shards.owed[owed]
            if form.stochastic:
                from zeromesh.comm.quantised import noise_generator

                # One generator for all chains of the buffer: begun anew, it would round each backward's gradient alike.
                options["generator"] = shards.noise.setdefault(group.name, noise_generator(group, shards.name))
        call: partial[None]
        if operation == "reduce_scatter":
            call, after = partial(reduce_scatter, sent, out, group, form, **options), None
        elif operation == "all_reduce":
            call = partial(all_reduce, sent, group, form, **options)
        else:
            call = partial(all_gather, sent, group)
        return Step(operation=operation, groups=(group,), lane=lane, call=call, before=before, after=after)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


def _apart(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors have no memory in common."""
    first, second = sorted((one, other), key=Tensor.data_ptr)
    return first.data_ptr() + first.nbytes <= second.data_ptr()
