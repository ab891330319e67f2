"""`zm.by_owner`: an optimizer that steps on whole tensors, each on one of the ranks that hold its slices.

From outside it is a torch optimizer over the model's parameters. Inside, each bucket of tensors has an optimizer of the
given class, over the bucket's tensors that this rank owns. A class that counts its steps by group still counts one per
step.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.engine.control import Control
from zeromesh.engine.elements import Home
from zeromesh.engine.engine import Engine
from zeromesh.engine.flat import ParamRange
from zeromesh.engine.optim import UNPROVEN, WHOLE, look_at_states
from zeromesh.engine.param import ShardedParameter
from zeromesh.engine.units import DTYPES
from zeromesh.engine.vouched import require_known_states
from zeromesh.errors import MismatchError, OptimizerError
from zeromesh.owners.beyond import Beyond
from zeromesh.owners.bucket import Member, OwnedBucket, WholeSteps, without_memory
from zeromesh.owners.stacks import Stacking, require_stackable
from zeromesh.owners.states import WholeStates
from zeromesh.owners.trial import require_tensorwise, small_like, trial_state, trial_state_bytes
from zeromesh.pieces.owners import (
    BUCKET_BYTES,
    WAITS,
    Owners,
    Placement,
    choose_owners,
    cut,
    newton_schulz_flops,
    significant_strides,
)
from zeromesh.pieces.passage import Part, bucket_of, passage
from zeromesh.schedule.bucket import Bucket, most_room
from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.units import format_bytes

CostOf = Callable[[Sequence[int]], float]
"""Cost of stepping on a tensor of a shape, in any unit."""


def by_owner(
    optimizer: type[Optimizer],
    params: Iterable[Any],
    *,
    cost: CostOf | None = None,
    bucket_bytes: int | None = None,
    batched: bool = False,
    dims: int | None = None,
    **options: Any,
) -> OwnerOptimizer:
    """Makes an optimizer that steps on whole tensors, each on one rank, its owner.

    Use it for classes that treat each tensor separately and need the whole tensor: Muon, Shampoo, SOAP, Adafactor,
    LAMB. All ranks call it alike, after `zm.shard`.

    Args:
        optimizer: the class, unchanged.
        params: parameters of the sharded model, or groups of them with their own options.
        cost: function from a tensor's shape to the cost of a step on it, by which owners are balanced. Default: the
            operations of torch's Muon for Muon, else the number of elements.
        bucket_bytes: bytes that one bucket brings to one owner. Default: 64 MiB, or more if ranks would wait for each
            other.
        batched: step on all tensors of one shape at once, through torch.vmap. Kernels are fewer and larger, and may
            round differently.
        dims: number of trailing dimensions that the class sees; further dimensions are a batch. Use 2 for expert
            weights of three dimensions.
        options: options of `optimizer`.

    Raises:
        OptimizerError: a parameter is not the sharded model's, the class mixes tensors, torch.vmap cannot run it with
            `batched`, or its states do not fit on a device.
        MismatchError: on all ranks, if they pass different tensors.

    Examples:
        >>> optimizer = by_owner(torch.optim.Muon, model.blocks.parameters(), lr=0.02)  # doctest: +SKIP
    """
    groups = [dict(entry) if isinstance(entry, Mapping) else entry for entry in params]
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    for group in groups:
        group["params"] = [given] if isinstance(given := group["params"], Tensor) else list(given)
    engine = _engine_of([param for group in groups for param in group["params"]], optimizer)
    stacking = Stacking(alike=batched, dims=dims)
    found = OwnerOptimizer(optimizer, groups, options, engine, cost or _cost_of(optimizer), bucket_bytes, stacking)
    require_memory(found, engine.control)
    return found


def _cost_of(kind: type[Optimizer]) -> CostOf:
    named = any(base.__name__ == "Muon" for base in kind.__mro__)
    return newton_schulz_flops if named else lambda shape: float(torch.Size(shape).numel())


def _engine_of(params: Sequence[Any], kind: type[Optimizer]) -> Engine:
    engines: list[object] = [param.engine() if type(param) is ShardedParameter else None for param in params]
    strange = next((place for place, engine in enumerate(engines) if engine is None or engine is not engines[0]), None)
    if not params or strange is not None:
        found = "none" if strange is None else f"{type(params[strange]).__name__} at place {strange}"
        raise OptimizerError(
            f"zm.by_owner({kind.__name__}, params) needs parameters of one sharded model; got {found}: call it after "
            f"zm.shard, or the library's prepare or setup of the model alone, with parameters from model.parameters()"
        )
    engine = engines[0]
    assert isinstance(engine, Engine)
    return engine


class OwnerOptimizer(Optimizer):
    """The optimizer that `zm.by_owner` returns.

    Attributes:
        kind: the class that steps.
        placements: places of its tensors, without tensors that have no elements.
        owners: which rank owns which tensor, and how even the load is.
        buckets: the buckets in which tensors are stepped on.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        groups: list[dict[str, Any]],
        options: dict[str, Any],
        engine: Engine,
        cost: CostOf,
        bucket_bytes: int | None,
        stacking: Stacking,
    ) -> None:
        self._complete = False
        self.kind = kind
        self._stacking = stacking
        template = _stand_in(kind, groups, options, self._whole)
        shown = [{**own, "params": group["params"]} for own, group in zip(template.param_groups, groups, strict=True)]
        super().__init__(shown, template.defaults)
        self._complete = True
        self._engine = weakref.ref(engine)
        self._params = [param for group in self.param_groups for param in group["params"]]
        self._taken = [_seen(group) for group in self.param_groups]
        stepped = [param for param in self._params if param.requires_grad and param.numel()]
        wholes = [self._whole(param) for param in stepped]
        items = [small_like(whole) for whole in {whole.dim(): whole for whole in wholes}.values()]
        require_tensorwise(kind, items, options)
        if stacking.alike or any(stacking.is_batch(param.shape) for param in stepped):
            require_stackable(kind, items, options)
        self._place(engine, stepped, cost, bucket_bytes, groups, options)
        self._take_over()

    def _place(
        self,
        engine: Engine,
        params: list[ShardedParameter],
        cost: CostOf,
        bucket_bytes: int | None,
        groups: list[dict[str, Any]],
        options: dict[str, Any],
    ) -> None:
        """Chooses owners, and adds the buckets to the engine's schedule."""
        known = {
            param: (place, buffer)
            for buffer in (buffer for unit in engine.units for buffer in unit.trained)
            for place, param in zip(buffer.places, buffer.optimizer_params, strict=True)
        }
        places, buffers = [known[param][0] for param in params], [known[param][1] for param in params]
        home = _home_of(engine, self.kind, {buffer.spec.part for buffer in buffers} or {""})
        dtypes = [(b.spec.grad_dtype, cast(str, b.spec.master_dtype)) for b in buffers]  # all are trained
        self._grad_dtypes = {param: DTYPES[grad] for param, (grad, _) in zip(params, dtypes, strict=True)}
        self._given = options
        self._require_same(engine, places, cost, bucket_bytes)
        beyond = Beyond.of(engine, home, places, self._stacking)
        layout, rank = beyond.layout, beyond.rank(home)
        self._agree = partial(
            home.control.agree, further=[engine.backend.groups[a.name].reduce.process_group for a in beyond.axes]
        )
        joined = [beyond.joined(place) for place in places]
        self.placements = [
            Placement(
                name=place.info.name,
                shape=region.sizes,
                start=place.start,
                padded=buffer.padded,
                planes=beyond.held(place),
            )
            for place, buffer, region in zip(places, buffers, joined, strict=True)
        ]
        costs = [cost(placement.shape) for placement in self.placements]
        self.owners: Owners = choose_owners(layout, self.placements, costs)
        parts = defaultdict[int, list[Part]](list)
        for part in passage(layout, self.placements, self.owners.rank_of):
            parts[part.tensor].append(part)
        mine = [any(part.owner == rank for part in parts[index]) for index in range(len(params))]
        WHOLE[self] = WholeStates(
            (param, region) for param, region, own in zip(params, joined, mine, strict=True) if own
        )
        UNPROVEN[self] = require_known_states
        # All parameters if any moves: if tensors are also divided elsewhere, another rank may have to send its part.
        self._moving = params if any(part.hops for own in parts.values() for part in own) else []
        members = [
            Member(
                param=p,
                shape=each.shape,
                whole=self._whole(p) if own else None,
                parts=tuple(parts[index]),
                grad_itemsize=self._grad_dtypes[p].itemsize,
            )
            for index, (p, each, own) in enumerate(zip(params, self.placements, mine, strict=True))
        ]
        each = max((sum(ITEM_BYTES[dtype] for dtype in pair) for pair in dtypes), default=1)
        self.buckets, described = list[OwnedBucket](), list[Bucket]()
        most, waits = (bucket_bytes or BUCKET_BYTES) // each, WAITS if bucket_bytes is None else math.inf
        for indices in cut(self.placements, self.owners, costs, most, waits=waits):
            held = [members[index] for index in indices]
            optimizer = _stand_in(self.kind, groups, options, {m.param: m.whole for m in held}.get)
            bucket = OwnedBucket(
                optimizer=optimizer,
                members=held,
                rank=rank,
                groups=engine.backend.groups,
                strides=significant_strides(layout),
                stacking=self._stacking,
                device=engine.backend.device,
            )
            self.buckets.append(bucket)
            passing = [part for member in held for part in member.parts]
            own = bucket_of(layout, self.placements, passing, rank, dtypes)
            copied_bytes = sum(member.copied_bytes(engine.backend.device) for member in held)
            described.append(replace(own, room_bytes=own.room_bytes + copied_bytes))
        self._number = engine.own(described, beyond.axes, engine.whole or WholeSteps(engine.backend))
        weakref.finalize(self, _disown, self._engine, self._number)

    def _require_same(
        self, engine: Engine, places: Sequence[ParamRange], cost: CostOf, bucket_bytes: int | None
    ) -> None:
        """Raises MismatchError, on all ranks, if they would choose different owners."""
        shapes = [tuple(place.global_shape) for place in places]
        named = zip(places, shapes, strict=True)
        lines = [f"{self.kind.__name__} of {place.info.name} {shape} for {cost(shape)}" for place, shape in named]
        engine.control.require_same(
            "tensors in zm.by_owner", "\n".join([*lines, f"buckets of {bucket_bytes}", repr(self._stacking)])
        )

    # ---- the interface of torch's optimizers

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._complete:
            raise OptimizerError(
                "the owners of an optimizer's tensors are chosen once: give zm.by_owner all groups, or make another "
                "optimizer for further parameters"
            )
        super().add_param_group(param_group)

    def _living_engine(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise OptimizerError("the model whose parameters this optimizer steps on has been deleted")
        return engine

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps as the class itself does, on all ranks together."""
        engine, loss = self._living_engine(), None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            engine.before_step(self._params)
        self._run(engine, None)
        look_at_states(self)
        return loss

    def _run(self, engine: Engine, act: Callable[[Optimizer], object] | None) -> None:
        """Runs a step, or `act` instead, on whole tensors."""
        self._forget_changed(engine)
        self._hand_over()
        for bucket in self.buckets:
            bucket.act = act
        engine.whole.step(self.buckets)
        self._take_over()
        if updated := [param for param in self._grad_dtypes if param.grad is not None]:
            engine.changes.stepped(updated, by=weakref.ref(self))

    def __getattr__(self, name: str) -> Any:
        """Returns further methods of the class, such as `train` of schedule-free ones. All ranks call them."""
        if name.startswith("_") or not callable(getattr(vars(self).get("kind"), name, None)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return partial(self._call, name)

    @torch.no_grad()
    def _call(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Calls a method, which may change values as a step does. Gradients of zero travel with the values, and are
        dropped."""
        engine = self._living_engine()
        stepped = [*self._grad_dtypes]
        shown = [param.grad for param in stepped]
        for param in stepped:
            param.grad = torch.zeros_like(param, dtype=self._grad_dtypes[param])
        try:
            self._run(engine, lambda optimizer: getattr(optimizer, name)(*args, **kwargs))
        finally:
            for param, grad in zip(stepped, shown, strict=True):
                param.grad = grad

    def _forget_changed(self, engine: Engine) -> None:
        """Marks values that something else changed on any rank since the last step, to be sent to their owner again."""
        if not self._moving:
            return
        changed = [engine.changes.made_by(param) is not self for param in self._moving]
        has, count = [param.grad is not None for param in self._moving], len(self._moving)
        words = self._agree([*changed, *has, *(not each for each in has)])
        for param, some, not_all in zip(self._moving, words[count:], words[2 * count :], strict=False):
            if some and not_all:
                raise MismatchError(
                    f"all ranks must have a gradient of {param.full_name} when its owner is to step on it, or none; "
                    f"some have one: change `.grad` alike on all of them"
                )
        params = {param for param, by_others in zip(self._moving, words, strict=False) if by_others}
        for bucket in self.buckets:
            bucket.forget(params)

    def _hand_over(self) -> None:
        """Passes options and states that users, schedulers and loads have changed to the buckets' optimizers."""
        for place, (group, taken) in enumerate(zip(self.param_groups, self._taken, strict=True)):
            now = _seen(group)
            changed = {key: group[key] for key in now if key not in taken or not _same(taken[key], now[key])}
            for bucket in self.buckets:
                bucket.optimizer.param_groups[place].update(changed)
        for bucket, param, whole in self._own():
            if param in self.state:
                bucket.optimizer.state[whole] = self.state[param]
            else:
                bucket.optimizer.state.pop(whole, None)

    def _take_over(self) -> None:
        """Takes over states and group options that the step has changed, such as step counts."""
        first = self.buckets[0].optimizer.param_groups
        for group, own in zip(self.param_groups, first, strict=True):
            group.update(_options(own))
        self._taken = [_seen(group) for group in self.param_groups]
        for bucket, param, whole in self._own():
            if whole in bucket.optimizer.state:
                self.state[param] = bucket.optimizer.state[whole]

    def kept_values(self) -> list[Tensor]:
        """The values that this rank keeps for tensors that it owns but does not hold whole."""
        return [values for bucket in self.buckets for values in bucket.values]

    def kept_bytes(self) -> int:
        """Bytes of `kept_values` once all tensors have been stepped on."""
        return sum(member.kept_bytes for bucket in self.buckets for member in bucket.members)

    def room_bytes(self) -> tuple[int, int]:
        """Peak bytes of temporary memory in a step, as (predicted, in the last step)."""
        engine = self._engine()
        described = () if engine is None else engine.schedule.buckets[self._number]
        return most_room([each.room_bytes for each in described]), most_room([b.room_bytes for b in self.buckets])

    def state_bytes(self) -> int:
        """Predicts the bytes of this rank's states once all its tensors have been stepped on. It does not look at
        existing states: the class steps once on a tensor of each kind. Numbers, such as step counts, do not count."""
        found: dict[tuple[object, ...], int] = {}
        total = 0
        for _, param, _ in self._own():
            item, group = self._whole(param), self._group_of(param)
            kind = id(group), item.shape, item.dtype, self._grad_dtypes[param]
            if kind not in found:
                options = _options(group)
                found[kind] = trial_state_bytes(self.kind, item, self._grad_dtypes[param], options, self._given)
            total += found[kind] * (prod(WHOLE[self][param].sizes) // item.numel())
        return total

    def made_state(self, param: ShardedParameter) -> Mapping[str, Any]:
        """Makes the state that the class would make for one of this rank's tensors; a load then fills it."""
        like, options = self._whole(param), _options(self._group_of(param))
        return trial_state(self.kind, like, like.device, self._grad_dtypes[param], options, self._given)

    def _group_of(self, param: ShardedParameter) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(each is param for each in group["params"]))

    def _whole(self, param: ShardedParameter) -> nn.Parameter:
        """A stand-in without memory, in the shape that the class sees."""
        engine = param.engine()
        device = param.device if engine is None else engine.backend.device
        return nn.Parameter(without_memory(self._stacking.item(param.shape), param.dtype, device))

    def _own(self) -> Iterator[tuple[OwnedBucket, ShardedParameter, nn.Parameter]]:
        for bucket in self.buckets:
            for member in bucket.members:
                if member.whole is not None:
                    yield bucket, member.param, member.whole


def _disown(reference: weakref.ref[Engine], number: int) -> None:
    engine = reference()
    if engine is not None:
        engine.interpreter.adopt(engine.schedule.without_owned(number))


def _home_of(engine: Engine, kind: type[Optimizer], parts: set[str]) -> Home:
    """Returns the home of the one layout of these parts. Raises OptimizerError if there are several."""
    if len(parts) > 1:
        shown = ", ".join(f"part {part}" if part else "no part" for part in sorted(parts))
        raise OptimizerError(
            f"zm.by_owner({kind.__name__}, params) spreads tensors over the ranks of one layout; got some of {shown}: "
            f"make an optimizer for the parameters of each"
        )
    return engine.homes[parts.pop()]


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None if no limit is known."""
    if device.type == "cpu":  # the host may swap
        return None
    module = torch.get_device_module(device)
    free: int = module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)
    return free


def require_memory(optimizer: OwnerOptimizer, control: Control) -> None:
    """Raises OptimizerError, on all ranks, if one has too little free memory for its own tensors' states, values and
    gradients."""
    free = free_bytes(optimizer.buckets[0].device)
    if free is None:
        return
    kept, room = optimizer.state_bytes() + optimizer.kept_bytes(), optimizer.room_bytes()[0]
    short = torch.tensor([int(kept + room > free)], device=control.device)
    if not control.reduce_all(short, dist.ReduceOp.MAX).item():
        return
    every = control.gather((kept, room, free))
    rank = max(range(len(every)), key=lambda each: every[each][0] + every[each][1] - every[each][2])
    kept, room, free = every[rank]
    raise OptimizerError(
        f"zm.by_owner({optimizer.kind.__name__}, params): rank {rank} owns tensors whose states and values take "
        f"{format_bytes(kept)}, and in a step {format_bytes(room)} more; of its device {format_bytes(free)} are free, "
        f"{format_bytes(kept + room - free)} too little. Shard states over more ranks, so that more own (stage 1 or "
        f"above on further axes), or give elementwise optimizers their slices, without zm.by_owner"
    )


def _stand_in(
    kind: type[Optimizer],
    groups: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    stands_for: Callable[[ShardedParameter], nn.Parameter | None],
) -> Optimizer:
    """Makes an optimizer of the class with these groups, over the tensors that stand for the parameters here."""
    own = [
        {**group, "params": [whole for param in group["params"] if (whole := stands_for(param)) is not None]}
        for group in groups
    ]
    return kind(own, **options)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _seen(group: Mapping[str, Any]) -> dict[str, tuple[Any, int]]:
    """Returns the options. Each has a version that counts writes if it is a tensor, as a learning rate may be."""
    return {key: (v, v._version if isinstance(v, Tensor) else 0) for key, v in _options(group).items()}


def _same(was: tuple[Any, int], now: tuple[Any, int]) -> bool:
    """Whether an option is unchanged. Reads nothing from a device."""
    (one, written), (other, rewritten) = was, now
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other and written == rewritten
    return bool(one is other or one == other)
