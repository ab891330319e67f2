"""The schedule's back end on real devices: chains of collectives on lanes.

[Note: Memory] Transfers run in lanes: [Note: Lanes] of `zeromesh.schedule.lanes`. The memory that each kind of transfer
reads and writes, and why nobody else touches it meanwhile:

    refresh   master -> params    optimizers wait for it before they step
    unshard   params -> full      follows the unit's refresh; the interpreter gives a slot to one unit at a time, and
                                  waits before it is used
    reduce    waiting -> grads    a slot is filled again only after its reduction
    boundary  grads -> its part   follows the unit's `reduce`; `.grad` appears after the wait
    step      grads -> master     that lies on the host; the unit's refresh follows: [Note: Beside] of
                                  `zeromesh.engine.beside`. On the device two lanes take turns, unit by unit

[Note: Versions] A slot's version names the unit whose parameters it holds. From the start of a gather until the wait
for it, it names none. So autograd raises where a graph reads a slot outside its unit's turn (docs/decisions/0016).

[Note: Casts] Some forwards cast a module (`self.classifier.to(torch.float32)`), which gives its leaf other memory. The
masters stay as they are, so the cast holds for as long as the unit is in use, in the backward too: autograd has saved
the leaf itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeromesh.comm.collectives import all_reduce_max
from zeromesh.comm.exchange import AxisGroup, Chain
from zeromesh.comm.lane import Job, Lane, Ticket
from zeromesh.engine.chain import Binding, ByLane, ReduceChains, Scratch, by_lane
from zeromesh.engine.flat import FlatShards, GradDestinations
from zeromesh.engine.leaf import Leaf, PlainLeaf, classes_of, local_of
from zeromesh.engine.param import ShardedParameter
from zeromesh.errors import CommunicationError, ModelError
from zeromesh.schedule.lanes import Lanes, side_by_side
from zeromesh.schedule.state import Reducing, Reduction
from zeromesh.schedule.transfer import COPIES, RouteKind
from zeromesh.strategy import Layout

if TYPE_CHECKING:
    from zeromesh.comm.host import HostLink
    from zeromesh.engine.hosted import HostWork

_NOBODY = 0
_VERSION_BITS = 16  # room above a unit's version for in-place changes of its gathered parameters: [Note: Versions]

Site = tuple[dict[str, nn.Parameter | None], str, Leaf, ShardedParameter, int, bool]
"""One place of a parameter in the model: the `_parameters` of a module and a key; the compute leaf and the optimizer's
parameter, which stand there in turn; the leaf's address, where gathers write; and whether it is trained."""


