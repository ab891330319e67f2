"""The tensors of one flat buffer on this rank: shards, views into slots, compute leaves and optimizer's parameters.

::

    master   state shard, optimizer's dtype     the optimizer's parameters are views of it; a part of `params` where
                                                that is as good
    params   parameter shard, compute dtype     master cast, then gathered over the stage-1/2 axes
    kept     gathered over the kept axes        filled by the forward's gather, read by the backward's; as it came over
                                                the wire, so of messages where that is quantised
    owed     by reductions with error feedback  rounding errors of their messages, added to the next ones
    full     all of it, in a gather slot        the compute leaves are views of it; `params` itself where that is full
    waiting  all of it, in a reduce slot        a micro-batch's gradient, on its way to
    grads    gradient shard, accumulator dtype  `.grad` shows its state shard's part; a gradient that is alone
                                                lies in it as it is sent: [Note: Alone] of
                                                `zeromesh.schedule.buffer_layout`

Where the host's stage says so, `master`, `params` and `kept` lie in its memory; `grads` then is a part of the reduce
slot, and `.grad` shows a part of `host_grads`: the gradient shard, or its state shard's part.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.engine.control import Control
from zeromesh.engine.elements import Agree, Elements, Home
from zeromesh.engine.leaf import Leaf, PlainLeaf, local_of, make_leaf
from zeromesh.engine.param import ShardedParameter, Slice, give_memory, make_slice, slice_of
from zeromesh.engine.units import DTYPES, ParamInfo
from zeromesh.pieces.region import Region
from zeromesh.schedule.buffer_layout import FEEDBACK_DTYPE, BufferLayout
from zeromesh.schedule.unit import FlatBuffer
from zeromesh.strategy import Axis

if TYPE_CHECKING:
    from zeromesh.comm.host import HostArena, HostLink

HostStates = dict[str, tuple["HostArena", Tensor]]  # an optimizer's states by name, each in memory of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRange:
    """Where one parameter, or this rank's region of it, lies: `start`..`stop` of the flat buffer."""

    info: ParamInfo
    region: Region
    start: int
    stop: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.region.sizes)

    @property
    def global_shape(self) -> torch.Size:
        return torch.Size(self.region.shape)

    @property
    def original(self) -> nn.Parameter:
        """The parameter as its modules hold it until it is sharded."""
        params, key = self.info.sites[0]
        found = params[key]
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class GradDestinations:
    """Where a buffer's gradients are copied to, to be reduced."""

    whole: Tensor  # 1-D
    parts: list[Tensor]  # of each parameter, in its shape
    gaps: list[Tensor]  # the padding between and behind them


