"""The schedule's back end on real devices: chains of collectives on lanes.

[Note: Lanes] A lane carries out its jobs in the order in which they were issued, beside the computation: on CPU in a
thread, on CUDA in a stream. Each kind of transfer has a lane, so that none waits for another that it does not need:
what the slow links carry at a step's end, refreshes and reductions to the state shard, keeps them busy while gathers
and reductions of other units go over the fast ones. For gathers, as for reductions, an axis has one communicator; no
axis is in both lanes of a direction (`lane_axes`). What a job reads and writes, and why nobody else touches it:

    refresh   master -> params    optimizers wait for it before they step
    unshard   params -> full      follows the unit's refresh; the interpreter gives a slot to one unit at a time, and
                                  waits before it is used
    reduce    waiting -> grads    a slot is filled again only after its reduction
    boundary  grads -> its part   follows the unit's `reduce`; `.grad` appears after the wait

[Note: Versions] Autograd remembers the version of each tensor that it saves, and raises if that is another when it is
used. A slot's version names the unit whose parameters it holds, and none from the start of a gather until that has been
waited for. So whatever a graph reads of a slot outside its unit's turn, and whoever made it read that, is an error: a
penalty that a forward computes and does not return, a block whose outputs no hook can see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from zeromesh.comm import Lane, Ticket, all_reduce_max
from zeromesh.comm.lane import Job
from zeromesh.engine.chain import (
    GatherChain,
    Groups,
    ReduceChain,
    Scratch,
    owed_early,
    reduce_chain,
    refresh_chain,
    unshard_chain,
)
from zeromesh.engine.flat import FlatShards, inside
from zeromesh.errors import InternalError, ModelError
from zeromesh.schedule import LaneKind, Op, Reducing, Reduction, Target, lane_axes
from zeromesh.strategy import Layout

_NOBODY = 0
_VERSION_BITS = 16
"""A unit's version leaves room above for in-place changes of its gathered parameters: [Note: Versions]."""

REDUCTIONS: tuple[LaneKind, ...] = ("reduce", "boundary")
"""The lanes that gradients pass, in their order."""

Site = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter, int]
"""The `_parameters` of a module, a key, and what stands there: the compute leaf, or else the optimizer's parameter. And
the leaf's address, where gathers and refreshes write."""


@dataclass
class UnitShards:
    """One unit on this rank: its flat buffers, and what is collected of the running backward.

    Args:
        name: of the unit.
        buffers: its flat buffers.
        used: by (buffer, parameter): whether it has had a gradient since the accumulator was empty.
        written: by (buffer, parameter): whether its part of the target holds something of this accumulation.
        num_leaves: parameters that are trained.
        fired: leaves, as (buffer, parameter), whose gradients the running backward has computed.
        fires_again: whether one of them has had two.
        waited: whether some of them are still on their leaves.
        accepted: whether an optimizer has stepped since gradients were collected.
        apart: accumulators of a backward whose unit had been reduced before, by buffer.
        homes: by (buffer, parameter): where the target collects its gradient.
        factors: what is collected is multiplied by, by buffer: see `ReduceChain.first`.
    """

    name: str
    buffers: list[FlatShards]
    used: list[list[bool]] = field(init=False)
    written: list[list[bool]] = field(init=False)
    num_leaves: int = field(init=False)
    fired: set[tuple[int, int]] = field(default_factory=set)
    fires_again: bool = False
    waited: bool = False
    accepted: bool = True
    target: Target | None = None
    apart: list[Tensor | None] = field(init=False)
    homes: list[list[Tensor]] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.used = self._flags()
        self.written = self._flags()
        self.num_leaves = sum(len(flags) for flags in self.used)
        self.apart = [None] * len(self.buffers)

    def _flags(self) -> list[list[bool]]:
        return [[False] * len(buffer.places) if buffer.spec.trainable else [] for buffer in self.buffers]

    @cached_property
    def has_frozen(self) -> bool:
        """Whether it holds parameters that are not trained."""
        return any(not buffer.spec.trainable for buffer in self.buffers)

    @cached_property
    def sites(self) -> list[Site]:
        """Every place in the model that holds one of its parameters."""
        return [
            (params, key, leaf, param, leaf.data_ptr())
            for buffer in self.buffers
            for place, leaf, param in zip(buffer.places, buffer.leaves, buffer.optimizer_params, strict=True)
            for params, key in place.info.sites
        ]

    @cached_property
    def in_slot(self) -> nn.Parameter | None:
        """A leaf over the unit's slot, whose version is the slot's; None where no slot is shared with others."""
        leaves = (b.leaves[0] for b in self.buffers if b.leaves and b.full.data_ptr() != b.params.data_ptr())
        leaf = next(leaves, None)
        return None if leaf is None or leaf.is_inference() else leaf

    def forget(self) -> None:
        """The accumulator is empty."""
        for buffer in self.buffers:
            buffer.let_go()
        self.used, self.written = self._flags(), self._flags()

    def forget_owed(self) -> None:
        """What error feedback owes belongs to gradients at other parameters than those that are there now."""
        for buffer in self.buffers:
            if buffer.owed is not None:
                buffer.owed.zero_()

    def rejected(self) -> None:
        """The gradients that were collected are thrown away, perhaps for their size; so must be what they owe."""
        if not self.accepted:
            self.forget_owed()
            self.accepted = True

    def collect_in(self, target: Target) -> None:
        """Where the running backward's gradients go. WAIT: they stay on their leaves until it is asked again."""
        if target is Target.WAIT:
            self.waited = True
        elif target is not self.target:
            self._open(target)

    def abort(self) -> None:
        """After a backward that raised: what it left is dropped, but for what its accumulator has already taken in."""
        self.end_backward()
        for buffer in self.buffers:
            for leaf in buffer.leaves:
                leaf.grad = None

    def end_backward(self) -> None:
        """The gradients have been handed on; further ones belong to another backward."""
        self.target, self.fires_again, self.waited = None, False, False
        self.fired.clear()
        self.apart, self.homes = [None] * len(self.buffers), []

    def _open(self, target: Target) -> None:
        """A first gradient of a backward: the target holds nothing, unless it is the accumulator."""
        self.target, self.accepted = target, False
        if target is not Target.ACCUMULATOR:
            self.written = self._flags()
        if target is Target.APART:
            self.apart = [None if b.grads is None else torch.zeros_like(b.grads) for b in self.buffers]
        self.homes = [b.views(self.collected(index)) for index, b in enumerate(self.buffers)]

    def collected(self, index: int) -> Tensor | None:
        """The whole flat buffer in which the target collects; None for frozen parameters."""
        buffer, apart = self.buffers[index], self.apart[index]
        if not buffer.spec.trainable:
            return None
        home = {Target.SLOT: buffer.waiting, Target.APART: apart}.get(self.target or Target.WAIT, buffer.grads)
        if home is None or home.numel() != buffer.padded:
            raise InternalError(f"unit {self.name!r} collects gradients in {self.target}, which it does not have")
        return home


