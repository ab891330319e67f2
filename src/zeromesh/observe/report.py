"""Reports a sharded model's memory by kind (predicted and allocated) and its traffic by axis (predicted and sent)."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeromesh.comm.exchange import Sent
from zeromesh.engine.api import engine_of
from zeromesh.engine.elements import Elements
from zeromesh.engine.engine import Engine
from zeromesh.engine.optim import VOUCHED, WHOLE, take_slices
from zeromesh.engine.param import ShardedParameter, Slice, make_slice
from zeromesh.engine.units import DTYPES
from zeromesh.owners.optimizer import OwnerOptimizer
from zeromesh.owners.trial import kept_tensors
from zeromesh.pieces.region import Region
from zeromesh.schedule.memory import MemoryPlan
from zeromesh.schedule.step import sent_bytes_per_axis
from zeromesh.schedule.transfer import HOST_AXIS
from zeromesh.strategy.stage import HOST
from zeromesh.trace import Lines, MemoryLine, TrafficLine

T = TypeVar("T")

_TRIAL_NUMEL = 16
"""Elements that `_state_bytes` steps on: one vector of a fused implementation on any machine."""


def memory_report(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
) -> Lines[MemoryLine]:
    """Reports this rank's model state: predicted bytes beside allocated bytes.

    Args:
        model: a sharded model.
        optimizer: one or several, whose states count as optimizer memory. Without any, only masters count.

    Returns:
        Lines for params, grads, optimizer (masters and states), buffers (slots, kept copies, residuals, staging,
        workspace) and total, and the same for the host if it holds shards. Whole values that owners keep
        (`zm.by_owner`) count as well. The line "step" then has the memory of tensors that are on this rank only
        during a step, when no activation is alive. Not counted: the model's buffers, and frozen parameters of dtypes
        that are not sharded (complex ones), which every rank holds whole.

    Predictions do not look at allocated memory. A trial step of the same optimizer, with each group's options, measures
    its bytes per element: see `_state_bytes`. So states are predicted before the first step, and for parameters that
    have never had a gradient.
    """
    engine = engine_of(model)
    plan, lines = engine.schedule.memory, Lines[MemoryLine]()
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    states = [_optimizer_states(engine, each) for each in optimizers]
    for place, own in ("device", plan), ("host", plan.host):
        if own is not None:
            predicted, held = (sum(each.get(place, (0, 0))[side] for each in states) for side in (0, 1))
            lines += _lines_of(place, own, _held_tensors(engine, place), predicted, held)
    rooms = [each.room_bytes() for each in optimizers if isinstance(each, OwnerOptimizer)]
    if rooms:
        predicted, taken = map(max, zip(*rooms, strict=True))  # they step one after the other
        lines.append(MemoryLine(kind="step", predicted_bytes=predicted, allocated_bytes=taken))
    return lines


def _lines_of(
    place: str, plan: MemoryPlan, found: Mapping[str, list[Tensor]], predicted_states: int, states: int
) -> list[MemoryLine]:
    def held(*kinds: str) -> int:
        return _storage_bytes([tensor for kind in kinds for tensor in found[kind]], parts=place == "host")

    kinds = {
        "params": (plan.params_bytes, held("params")),
        "grads": (plan.grads_bytes, held("grads", "host_grads")),
        "optimizer": (plan.master_bytes + predicted_states, held("master") + states),
        "buffers": (plan.buffers_bytes, held("kept", "owed", "cast", "working")),
    }
    kinds["total"] = (sum(predicted for predicted, _ in kinds.values()), sum(held for _, held in kinds.values()))
    return [MemoryLine(kind=k, predicted_bytes=p, allocated_bytes=a, place=place) for k, (p, a) in kinds.items()]


def _held_tensors(engine: Engine, place: str) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = defaultdict(list)
    for buffer in (buffer for unit in engine.units for buffer in unit.buffers):
        for kind, tensor in buffer.persistent().items():
            if buffer.lies_on_host(kind) == (place == "host"):
                found[kind].append(tensor)
    found["working"] = engine.backend.working_buffers() if place == "device" else []
    return found


def gathered(lines: Sequence[T]) -> list[list[T]]:
    """Returns each line with its values on all ranks. Collective."""
    everyone: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, list(lines))
    return [list(line) for line in zip(*everyone, strict=True)]


def _storage_bytes(tensors: list[Tensor], *, parts: bool = False) -> int:
    """Bytes of the tensors' storages, counting each storage once. With `parts`, bytes of the tensors themselves."""
    if parts:
        return sum(tensor.nbytes for tensor in tensors)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def _optimizer_states(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, int]]:
    """Returns by place the (predicted, held) bytes of the states of this engine's parameters."""
    buffers = [buffer for unit in engine.units for buffer in unit.buffers]
    grad_dtypes = {param: DTYPES[b.spec.grad_dtype] for b in buffers for param in b.optimizer_params}
    where = {p: "host" if "master" in b.placed.on_host_kinds else "device" for b in buffers for p in b.optimizer_params}
    # States that come to the device for a step lie on the host as a whole buffer does, padding included.
    streamed = {b.optimizer_params[0]: b for b in buffers if b.placed.streamed}
    predicted, held = Counter[str](), dict[str, list[Tensor]](device=[], host=[])
    take_slices(optimizer)
    if isinstance(optimizer, OwnerOptimizer):
        own = [param for param in WHOLE[optimizer] if param in grad_dtypes]
        states = [state for p in own for state in kept_tensors(optimizer.state.get(p, {}), p)]
        kept = _storage_bytes([*states, *optimizer.kept_values()])
        return {"device": (optimizer.state_bytes() + optimizer.kept_bytes() if own else 0, kept)}
    for index, group in enumerate(optimizer.param_groups):
        rates: dict[object, int] = {}
        for param in (param for param in group["params"] if param in grad_dtypes):
            numel = 0 if param.streamed else param.local.numel()
            held[where[param]] += [] if param.streamed else _element_states(optimizer, param)
            if param in streamed:
                numel = streamed[param].optimizer_shard[0].numel()
                held["host"] += [flat for _, flat in streamed[param].states.get(optimizer, {}).values()]
            if param.requires_grad:
                kind = param.dtype, grad_dtypes[param]
                if kind not in rates:
                    rates[kind] = _state_bytes(optimizer, index, param, grad_dtypes[param])
                predicted[where[param]] += rates[kind] * numel
    return {place: (predicted[place], _storage_bytes(states)) for place, states in held.items()}