@dataclass(kw_only=True)
class FlatShards:
    """One flat buffer on this rank; see the module's picture."""

    placed: BufferLayout
    coordinates: dict[str, int]
    places: tuple[ParamRange, ...]
    device: torch.device  # of all tensors that are not on the host
    params: Tensor = field(init=False)
    master: Tensor | None = None
    grads: Tensor | None = None
    kept: Tensor | None = None
    owed: Tensor | None = None
    host_grads: Tensor | None = None
    cast: Tensor | None = None  # on the host, the state shard's compute copy on its way to the device
    full: Tensor = field(init=False)
    waiting: Tensor | None = None
    leaves: list[Leaf] = field(default_factory=list)
    optimizer_params: list[ShardedParameter] = field(default_factory=list)
    optimizer_grads: list[Slice] = field(default_factory=list)
    # On the host, states of optimizers that step on the device, each as long as `master`. By optimizer, since several
    # may step on one parameter.
    states: MutableMapping[Optimizer, HostStates] = field(default_factory=WeakKeyDictionary)
    fresh: bool = False  # whether a step on the device leaves the compute copy, so that the master need not come up
    # For rounding on quantised wires, by axis; no axis is in the jobs of two lanes.
    noise: dict[str, torch.Generator] = field(default_factory=dict)
    adds: bool = False  # whether autograd adds to the accumulator itself

    @classmethod
    def allocate(
        cls,
        placed: BufferLayout,
        infos: Sequence[ParamInfo],
        coordinates: dict[str, int],
        device: torch.device,
        host: HostLink | None = None,
    ) -> FlatShards:
        """Allocates the persistent shards, zeroed; slots come with `bind`."""
        places, start = [], 0
        for info in infos:
            region = info.region
            places.append(ParamRange(info=info, region=region, start=start, stop=start + region.numel))
            start += info.most  # so that ranks with smaller regions cut the buffer alike
        self = cls(placed=placed, coordinates=coordinates, places=tuple(places), device=device)
        spec, sizes, on_host = placed.buffer, placed.sizes, placed.on_host_kinds

        def zeros(kind: str, wire: str) -> Tensor:
            """So many bytes of elements, or of messages."""
            count, dtype = getattr(sizes, kind), DTYPES.get(wire, torch.uint8)
            if kind in on_host:
                assert host is not None  # the caller has planned its bytes
                return host.arena.take(count, dtype)
            return torch.zeros(count // dtype.itemsize, dtype=dtype, device=device)

        self.params = zeros("params", spec.param_dtype)
        if spec.master_dtype is not None:
            if placed.master_in_params:
                self.master = inside(self.params, self.param_range, self.state_range)
            else:
                self.master = zeros("master", spec.master_dtype)
            grads = zeros("grads", spec.grad_dtype)
            if "grads" in on_host:
                self.host_grads = grads
            else:
                self.grads = grads
                self.host_grads = zeros("shown", spec.grad_dtype) if sizes.shown else None
            self.cast = zeros("cast", spec.param_dtype) if sizes.cast else None
        if placed.kept_axis is not None:
            self.kept = zeros("kept", placed.kept_wire)
        if placed.feedback:
            self.owed = zeros("feedback", FEEDBACK_DTYPE)
        return self

    @property
    def spec(self) -> FlatBuffer:
        return self.placed.buffer

    @property
    def padded(self) -> int:
        return self.placed.padded

    @property
    def name(self) -> str:
        """Its first parameter's: the same on all ranks, and no other buffer's."""
        return self.places[0].info.name

    def range_of(self, axes: Sequence[Axis]) -> slice:
        return self.placed.layout.shard(self.padded, axes, self.coordinates)

    @property
    def master_in_params(self) -> bool:
        """Whether the master, if there is one, has no memory of its own."""
        return self.master is not None and self.placed.master_in_params

    @property
    def state_range(self) -> slice:
        return self.range_of(self.placed.layout.significant)

    @property
    def param_range(self) -> slice:
        return self.range_of(self.placed.layout.param_axes)

    @property
    def optimizer_shard(self) -> tuple[Tensor, tuple[Axis, ...]]:
        """The shard that the optimizer's parameters are views of (frozen ones: the parameter shard), and its axes."""
        layout = self.placed.layout
        return (self.params, layout.param_axes) if self.master is None else (self.master, layout.significant)

    def persistent(self) -> dict[str, Tensor]:
        """Shards and copies, by kind, each storage once."""
        kinds = ["params", "kept", "owed", "cast", "host_grads"]
        kinds += [] if self.master_in_params else ["master"]
        kinds += [] if "grads" in self.placed.on_host_kinds else ["grads"]
        held = {kind: getattr(self, kind) for kind in kinds}
        return {kind: tensor for kind, tensor in held.items() if tensor is not None}

    def lies_on_host(self, kind: str) -> bool:
        return kind == "host_grads" or kind in self.placed.on_host_kinds

    def step_here(self) -> None:
        """A step on the device is on its way, and leaves the compute copy."""
        self.fresh = True

    def take_fresh(self) -> bool:
        """Whether a step on the device leaves the compute copy; forgets that it does."""
        found, self.fresh = self.fresh, False
        return found

    @property
    def reduced(self) -> Tensor:
        """The state shard's part of the gradient shard."""
        assert self.grads is not None
        return inside(self.grads, self.range_of(self.placed.layout.grad_axes), self.state_range)

    @property
    def shown(self) -> Tensor:
        """The memory that `.grad` shows: `reduced`, or its copy on the host."""
        if self.host_grads is None:
            return self.reduced
        if "grads" not in self.placed.on_host_kinds:
            return self.host_grads
        return inside(self.host_grads, self.range_of(self.placed.layout.grad_axes), self.state_range)

    def fill(self, values: Tensor) -> None:
        """Takes this rank's shards out of the whole buffer's values, 1-D of `padded` elements."""
        self.params.copy_(values[self.param_range])
        if self.master is not None and not self.master_in_params:
            self.master.copy_(values[self.state_range])

    def bind(self, full: Tensor | None, waiting: Tensor | None, grads: Tensor | None = None) -> None:
        """Makes the leaves, and the optimizer's parameters, over the given parts of the slots (None: needs none).

        Writes to `full` go through an alias with a version counter of its own: autograd's saved tensors point into the
        slot, and a gather before the backward restores the same values. Leaves over a slot share its version; those
        over `params` have one each, so that a step of some parameters is no change of the others.
        """
        seen = self.params if full is None else full
        self.full, self.waiting = seen.data, waiting
        self.grads = self.grads if grads is None else grads
        for place in self.places:
            whole = self.params.data if full is None else full
            view = whole[place.start : place.stop].view(place.shape)
            leaf = make_leaf(view, self.spec.trainable, place.info.name, place.info.spread)
            _carry_attributes(place.info.param, leaf)
            self.leaves.append(leaf)

    @property
    def gathered(self) -> bool:
        """Whether the unit computes with a slot. If not, it computes with `params`."""
        return self.full.data_ptr() != self.params.data_ptr()

    @property
    def collected(self) -> Tensor:
        """Where gradients are copied to, to be reduced, unless they are alone: 1-D of `padded` elements."""
        whole = self.grads if self.waiting is None else self.waiting
        assert whole is not None
        return whole

    @cached_property
    def destinations(self) -> GradDestinations:
        """The destinations in `collected`."""
        return self.destinations_in(self.collected)

    def destinations_in(self, whole: Tensor) -> GradDestinations:
        """The destinations in `whole`, 1-D of `padded` elements."""
        ends = [0, *(place.stop for place in self.places)]
        starts = [*(place.start for place in self.places), self.padded]
        return GradDestinations(
            whole=whole,
            parts=[whole[place.start : place.stop].view(place.shape) for place in self.places],
            gaps=[whole[stop:start] for stop, start in zip(ends, starts, strict=True) if stop < start],
        )

    @cached_property
    def _sums(self) -> list[Tensor]:
        """The accumulator for autograd to add to, where that is as good as adding to it afterwards: each parameter's
        part, with a version of its own, which tells whether anything was added. DTensors' are made local first."""
        stays = self.waiting is None and "grads" not in self.placed.on_host_kinds
        direct = stays and all(isinstance(x, PlainLeaf) and x.dtype == self.collected.dtype for x in self.leaves)
        return [part.data for part in self.destinations.parts] if direct else []

    def add_in_place(self) -> None:
        """Has autograd add a further micro-batch's gradients to the accumulator, while it has them at hand. Not if
        some have come before, or a hook changes those of one micro-batch."""
        ready = self._sums and not self.adds
        if ready and all(leaf.grad is None and not leaf._post_accumulate_grad_hooks for leaf in self.leaves):
            torch._C._autograd._unsafe_set_version_counter(tuple(self._sums), (0,) * len(self._sums))
            self.adds = True
            for leaf, held in zip(self.leaves, self._sums, strict=True):
                leaf.grad = held

    def grads_of_leaves(self) -> list[Tensor | None]:
        """Gradients that autograd has left on the leaves, open or closed; after `add_in_place`, those it added to."""
        with torch._C.DisableTorchFunctionSubclass():  # else closed ones take a detour
            grads = [leaf.grad for leaf in self.leaves]
        if self.adds:
            return [None if g is held and not held._version else g for g, held in zip(grads, self._sums, strict=True)]
        return grads

    def take_grads(self) -> list[Tensor | None]:
        """Takes them off the leaves."""
        grads, self.adds = self.grads_of_leaves(), False
        with torch._C.DisableTorchFunctionSubclass():
            for leaf in self.leaves:
                leaf.grad = None
        return grads

    def make_optimizer_params(self, home: Home, control: Control, agree_max: Agree, **attributes: object) -> None:
        """One `ShardedParameter` with `attributes` per original, over its part of this rank's state shard (frozen:
        parameter shard). `control`, all ranks that have the tensors, and `agree_max` are for `Elements`."""
        shard, axes = self.optimizer_shard
        held, spans, layout = self.range_of(axes), home.spans(control, axes), str(home.layout.strategy)
        layout += "" if self.spec.trainable else ", frozen"  # and divided over other axes than trained ones
        in_leaves = bool(self.leaves) and not self.gathered and (self.master is None or self.master_in_params)
        on_host = self.spec.trainable and "master" in self.placed.on_host_kinds
        grads_on = self.shown.device if self.spec.trainable else self.device
        attributes |= {"on_host": on_host, "grads_on": grads_on, "streamed": self.placed.streamed}
        for index, place in enumerate(self.places):
            start, stop = overlap(place, held)
            spread = place.info.spread
            most = place.region.numel if spread is None else spread.most  # the original has lost its values
            elements = Elements(
                shape=place.global_shape,
                spread=spread,
                place=home.place(self.padded, axes, place.start, most),
                name=place.info.name,
                layout=layout,
                region=place.region,
                start=start - place.start,
                numel=stop - start,
                spans=spans if spread is None else (*spans, *spread.spans),
                control=control,
                writes=all(group.rank() == 0 or place.info.divided(group) for group in home.control.beyond),
                agree_max=agree_max,
            )
            own = shard[start - held.start : stop - held.start]
            if in_leaves:  # with the leaf's version, which autograd looks at
                own = local_of(self.leaves[index]).detach().view(-1)[start - place.start : stop - place.start]
            param = make_slice(ShardedParameter, own, self.spec.trainable, elements=elements, **attributes)
            _carry_attributes(place.info.param, param)
            self.optimizer_params.append(param)
            if self.spec.trainable:
                local = self.shown[start - held.start : stop - held.start]
                self.optimizer_grads.append(slice_of(elements, local))

    def set_grads_aside(self) -> bool:
        """Leaves `grads` to another step: gradients that are shown, or that somebody holds, keep their values, as in
        plain torch, in memory of their own. Returns whether any are shown and not zeros."""
        shown = False
        for index, param in enumerate(self.optimizer_params if self.spec.trainable else ()):
            held = _references(self.optimizer_grads, index) > _ALONE  # also by `param.grad`
            grad, own = param.grad, self.optimizer_grads[index]
            zeros = grad is own and own.zeroed
            shown = shown or not (grad is None or zeros)
            if held and not zeros:
                self.optimizer_grads[index] = slice_of(own.elements, own.local)
                give_memory(own, own.local.clone())
        return shown

    def forget_sum(self, position: int) -> None:
        """Clears a parameter's part of the gradient shard."""
        sums = self.host_grads if "grads" in self.placed.on_host_kinds else self.grads
        assert sums is not None
        held = self.range_of(self.placed.layout.grad_axes)
        start, stop = overlap(self.places[position], held)
        sums[start - held.start : stop - held.start].zero_()

    def show_grad(self, position: int, *, used: bool, reduced: bool) -> None:
        """Shows a gradient of the step that has ended, added to one that is shown already. `used`: some rank has had a
        gradient of it; `reduced`: `grads` holds it, or zeros."""
        param, own = self.optimizer_params[position], self.optimizer_grads[position]
        held = param.grad
        if held is None:
            param.grad = own if used else None
        elif held is not own:
            assert isinstance(held, Slice)  # its setter sees to it
            if reduced:
                own.local.add_(held.local)
            else:
                own.local.copy_(held.local)
            self.optimizer_grads[position] = give_memory(held, own.local)
        # One that was zeroed and not dropped stays, of zeros if it is not used.
        self.optimizer_grads[position].zeroed = held is own and own.zeroed and not used


def _references(items: Sequence[object], index: int) -> int:
    return sys.getrefcount(items[index])


_ALONE = _references([object()], 0)


def _carry_attributes(original: nn.Parameter, param: nn.Parameter) -> None:
    """Copies attributes that users set on a parameter, such as one that excludes it from weight decay."""
    for name, value in vars(original).items():
        if not name.startswith("_zeromesh") and not hasattr(param, name):
            setattr(param, name, value)


def inside(tensor: Tensor, held: slice, wanted: slice) -> Tensor:
    """The part of `tensor`, which covers range `held` of a buffer, that covers `wanted`, which lies inside `held`."""
    return tensor[wanted.start - held.start : wanted.stop - held.start]


def overlap(place: ParamRange, held: slice) -> tuple[int, int]:
    """The part of a parameter's range inside `held`; an empty range at the nearer end if there is none."""
    start = min(max(place.start, held.start), held.stop)
    return start, max(start, min(place.stop, held.stop))