@dataclass(slots=True)
class UnitChains:
    """The chains of one unit, by buffer; None where there is nothing to do."""

    unshard: list[GatherChain]
    unshard_kept: list[GatherChain]
    refresh: list[GatherChain]
    reduce: list[ReduceChain | None]


def _unwatched(chain: ReduceChain, unit: str) -> ReduceChain:
    return chain


class DeviceBackend:
    """Runs ops on this rank's tensors.

    Args:
        units: in the schedule's order.
        layout: the strategy on its mesh.
        groups: by axis name.
        lanes: by kind.
        scratch: the memory of each lane's jobs.

    Attributes:
        chains: of each unit; `record` puts observed ones in their place while it records.
        watch_chain: sees the chains that are made on the way.
    """

    def __init__(
        self,
        units: Sequence[UnitShards],
        layout: Layout,
        groups: Groups,
        *,
        lanes: Mapping[LaneKind, Lane],
        scratch: Mapping[LaneKind, Scratch],
    ) -> None:
        self.units = units
        self.layout = layout
        self.groups = groups
        self.lanes = lanes
        self.scratch = scratch
        self.weight: float | None = None
        self.final_scale: Callable[[], Tensor] | None = None
        self.watch_chain: Callable[[ReduceChain, str], ReduceChain] = _unwatched
        self.chains = [self._bind(unit) for unit in units]
        for unit, chains in zip(units, self.chains, strict=True):
            unit.factors = [1.0 if chain is None else chain.first for chain in chains.reduce]

    def _bind(self, unit: UnitShards) -> UnitChains:
        groups, scratch = self.groups, self.scratch
        sharded = [b for b in unit.buffers if b.full.data_ptr() != b.params.data_ptr()]
        refreshes = [refresh_chain(b, groups, scratch["refresh"]) for b in unit.buffers]
        return UnitChains(
            unshard=[unshard_chain(b, groups, scratch["unshard"], from_kept=False) for b in sharded],
            unshard_kept=[unshard_chain(b, groups, scratch["unshard"], from_kept=True) for b in sharded],
            refresh=[chain for chain in refreshes if chain is not None],
            reduce=[None if b.grads is None else reduce_chain(b, groups, scratch, b.grads) for b in unit.buffers],
        )

    # ---- schedule.Backend

    def refresh(self, unit: int) -> Ticket | None:
        return self._gather("refresh", self.chains[unit].refresh, unit, None)

    def unshard(self, unit: int, *, from_kept: bool, after: Ticket | None) -> Ticket | None:
        chains = self.chains[unit]
        _set_version(self.units[unit].in_slot, _NOBODY)
        return self._gather("unshard", chains.unshard_kept if from_kept else chains.unshard, unit, after)

    def reduce(self, unit: int, reduction: Reduction) -> Reducing[Ticket]:
        shards = self.units[unit]
        self._collect_leftovers(shards, reduction)
        jobs = [
            self._reduce_job(shards.name, buffer, chain, shards.apart[index], reduction)
            for index, (buffer, chain) in enumerate(zip(shards.buffers, self.chains[unit].reduce, strict=True))
            if chain is not None
        ]
        shards.end_backward()
        if reduction.target is Target.ACCUMULATOR and not reduction.boundary:
            return Reducing(None, None)
        chains = [chain for chain in self.chains[unit].reduce if chain is not None]
        early = [micro for micro, _ in jobs]
        late = [boundary for _, boundary in jobs] if reduction.boundary else []
        if not any(chain.boundary for chain in chains):
            early, late = early + late, []
        taken = done = None
        label = f"reduce {shards.name}"
        if any(chain.micro for chain in chains):
            taken = done = self.lanes["reduce"].submit(partial(_run, early), label)
        else:
            _run(early)
        if late:
            done = self.lanes["boundary"].submit(partial(_run, late), label, after=taken)
        return Reducing(taken, done)

    def wait(self, ticket: Ticket, op: Op) -> None:
        ticket.wait()

    def use(self, unit: int) -> None:
        sites = self.units[unit].sites
        for params, key, leaf, param, _ in sites:
            held = params.get(key)
            if held is not param and held is not leaf:
                raise _replaced(self.units[unit], param)
        for params, key, leaf, _, _ in sites:
            params[key] = leaf
        in_slot = self.units[unit].in_slot
        # Not again where nothing has been gathered since: it counts changes in place.
        if in_slot is not None and in_slot._version >> _VERSION_BITS != unit + 1:
            _set_version(in_slot, unit + 1 << _VERSION_BITS)

    def require_in_place(self, unit: int) -> None:
        """Raises ModelError where a forward of the unit has put other parameters, or other memory, in their place."""
        for params, key, leaf, param, address in self.units[unit].sites:
            held = params.get(key)
            if held is not param and (held is not leaf or leaf.data_ptr() != address):
                raise _replaced(self.units[unit], param)

    def unuse(self, unit: int) -> None:
        for params, key, _, param, _ in self.units[unit].sites:
            params[key] = param

    def grads_discarded(self, unit: int) -> bool:
        """Whether no reduced gradient of the unit is alive; zeroes the parts of those that are not, if others are."""
        shards = self.units[unit]
        # By place: what holds a gradient here would count as somebody else's holding it.
        places = [
            (buffer, used, position)
            for buffer, used in zip(shards.buffers, shards.used, strict=True)
            if buffer.spec.trainable
            for position in range(len(buffer.optimizer_params))
        ]
        dead = [(buffer, used, position) for buffer, used, position in places if buffer.is_dropped(position)]
        if len(dead) == len(places):
            shards.rejected()
            shards.forget()
            return True
        for buffer in shards.buffers:
            buffer.let_go()
        for buffer, used, position in dead:
            buffer.optimizer_grads[position].local.zero_()
            used[position] = buffer.optimizer_params[position].grad is not None
        return False

    def agree(self, words: Tensor) -> Ticket:
        """Replaces `words` by their maximum over all ranks, after the reductions that were issued before."""

        ticket: Ticket | None = None
        for lane in REDUCTIONS:  # each axis in the lane whose communicator it is
            # Not this object: a job on its way must not keep the model's memory.
            groups = [self.groups[axis.name] for axis in lane_axes(self.layout, lane) if axis.name in self.groups]
            if groups:
                agree = partial(_run, [partial(all_reduce_max, words, group) for group in groups])
                ticket = self.lanes[lane].submit(agree, "agree on gradients", after=ticket)
        assert ticket is not None
        return ticket

    def rescale_owed(self, factor: float) -> None:
        """Of reductions with each micro-batch, which go before the division by the step's weights."""
        if factor != 1:
            for buffer in (buffer for unit in self.units for buffer in unit.buffers):
                for owed in owed_early(buffer):
                    owed.mul_(factor)

    # ---- gradients

    def collect(self, shards: UnitShards, index: int, position: int) -> None:
        """Moves the gradient that autograd left on a leaf to where the unit collects, if that is known by now."""
        if shards.target is None:
            return
        leaf = shards.buffers[index].leaves[position]
        grad, leaf.grad = leaf.grad, None
        if grad is not None:
            self._add(shards, index, position, grad)

    def _add(self, shards: UnitShards, index: int, position: int, grad: Tensor) -> None:
        grad = grad.to_dense() if grad.is_sparse else grad
        grad = grad.detach() if grad.requires_grad else grad  # backward(create_graph=True)
        home, written = shards.homes[index][position], shards.written[index]
        if self.weight == 0:
            # Not 0 * grad: a mean over no tokens is NaN.
            if not written[position]:
                home.zero_()
        else:
            factor = shards.factors[index] * (1.0 if self.weight is None else self.weight)
            if written[position]:
                home.add_(grad, alpha=factor)
            elif factor != 1 and grad.dtype == home.dtype:
                torch.mul(grad, factor, out=home)
            else:
                home.copy_(grad)
                if factor != 1:
                    home.mul_(factor)
        written[position] = shards.used[index][position] = True

    def _collect_leftovers(self, shards: UnitShards, reduction: Reduction) -> None:
        """Before a reduction: gradients still on leaves, and zeros where there are none."""
        shards.collect_in(reduction.target)
        for index, buffer in enumerate(shards.buffers):
            home = shards.collected(index)
            if home is None:
                continue
            if shards.waited or not all(shards.written[index]):
                self._sweep(shards, index)
            # The slot served longer units before; their remains must not reach the padding.
            home[buffer.spec.numel :].zero_()

    def _sweep(self, shards: UnitShards, index: int) -> None:
        for position, leaf in enumerate(shards.buffers[index].leaves):
            grad, leaf.grad = leaf.grad, None
            if grad is not None:
                self._add(shards, index, position, grad)
            elif not shards.written[index][position]:
                shards.homes[index][position].zero_()
                shards.written[index][position] = True

    def _reduce_job(
        self, unit: str, buffer: FlatShards, chain: ReduceChain, apart: Tensor | None, reduction: Reduction
    ) -> tuple[Job, Job]:
        """Of the two lanes."""
        if not reduction.add:
            micro = partial(chain.run_micro, accumulate=reduction.accumulate)
            return micro, partial(self._finish, buffer, chain, buffer.grads)
        return self._again_job(buffer, chain) if apart is None else self._apart_job(unit, buffer, apart)

    def _again_job(self, buffer: FlatShards, chain: ReduceChain) -> tuple[Job, Job]:
        """Onto a reduced gradient: of the accumulator nothing else means anything now, so it takes the new one."""
        before = torch.empty_like(buffer.reduced)

        def micro() -> None:
            before.copy_(buffer.reduced)
            chain.run_micro(accumulate=False)

        def add() -> None:
            self._finish(buffer, chain, buffer.grads)
            buffer.reduced.add_(before)

        return micro, add

    def _apart_job(self, unit: str, buffer: FlatShards, apart: Tensor) -> tuple[Job, Job]:
        """Onto a reduced gradient, where the accumulator itself collects and so could not."""
        separate = self.watch_chain(reduce_chain(buffer, self.groups, self.scratch, apart), unit)
        part = inside(apart, buffer.grad_range, buffer.state_range)

        def add() -> None:
            self._finish(buffer, separate, apart)
            buffer.reduced.add_(part)

        return partial(separate.run_micro, accumulate=False), add

    def _finish(self, buffer: FlatShards, chain: ReduceChain, source: Tensor | None) -> None:
        """From the accumulator, `source`, to its state shard's part."""
        assert source is not None
        # What error feedback owes is carried from step to step, and so must not count in this step's weights.
        early = buffer.owed is not None
        scaled = source if early else inside(source, buffer.grad_range, buffer.state_range)
        if early:
            self._scale(scaled)
        chain.run_boundary()
        if not early:
            self._scale(scaled)

    def _scale(self, sums: Tensor) -> None:
        """By the step's weights, in fp32 at least."""
        scale = self.final_scale  # once: a backward that raises takes it away while the lanes still work
        if scale is not None:
            sums.mul_(scale().to(torch.promote_types(sums.dtype, torch.float32)))

    def _gather(self, lane: LaneKind, chains: Sequence[GatherChain], unit: int, after: Ticket | None) -> Ticket | None:
        if not chains:
            return None
        label = f"{lane} {self.units[unit].name}"
        return self.lanes[lane].submit(partial(_run, [chain.run for chain in chains]), label, after=after)


def _set_version(in_slot: nn.Parameter | None, version: int) -> None:
    """[Note: Versions]."""
    if in_slot is not None:
        torch._C._autograd._unsafe_set_version_counter((in_slot,), (version,))


def _replaced(unit: UnitShards, param: nn.Parameter) -> ModelError:
    name = next(p.full_name for buffer in unit.buffers for p in buffer.optimizer_params if p is param)
    return ModelError(
        f"the model has something else where zm.shard has put {name}, by torch.func.functional_call or an assignment "
        f"(of `.data` too): a sharded model computes with its own parameters. Change their values (`.local.copy_` and "
        f"zm.refresh, or zm.load_full_state_dict), or replace parameters before zm.shard"
    )


def _run(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job()