def _element_states(optimizer: torch.optim.Optimizer, param: Tensor) -> list[Tensor]:
    """The states that `optimizer` keeps for the elements of `param`. Scalars, such as step counts, are left out."""
    state: dict[str, Any] = optimizer.state.get(param, {})
    return [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]


def _state_bytes(optimizer: torch.optim.Optimizer, group: int, like: ShardedParameter, grad_dtype: torch.dtype) -> int:
    """Measures the bytes that `optimizer` keeps for each element of a parameter, without looking at its states.

    A copy of it, without states and hooks, steps once on a parameter of a few elements with the options of group number
    `group`. The dtype of the gradient matters, since some states have it (SGD's momentum). Raises OptimizerError for an
    optimizer that is refused anyway, since it is not elementwise.
    """
    shape = torch.Size([_TRIAL_NUMEL])
    elements = Elements(shape=shape, name=like.full_name, region=Region.whole(shape), start=0, numel=_TRIAL_NUMEL)
    values = torch.ones(_TRIAL_NUMEL, dtype=like.dtype, device=like.device)
    trial: ShardedParameter = make_slice(
        ShardedParameter, values, True, elements=elements, unit=like.unit, engine=lambda: None
    )
    trial.grad = make_slice(Slice, values.to(grad_dtype, copy=True), False, elements=elements)
    stepping = object.__new__(type(optimizer))
    own = {"state": defaultdict(dict), "param_groups": [{**optimizer.param_groups[group], "params": [trial]}]}
    # Left out: `step` that a scheduler has put on the object, which would step the original.
    hooks: dict[str, Any] = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    stepping.__dict__ = {name: value for name, value in vars(optimizer).items() if name != "step"} | hooks | own
    if optimizer in VOUCHED:
        VOUCHED.add(stepping)
    stepping.step()
    return sum(state.nbytes for state in _element_states(stepping, trial)) // _TRIAL_NUMEL


class traffic_report:  # used as a function that is also a context
    """Counts the bytes that this rank sends while the context is open, beside those that the schedule predicts.

    Args:
        model: a sharded model.
        micro_batches: micro-batches per step.
        recompute: True if blocks are checkpointed.

    Raises:
        ModelError: `model` is not sharded.

    Example::

        with zm.traffic_report(model, micro_batches=4) as traffic:
            train_one_step()
        print(traffic.lines(steps=1))
    """

    def __init__(self, model: nn.Module, *, micro_batches: int, recompute: bool = False) -> None:
        self._engine = engine_of(model)
        self._micro_batches, self._recompute = micro_batches, recompute
        self.calls: list[Sent] = []

    def __enter__(self) -> traffic_report:
        self._engine.at_rest(follow=True)  # a refresh of the step before must not count in this one
        self._before = {each: each.recorded(self.calls.append) for each in self._engine.backend.links}
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._engine.at_rest(follow=kind is None)  # this step's refreshes count, also those that no forward has started
        for each, record in self._before.items():
            each.recorded(record)

    def __repr__(self) -> str:
        return repr(self.lines())

    def _repr_html_(self) -> str:
        return self.lines()._repr_html_()

    def lines(self, steps: int = 1) -> Lines[TrafficLine]:
        """Returns bytes per step and axis, innermost first.

        Args:
            steps: steps taken while the context was open. Sent bytes are divided by this.
        """
        # Whether frozen units have a backward depends on their inputs. The forward has shown it by now.
        returned, units = self._engine.interpreter.returned, self._engine.units
        held = [[[len(s) for s in b.states.values()] for b in unit.buffers] for unit in units]
        stepped = any(counts for unit in held for counts in unit)
        predicted = sent_bytes_per_axis(
            self._engine.schedule,
            micro_batches=self._micro_batches,
            recompute=self._recompute,
            returned=lambda unit: unit in returned or not returned,
            moments=lambda unit, buffer: held[unit][buffer] if stepped else (2,),
        )
        schedule, sent = self._engine.schedule, Counter[str]()
        for call in self.calls:
            sent[call.axis] += call.sent_bytes
        directions = ("down", "up") if schedule.memory.host else ()
        own = replace(HOST_AXIS, stage=schedule.strategy.host)
        host = [(f"{HOST} {direction}", own, direction) for direction in directions]
        return Lines(
            TrafficLine(
                axis=axis.name,
                size=axis.size,
                stage="divided" if axis in schedule.beyond else f"{axis.stage.value}{axis.wire}",
                predicted_bytes=predicted[line],
                sent_bytes=sent[line] // steps,
                collectives=sum(call.axis == line for call in self.calls) // steps,
                direction=direction,
            )
            for line, axis, direction in (*host, *((axis.name, axis, "") for axis in schedule.axes))
        )