@dataclass
class UnitShards:
    """One unit on this rank: its flat buffers, and which of its gradients there are."""

    name: str
    buffers: list[FlatShards]
    shares_slot: bool = False  # whether other units are gathered into its slot
    # By (buffer, parameter): whether it has had a gradient in this step that is not shown yet.
    used: list[list[bool]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of `watched` when the unit came into use; empty while it is not
    accepted: bool = True  # whether an optimizer has stepped since gradients were shown
    casts: dict[Leaf, torch.dtype] = field(default_factory=dict)  # to which forwards cast a leaf: [Note: Casts]

    def __post_init__(self) -> None:
        self.begin_step()

    @cached_property
    def sites(self) -> list[Site]:
        """Every place in the model that holds one of its parameters."""
        with torch._C.DisableTorchFunctionSubclass():  # leaves may be closed
            return [
                (params, key, leaf, param, local_of(leaf).data_ptr(), buffer.spec.trainable)
                for buffer in self.buffers
                for place, leaf, param in zip(buffer.places, buffer.leaves, buffer.optimizer_params, strict=True)
                for params, key in place.info.sites
            ]

    @cached_property
    def in_slot(self) -> tuple[Tensor, ...]:
        """Tensors that carry the slot's version: a view of it, and DTensors over it. Empty if nothing is gathered."""
        return _one_memory([leaf for buffer in self.buffers if buffer.gathered for leaf in buffer.leaves])

    @cached_property
    def watched(self) -> list[Tensor]:
        """Tensors whose versions together are those of all memory that the unit computes with."""
        if any(place.info.rewritten for buffer in self.buffers for place in buffer.places):
            return []
        memories = [
            leaves
            for buffer in self.buffers
            for leaves in ([buffer.leaves] if buffer.gathered else [[leaf] for leaf in buffer.leaves])
        ]
        return [tensor for leaves in memories for tensor in _one_memory(leaves)]

    @cached_property
    def memory_of(self) -> dict[Leaf, Tensor]:
        """The memory of each leaf, where gathers write."""
        return {
            leaf: buffer.full[place.start : place.stop].view(place.shape)
            for buffer in self.buffers
            for place, leaf in zip(buffer.places, buffer.leaves, strict=True)
        }

    def show_casts(self, *, cast: bool) -> None:
        """Has leaves that forwards cast show their values so, or as gathered: [Note: Casts]."""
        for leaf, dtype in self.casts.items():
            memory = self.memory_of[leaf]
            leaf.data = memory.to(dtype) if cast else memory

    def has_cast(self, leaf: Leaf) -> bool:
        """Whether a leaf shows its values in another dtype, and no other values; remembers the dtype."""
        memory = self.memory_of[leaf]
        if not isinstance(leaf, PlainLeaf) or leaf.dtype == memory.dtype or leaf.shape != memory.shape:
            return False
        if not torch.equal(leaf.detach(), memory.to(leaf.dtype)):
            return False
        self.casts[leaf] = leaf.dtype
        return True

    @cached_property
    def closing(self) -> list[tuple[Leaf, type[Leaf], type[Leaf]]]:
        """Leaves over memory that others use when the unit does not, each with its open and closed class."""
        return [(leaf, *classes_of(leaf)) for b in self.buffers for leaf in b.leaves if self.shares_slot]

    @cached_property
    def leaf_of(self) -> dict[nn.Parameter, Leaf]:
        """The leaf that the unit computes with, by the optimizer's parameter."""
        return {p: leaf for b in self.buffers for p, leaf in zip(b.optimizer_params, b.leaves, strict=True)}

    @cached_property
    def trained(self) -> list[FlatShards]:
        return [buffer for buffer in self.buffers if buffer.spec.trainable]

    def begin_step(self) -> None:
        """The accumulator is empty; gradients that are shown are set aside. Owed rounding errors of gradients that were
        thrown away (an overflow, say) go too, also of micro-batches that were never shown."""
        unseen = any([any(used) for used in self.used])
        self.used = [[False] * len(buffer.places) if buffer.spec.trainable else [] for buffer in self.buffers]
        shown = any([buffer.set_grads_aside() for buffer in self.buffers])
        if unseen or not (shown or self.accepted):
            self.forget_owed()
            self.accepted = True

    def show_grads(self, flags: Iterator[int], *, reduced: bool) -> None:
        """Shows, as `.grad`, gradients of the parameters that some rank has used: `flags`, by trained parameter.
        `reduced`: the state shard holds gradients of this step."""
        for buffer in self.buffers:
            for position in range(len(buffer.optimizer_grads)):
                used = bool(next(flags))
                buffer.show_grad(position, used=used, reduced=reduced)
                # A unit that no rank has used discards nothing, so its owed errors stay.
                self.accepted = self.accepted and not used
        self.used = [[False] * len(used) for used in self.used]

    def accept(self) -> None:
        self.accepted = True

    def written(self) -> None:
        """Somebody else than an optimizer has written to its masters."""
        self.take_fresh()
        self.forget_owed()

    def take_fresh(self) -> list[FlatShards]:
        """The streamed buffers whose compute copy no step on the device leaves; forgets the steps of the others."""
        return [buffer for buffer in self.buffers if buffer.placed.streamed and not buffer.take_fresh()]

    def forget_sum(self, param: ShardedParameter, *, zeros: bool) -> None:
        """Clears a parameter's sum of this step's micro-batches; one that is `zeros` is shown still."""
        for buffer, used in zip(self.buffers, self.used, strict=True):
            for position, own in enumerate(buffer.optimizer_params):
                if own is param:
                    used[position] &= zeros
                    buffer.forget_sum(position)
        self.forget_owed()

    def forget_owed(self) -> None:
        """Clears the rounding errors of error feedback: they belong to gradients at other parameter values."""
        for buffer in self.buffers:
            if buffer.owed is not None:
                buffer.owed.zero_()


Jobs = list[tuple[str, list[Job]]]  # by lane, each after those before


@dataclass(slots=True)
class UnitChains:
    """One unit's chains: gathers of all its buffers together; reductions by index of the buffer."""

    unshard: ByLane
    unshard_kept: ByLane
    refresh: ByLane
    reduce: dict[int, ReduceChains]


@dataclass(eq=False, kw_only=True)
class DeviceBackend:
    """Runs ops on this rank's tensors."""

    units: Sequence[UnitShards]  # in the schedule's order
    layouts: Sequence[Layout]  # of the model, then of its parts
    groups: dict[str, AxisGroup]
    names: Lanes  # of its lanes
    lanes: Mapping[str, Lane]  # by name; with those of the host's steps and copies, if anything lies there
    scratch: Mapping[str, Scratch]
    host: HostLink | None  # copies to and from its memory; None if nothing lies there
    chains: Sequence[UnitChains] = field(init=False)  # `record` puts observed ones in their place while it records
    device: torch.device
    registered: bool  # whether slots lie in registered memory
    work: HostWork | None = None  # on slices in the host's memory; None before any

    def __post_init__(self) -> None:
        self.chains = [self._bind(unit) for unit in self.units]
        # Whether parameters are swapped back as their unit's own forward returns; else as the outermost returns.
        self._closes = any(layout.gathers for layout in self.layouts)
        refreshed = [(b, b.placed.routes["refresh"]) for u in self.units for b in u.buffers]
        down = [(b, self.names.lane("gather", route.steps[0].axis.name)) for b, route in refreshed if route.down]
        self._landing = tuple(dict.fromkeys([*COPIES, *(lane for _, lane in down)]))
        self.rewrites = any(b.master_in_params for b, _ in down)  # parameters come down onto masters inside them

    def _bind(self, unit: UnitShards) -> UnitChains:
        bound = [Binding(buffer, self.groups, self.names, self.scratch, self.host) for buffer in unit.buffers]
        gathered, lane = [each for each in bound if each.shards.gathered], self.names.lane("gather")
        return UnitChains(
            unshard=by_lane((each.unshard(from_kept=False) for each in gathered), lane),
            unshard_kept=by_lane((each.unshard(from_kept=True) for each in gathered), lane),
            refresh=by_lane((each.refresh() for each in bound), lane),
            reduce={i: each.reductions() for i, each in enumerate(bound) if each.shards.grads is not None},
        )

    @property
    def links(self) -> tuple[AxisGroup | HostLink, ...]:
        return (*self.groups.values(), *([] if self.host is None else [self.host]))

    def working_buffers(self) -> list[Tensor]:
        buffers = [buffer for unit in self.units for buffer in unit.buffers]
        own = {tensor.untyped_storage().data_ptr() for b in buffers for tensor in b.persistent().values()}
        views = [view for b in buffers for view in (b.full, b.waiting, b.grads) if view is not None]
        extra = [tensor for s in self.scratch.values() for tensor in (s.staging, s.workspace)]
        return [tensor for tensor in (*views, *extra) if tensor.untyped_storage().data_ptr() not in own]

    def through(self, lanes: Mapping[str, Any], chains: Sequence[UnitChains]) -> tuple[Any, Sequence[UnitChains]]:
        """From now on runs `chains` in `lanes`, perhaps observed ones; returns the lanes and chains before them."""
        before = self.lanes, self.chains
        self.lanes, self.chains = lanes, chains
        return before

    def beside(self) -> HostWork:
        """The work on slices in the host's memory; made when the first begins."""
        from zeromesh.engine.hosted import HostWork  # of host=, or zm.parked

        self.work = self.work or HostWork(self)
        return self.work

    # ---- schedule.Backend

    def refresh(self, unit: int) -> Ticket | None:
        if late := self.units[unit].take_fresh():
            from zeromesh.engine.beside import bring  # of host=

            self.beside().step(unit, partial(bring, late, self.host), streamed=True)
        after = None if self.work is None else self.work.steps.get(unit)
        ticket = self._gather("refresh", self.chains[unit].refresh, unit, after)
        if self.rewrites and ticket is not None:  # with the values that are there, which may change meanwhile
            self.beside().add(unit, ticket)
        return ticket

    def unshard(self, unit: int, *, from_kept: bool, after: Ticket | None) -> Ticket | None:
        chains = self.chains[unit]
        _set_version(self.units[unit].in_slot, _NOBODY)
        return self._gather("unshard", chains.unshard_kept if from_kept else chains.unshard, unit, after)

    def reduce(self, unit: int, reduction: Reduction) -> Reducing[Ticket]:
        shards, chains = self.units[unit], self.chains[unit].reduce
        jobs: dict[RouteKind, list[Jobs]] = {"reduce": [], "up": [], "boundary": [], "down": []}
        last: RouteKind = "reduce"  # the kind that reads the reduce slot last
        for index, own in chains.items():
            buffer, away = shards.buffers[index], bool(own.micro_down)
            further, before = reduction.boundary and bool(own.boundary), None
            last = "down" if away else last
            if away and not (reduction.micro or further):
                continue  # its sums stay on the host
            if reduction.add:  # no lane is at work on the unit now
                before = self.host.brought(buffer.shown) if away and self.host else buffer.reduced.clone()
            accumulate, sums = reduction.accumulate and not away, Jobs()
            if reduction.micro:
                destinations = own.alone if reduction.alone else buffer.destinations
                self._collect(unit, index, own.first, destinations, reduction, accumulate=accumulate and not own.micro)
                sums = _jobs(own.micro, accumulate=accumulate)
                jobs["reduce"].append(sums)
            if reduction.accumulate and own.up:
                assert buffer.grads is not None
                jobs["up"].append(_jobs(own.up, *([] if reduction.micro else [buffer.grads.zero_])))
            if reduction.boundary:
                jobs["boundary"].append(_jobs(own.boundary_alone if reduction.alone else own.boundary))
                sums = jobs["boundary"][-1] or sums
                if before is not None and sums:
                    sums[-1][1].append(partial(buffer.reduced.add_, before))
                elif before is not None:
                    buffer.reduced.add_(before)
            down = own.micro_down if away and not further else own.down if reduction.boundary else ()
            if down:
                jobs["down"].append(_jobs(down))
                if self.work is not None and self.work.clips and reduction.boundary:
                    jobs["down"][-1][-1][1].append(self.work.finding_norms(buffer))
        taken = done = None
        for kind, each in jobs.items():
            for lane, together in side_by_side(each):
                done = self.lanes[lane].submit(partial(_run, together), f"reduce {shards.name}", after=done)
            taken = done if kind == last else taken
        return Reducing(taken, done)

    def wait(self, ticket: Ticket) -> None:
        try:
            ticket.wait()
        except CommunicationError:  # the job was not run, perhaps since an optimizer's step has failed
            if self.work is not None and (cause := self.work.error) is not None:
                raise cause from None
            raise  # with the words of its own backend

    def land(self) -> None:
        """Makes the host itself wait for copies whose tickets were waited for, before it uses its own memory."""
        for lane in self._landing:
            if lane in self.lanes:
                self.lanes[lane].synchronize()

    def launch(self) -> None:
        """Launches refreshes that wait for steps on the host, also of units that this rank does not use: other ranks
        may wait for them."""
        if self.work is not None:
            for lane in self.lanes.values():
                lane.launch()

    def settle(self) -> None:
        """Waits for the work on slices in the host's memory. Raises ModelError if they are parked."""
        if self.work is not None:
            self.work.settle()

    def use(self, unit: int) -> None:
        shards = self.units[unit]
        sites = shards.sites
        for params, key, leaf, param, *_ in sites:
            held = params.get(key)
            if held is not param and held is not leaf:
                raise _replaced(param)
        for params, key, leaf, *_ in sites:
            params[key] = leaf
        for leaf, opened, _ in shards.closing:
            leaf.__class__ = opened
        shards.show_casts(cast=True)
        in_slot = shards.in_slot
        # Not again where nothing has been gathered since: it counts changes in place.
        if in_slot and in_slot[0]._version >> _VERSION_BITS != unit + 1:
            _set_version(in_slot, unit + 1 << _VERSION_BITS)
        shards.versions = [tensor._version for tensor in shards.watched]

    def require_usable(self, unit: int, outputs: Iterable[Tensor]) -> None:
        """Raises ModelError where an output of a forward outlives the unit's turn in its slot."""
        if any(self.in_shared_slot(unit, tensor) for tensor in outputs):
            raise ModelError(
                f"unit {self.units[unit].name!r} returns a parameter of its own, or a view of one, in memory that "
                f"other units' parameters will use: return a clone, or name the unit in zm.shard(resident=[...])"
            )

    def in_shared_slot(self, unit: int, tensor: Tensor) -> bool:
        """Whether a tensor is, or shows, gathered parameters of the unit where others' will be."""
        shards = self.units[unit]
        return shards.shares_slot and any(_storage(buffer.full) == _storage(tensor) for buffer in shards.buffers)

    def require_in_place(self, unit: int, *, outermost: bool) -> None:
        """Raises ModelError where a forward of the unit has put other parameters, memory or values in their place, or
        frozen some; of units that stay open, once for all, as the `outermost` forward ends."""
        for shards in self.units[unit : unit + 1] if self._closes else self.units if outermost else ():
            for params, key, leaf, param, address, trained in shards.sites:
                held = params.get(key)
                if leaf.requires_grad is not trained:
                    leaf.requires_grad = trained
                    param.requires_grad_(not trained)  # raises: the forward's change, as if it were made outside of it
                if held is param or (held is leaf and local_of(leaf).data_ptr() == address):
                    continue
                if held is not leaf or not shards.has_cast(leaf):
                    raise _replaced(param)
            if shards.versions and shards.versions != [tensor._version for tensor in shards.watched]:
                raise written(shards.name)

    def unuse(self, unit: int) -> None:
        for params, key, _, param, *_ in self.units[unit].sites:
            params[key] = param
        self.units[unit].show_casts(cast=False)
        for leaf, _, closed in self.units[unit].closing:
            leaf.__class__ = closed
        self.units[unit].versions = []

    def has_grads(self, unit: int) -> bool:
        return any([grad is not None for b in self.units[unit].trained for grad in b.grads_of_leaves()])

    def agree(self, words: Tensor) -> Ticket:
        """Replaces `words` by their maximum over all ranks, after the reductions that were issued before."""
        ticket: Ticket | None = None
        for axis in (axis for axis in self.layouts[0].axes if axis.name in self.groups):
            # Not this object: a job on its way must not keep the model's memory.
            agree, lane = partial(all_reduce_max, words, self.groups[axis.name]), self.names.lane("reduce", axis.name)
            ticket = self.lanes[lane].submit(agree, "agree on gradients", after=ticket)
        assert ticket is not None
        return ticket

    # ---- gradients

    def drop_leaf_grads(self, *, added: bool = False) -> None:
        """Drops the gradients on leaves after a backward that did not end. After one that ended, drops those that
        autograd has `added` to an accumulator, so that it adds there no more."""
        for buffer in (buffer for unit in self.units for buffer in unit.trained):
            if buffer.adds or not added:
                buffer.take_grads()

    def add_in_place(self, unit: int) -> None:
        """Before the backward of a unit whose accumulator holds micro-batches: `FlatShards.add_in_place`."""
        for index, chains in self.chains[unit].reduce.items():
            if chains.first == 1:
                self.units[unit].buffers[index].add_in_place()

    def _collect(
        self, unit: int, index: int, factor: float, to: GradDestinations, reduction: Reduction, *, accumulate: bool
    ) -> None:
        """Moves the gradients that autograd has left on a buffer's leaves to where they are reduced."""
        shards, buffer = self.units[unit], self.units[unit].buffers[index]
        adds, found, used = buffer.adds, buffer.take_grads(), shards.used[index]  # `adds` before it is taken
        destinations, missing, grads = list[Tensor](), list[Tensor](), list[Tensor]()
        for position, (grad, destination) in enumerate(zip(found, to.parts, strict=True)):
            if grad is None:
                missing.append(destination)
                continue
            spread = buffer.places[position].info.spread
            grad = grad if spread is None else spread.local_grad(grad)
            if reduction.stale is not None:
                _require_unchanged(buffer.optimizer_params[position], reduction.stale)
            used[position] = True
            grad = grad.to_dense() if grad.is_sparse else grad  # which has no address
            if adds:
                if grad.data_ptr() != destination.data_ptr():  # an autograd.Function has put the sum elsewhere
                    destination.copy_(grad.detach())
                continue
            destinations.append(destination)
            grads.append(grad.detach() if grad.requires_grad else grad)  # backward(create_graph=True)
        scale = reduction.scale if buffer.placed.layout.share == 1 else None  # [Note: Weights]
        if scale == 0:  # not 0 * grad: a mean over no tokens is NaN
            destinations, missing, grads = [], [*missing, *destinations], []
        factor *= 1.0 if scale is None else scale
        if accumulate:
            if grads:
                torch._foreach_add_(destinations, grads, alpha=factor)
            return
        if grads:
            torch._foreach_copy_(destinations, grads)
            if factor != 1:  # after the copy, whose kernel takes no factor, in the dtype that is sent
                to.whole.mul_(factor)
        # A slot served longer units before; their remains must not reach the padding.
        if missing or to.gaps:
            torch._foreach_zero_([*missing, *to.gaps])

    def _gather(self, kind: RouteKind, chain: ByLane, unit: int, after: Ticket | None) -> Ticket | None:
        label = f"{kind} {self.units[unit].name}"
        for lane, steps in chain:
            after = self.lanes[lane].submit(partial(_run_chain, steps), label, after=after)
        return after


def _jobs(chain: ByLane, *first: Job, accumulate: bool = False) -> Jobs:
    """A chain's jobs, and before them those that come `first`."""
    jobs: Jobs = [(lane, [partial(_run_chain, steps, accumulate=accumulate)]) for lane, steps in chain]
    if first:
        jobs[0][1][:0] = first
    return jobs


def _run_chain(steps: Chain, *, accumulate: bool = False) -> None:
    for step in steps:
        step.run(accumulate)


def _require_unchanged(param: ShardedParameter, generation: int) -> None:
    """Autograd's check that saved tensors are unchanged, which it cannot make for views into reused buffers."""
    if param.changed > generation:
        raise ModelError(
            f"{param.full_name} has changed since the forward whose backward runs now: run that before the "
            f"optimizer's step (or load, or zm.refresh), or run the forward again"
        )


def _one_memory(leaves: Sequence[Leaf]) -> tuple[Tensor, ...]:
    """For leaves over one memory, the tensors that carry its version and those of DTensors over it: [Note: Leaves] of
    `zeromesh.engine.leaf`."""
    counted = [leaf for leaf in leaves if not leaf.is_inference()]
    return (*map(local_of, counted[:1]), *(leaf for leaf in counted if local_of(leaf) is not leaf))


def _set_version(in_slot: tuple[Tensor, ...], version: int) -> None:
    """[Note: Versions]."""
    if in_slot:
        torch._C._autograd._unsafe_set_version_counter(in_slot, (version,) * len(in_slot))


def written(unit: str) -> ModelError:
    return ModelError(
        f"the forward of unit {unit or '(root)'!r}, or a hook of it, has written to its parameters, which the masters "
        f"would never see: change the model's parameters in place between steps, on all ranks, or compute with a "
        f"changed copy, as torch.nn.utils.parametrize does"
    )


def _replaced(param: ShardedParameter) -> ModelError:
    return ModelError(
        f"the model has something else where zm.shard has put {param.full_name}, by torch.func.functional_call or an "
        f"assignment (of `.data` too): a sharded model computes with its own parameters. Change their values "
        f"(`.local.copy_` and zm.refresh, or zm.load_full_state_dict), or replace parameters before zm.shard"
    )


def _run(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job()


def _storage(tensor: Tensor) -> int:
    """The address of the storage under a tensor; 0 where it has no plain one."""
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse ones, subclasses, those of torch.func
        return 0
