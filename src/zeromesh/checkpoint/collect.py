"""What this rank writes of a sharded model and its optimizers, as named pieces of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.checkpoint.full_state import persistent_buffers
from zeromesh.engine.engine import Engine
from zeromesh.engine.flat import FlatShards
from zeromesh.engine.optim import WHOLE, take_slices
from zeromesh.engine.param import ShardedParameter, Slice
from zeromesh.errors import CheckpointError
from zeromesh.pieces.piece import Piece, share, whole
from zeromesh.pieces.region import Region
from zeromesh.strategy import Axis

MODEL = "model."
STATE = "optim.state."


@dataclass(slots=True, kw_only=True)
class Collected:
    """What a rank writes.

    Args:
        pieces: its share.
        empty: tensors without elements.
    """

    pieces: list[Piece] = field(default_factory=list)
    empty: list[Piece] = field(default_factory=list)

    def add(self, pieces: Sequence[Piece], replica: tuple[int, int]) -> None:
        """Adds this rank's share of pieces that `replica[1]` ranks hold, this one as number `replica[0]`."""
        self.empty += [piece for piece in pieces if not prod(piece.shape)]
        self.pieces += share([piece for piece in pieces if prod(piece.shape)], *replica)


def replica_of(buffer: FlatShards) -> tuple[int, int]:
    """Which of the mesh's ranks that hold the same slices this one is: (index, number of them)."""
    _, held = buffer.home
    axes: list[Axis] = [axis for axis in buffer.placed.layout.axes if axis.name not in {a.name for a in held}]
    index = 0
    for axis in axes:
        index = index * axis.size + buffer.coordinates[axis.name]
    return index, prod(axis.size for axis in axes)


def buffers_of(engine: Engine) -> Iterator[FlatShards]:
    """Flat buffers in the order of units."""
    for unit in engine.units:
        yield from unit.buffers


def _saved(engine: Engine, frozen: bool) -> Iterator[FlatShards]:
    return (buffer for buffer in buffers_of(engine) if frozen or buffer.spec.trainable)


def param_piece(param: ShardedParameter, prefix: str = MODEL) -> Piece:
    """A parameter's slice; shares its memory."""
    return param.piece(prefix + param.full_name, param.local)


def aliases_of(engine: Engine, *, frozen: bool) -> dict[str, str]:
    """Further names of tied parameters, with the one that they are saved under."""
    places = [place.info for buffer in _saved(engine, frozen) for place in buffer.places]
    return {MODEL + alias: MODEL + info.name for info in places for alias in info.names[1:]}


def collect(
    models: Sequence[nn.Module], engines: Sequence[Engine], optimizers: Sequence[Optimizer], *, frozen: bool
) -> Collected:
    """This rank's share of parameters, `frozen` ones only if asked for, of buffers and of optimizer states."""
    collected, states = Collected(), _states(optimizers)
    for model, engine in zip(models, engines, strict=True):
        engine.require_own()
        _collect(collected, model, engine, optimizers, states, frozen=frozen)
    if states:
        kinds = sorted({type(param).__name__ for param in states})
        raise CheckpointError(
            f"an optimizer has states of others than the sharded model's parameters ({', '.join(kinds)}): make it "
            f"from model.parameters() after zm.shard"
        )
    return collected


def _collect(
    collected: Collected,
    model: nn.Module,
    engine: Engine,
    optimizers: Sequence[Optimizer],
    states: dict[Tensor, dict[str, Tensor]],
    *,
    frozen: bool,
) -> None:
    """Adds what is of this model, and takes its parameters' states out of `states`."""
    owned = {param: region for optimizer in optimizers for param, region in WHOLE.get(optimizer, {}).items()}
    first = engine.control.first
    for buffer in _saved(engine, frozen):
        params = [param for param in buffer.optimizer_params if param.writes]
        pieces = [param_piece(param) for param in params]
        numbers: list[Piece] = []
        for param in (param for param in buffer.optimizer_params if not param.writes):
            states.pop(param, None)
        for param, own in zip(params, tuple(pieces), strict=True):
            for key, value in sorted(states.pop(param, {}).items()):
                if param in owned:  # all of it, and on no other rank of this copy of the states
                    pieces += _owned_state(f"{STATE}{param.full_name}.{key}", owned[param], value)
                    continue
                target = pieces if value.dim() else numbers
                target.append(_state_piece(param.full_name, own, key, value))
        collected.add(pieces, replica_of(buffer))
        if first:
            collected.add(numbers, (0, 1))
    unsharded = [whole(MODEL + name, tensor) for name, tensor in persistent_buffers(model)]  # which raises on all ranks
    if first:
        collected.add(unsharded, (0, 1))


def _states(optimizers: Sequence[Optimizer]) -> dict[Tensor, dict[str, Tensor]]:
    states: dict[Tensor, dict[str, Tensor]] = {}
    for optimizer in optimizers:
        take_slices(optimizer)
        for param, values in optimizer.state.items():
            tensors = {key: _local(value) for key, value in values.items() if isinstance(value, Tensor)}
            numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            others = [key for key, value in values.items() if value is not None and key not in {*tensors, *numbers}]
            if others:
                raise CheckpointError(
                    f"states of {type(optimizer).__name__} must be tensors or numbers to be saved; {others[0]!r} is "
                    f"{type(values[others[0]]).__name__}"
                )
            states[param] = tensors | {key: torch.tensor(value, device="cpu") for key, value in numbers.items()}
    return states


def _local(state: Tensor) -> Tensor:
    """Of what an optimizer has computed of slices, this rank's elements."""
    return state.local if isinstance(state, Slice) else state


def _owned_state(name: str, region: Region, value: Tensor) -> list[Piece]:
    """A state of what its owner has of a tensor: of all of it, or of a batch of what the class takes for tensors; what
    is no tensor then is the same for all of them, and written with the first."""
    if not region.batch:
        return [whole(name, value)]
    if not value.dim():
        return [] if any(region.offsets) else [whole(name, value)]
    if tuple(value.shape[: region.batch]) != region.sizes[: region.batch]:
        raise CheckpointError(f"{name} of {tuple(value.shape)} must have something for each of {region}")
    return [whole(name, value, region.of(region.whole_shape(value.shape)))]


def _state_piece(param: str, own: Piece, key: str, value: Tensor) -> Piece:
    """A state of the parameter of this name, whose slice is `own`."""
    name = f"{STATE}{param}.{key}"
    if value.dim() == 0:
        return whole(name, value)
    local = value if type(value) is Tensor and not value.requires_grad else value.as_subclass(Tensor).detach()
    if local.shape != own.local.shape:
        raise CheckpointError(
            f"state {key!r} of {param} must be 0-d or have an element for each of the slice's {own.local.numel()}; it "
            f"has shape {tuple(value.shape)}"
        )
    return replace(own, name=name, local=local)
