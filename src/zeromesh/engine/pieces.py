"""A sharded model and its optimizers as named pieces of tensors, and what they are made of again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.checkpoint.container import DTYPES
from zeromesh.checkpoint.manifest import DamagedError, TensorEntry
from zeromesh.checkpoint.piece import Piece, share, whole
from zeromesh.checkpoint.plain import from_plain, to_plain
from zeromesh.checkpoint.read import Reader, require_match
from zeromesh.engine.engine import Engine
from zeromesh.engine.flat import FlatShards
from zeromesh.engine.optim import take_slices
from zeromesh.engine.param import ShardedGrad, ShardedParameter
from zeromesh.engine.state import persistent_buffers
from zeromesh.errors import CheckpointError
from zeromesh.strategy import Axis

MODEL = "model."
STATE = "optim.state."

# Of a 0-d parameter a state may be its slice or a number of its own; these are numbers in torch's optimizers.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


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
    """Which of the ranks that hold the same slices this one is: (index, number of them)."""
    held = buffer.layout.param_axes if buffer.master is None else buffer.layout.significant
    axes: list[Axis] = [axis for axis in buffer.layout.axes if axis.name not in {a.name for a in held}]
    index = 0
    for axis in axes:
        index = index * axis.size + buffer.coordinates[axis.name]
    return index, prod(axis.size for axis in axes)


def buffers_of(engine: Engine) -> Iterator[FlatShards]:
    """Flat buffers in the order of units."""
    for unit in engine.units:
        yield from unit.buffers


def param_piece(param: ShardedParameter, prefix: str = MODEL) -> Piece:
    """A parameter's slice; shares its memory."""
    shape = tuple(param.global_shape)
    return Piece(name=prefix + param.full_name, shape=shape, start=param.flat_start, local=param.local)


def aliases_of(engine: Engine) -> dict[str, str]:
    """Further names of tied parameters, with the one that they are saved under."""
    places = [place.info for buffer in buffers_of(engine) for place in buffer.places]
    return {MODEL + alias: MODEL + info.name for info in places for alias in info.names[1:]}


def collect(model: nn.Module, engine: Engine, optimizers: Sequence[Optimizer]) -> Collected:
    """This rank's share of parameters, buffers and optimizer states."""
    engine.require_own()
    collected = Collected()
    states = _states(optimizers)
    first = engine.control.rank == 0
    for buffer in buffers_of(engine):
        pieces = [param_piece(param) for param in buffer.optimizer_params]
        numbers: list[Piece] = []
        for param, own in zip(buffer.optimizer_params, tuple(pieces), strict=True):
            for key, value in sorted(states.pop(param, {}).items()):
                target = pieces if value.dim() else numbers
                target.append(_state_piece(param.full_name, own, key, value))
        collected.add(pieces, replica_of(buffer))
        if first:
            collected.add(numbers, (0, 1))
    if states:
        kinds = sorted({type(param).__name__ for param in states})
        raise CheckpointError(
            f"an optimizer has states of others than the sharded model's parameters ({', '.join(kinds)}): make it "
            f"from model.parameters() after zm.shard"
        )
    held = [whole(MODEL + name, tensor) for name, tensor in persistent_buffers(model)]
    # Those without elements from all ranks: the manifest takes them from the rank that writes it.
    collected.add(held if first else [piece for piece in held if not prod(piece.shape)], (0, 1))
    return collected


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
    return state.local if isinstance(state, ShardedGrad) else state


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
    return Piece(name=name, shape=own.shape, start=own.start, local=local)


# ---- loading


def restore_model(model: nn.Module, engine: Engine, reader: Reader) -> None:
    """Fills parameters and buffers in place.

    The caller tells the engine that it has changed, on all ranks when all have come through: what follows are
    collectives, and one rank alone may find a file damaged.

    Raises:
        CheckpointError: of another model; nothing is changed then.
    """
    entries = reader.manifest.tensors
    pieces, targets = [], []
    for buffer in buffers_of(engine):
        for place, param in zip(buffer.places, buffer.optimizer_params, strict=True):
            name = next((name for name in place.info.names if MODEL + name in entries), place.info.name)
            piece = param_piece(param)
            pieces.append(Piece(name=MODEL + name, shape=piece.shape, start=piece.start, local=piece.local))
    for name, held in persistent_buffers(model):
        piece = whole(MODEL + name, torch.empty_like(held))
        pieces.append(piece)
        targets.append((held, piece))
    known = {MODEL + name for b in buffers_of(engine) for place in b.places for name in place.info.names}
    chosen = {piece.name for piece in pieces}
    compared = {name: entry for name, entry in entries.items() if name not in known or name in chosen}
    require_match(reader.where, compared, pieces, MODEL)
    engine.interpreter.quiesce()
    reader.fill(pieces)
    for held, piece in targets:
        held.copy_(piece.local.view(held.shape))


def restore_optimizers(engine: Engine, optimizers: Sequence[Optimizer], reader: Reader) -> None:
    """Replaces the optimizers' states by those of the checkpoint, in the layout of this run.

    States that are there already are filled in place: no rank holds two copies.

    Raises:
        CheckpointError: states of parameters that no optimizer has, or of other shapes; nothing is changed then.
    """
    saved = _saved_states(reader.manifest.tensors)
    fresh: dict[Optimizer, dict[Tensor, dict[str, Tensor]]] = {}
    pieces: list[Piece] = []
    names = _names(engine)
    for optimizer in optimizers:
        states = fresh[optimizer] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                found = next((saved.pop(name) for name in names.get(param, ()) if name in saved), None)
                if found:
                    targets = _state_targets(param, group, found, reader, optimizer.state.get(param, {}))
                    states[param] = {piece.name.rpartition(".")[2]: tensor for piece, tensor in targets}
                    pieces += [piece for piece, _ in targets]
    if saved:
        raise CheckpointError(
            f"{reader.where} has optimizer states of {len(saved)} parameters that the optimizer does not have, such as "
            f"{next(iter(saved))}: give all optimizers that were saved, over the same parameters"
        )
    reader.fill(pieces)
    for optimizer, states in fresh.items():
        optimizer.state.clear()
        optimizer.state.update(states)


def _names(engine: Engine) -> dict[Tensor, tuple[str, ...]]:
    pairs = [(p, place) for b in buffers_of(engine) for p, place in zip(b.optimizer_params, b.places, strict=True)]
    return {param: place.info.names for param, place in pairs}


def _saved_states(entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    saved: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for name, entry in entries.items():
        if name.startswith(STATE):
            param, _, _ = name.removeprefix(STATE).rpartition(".")
            saved[param][name] = entry
    return saved


def _state_targets(
    param: ShardedParameter,
    group: Mapping[str, Any],
    found: Mapping[str, TensorEntry],
    reader: Reader,
    present: Mapping[str, Any],
) -> list[tuple[Piece, Tensor]]:
    """What each state of a parameter is read into, and the tensor that it is then."""
    targets = []
    local, shape = param.local, tuple(param.global_shape)
    number_device = local.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
    for name, entry in found.items():
        key, dtype = name.rpartition(".")[2], DTYPES[reader.entry(name).dtype]
        number = entry.shape == () and (shape != () or key in _NUMBERS)
        if not number and entry.shape != shape:
            raise CheckpointError(f"{reader.where}: {name} must have shape {shape} or (); it has {entry.shape}")
        sizes = () if number else (local.numel(),)
        tensor = _in_place(present.get(key), sizes, dtype, number_device if number else local.device)
        start = 0 if number else param.flat_start
        targets.append((Piece(name=name, shape=entry.shape, start=start, local=tensor.view(-1)), tensor))
    return targets


def _in_place(held: Any, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if (
        type(held) is Tensor
        and (held.shape, held.dtype, held.device) == (sizes, dtype, device)
        and held.is_contiguous()
    ):
        return held
    return torch.empty(sizes, dtype=dtype, device=device)


# ---- what an optimizer has beside tensors


def describe_groups(optimizers: Sequence[Optimizer]) -> list[Any]:
    """The options of every parameter group, with the names of its parameters."""
    return [[_describe(group) for group in optimizer.param_groups] for optimizer in optimizers]


def _describe(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
    names = [getattr(param, "full_name", "") for param in group["params"]]
    return {"options": to_plain(options, "the optimizer's options"), "params": names}


def read_groups(reader: Reader) -> dict[str, dict[str, Any]]:
    """By parameter: the options of its group.

    Raises:
        DamagedError: they are not what `describe_groups` returned.
    """
    described = reader.manifest.state.get("groups", [])
    try:
        groups = [(group["params"], from_plain(group["options"])) for groups in described for group in groups]
        return {name: dict(options) for names, options in groups for name in names}
    except (TypeError, KeyError, ValueError, CheckpointError) as error:
        raise DamagedError(f"{reader.where}: the optimizer's options cannot be read: {error!r}") from error


def restore_groups(optimizers: Sequence[Optimizer], options: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Sets each group's options to those that its first parameter had.

    Raises:
        CheckpointError: an option has a value of another type; nothing is changed then.
    """
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            name = getattr(group["params"][0], "full_name", "") if group["params"] else ""
            changes += [(group, key, value) for key, value in options.get(name, {}).items() if key != "params"]
    for group, key, value in changes:
        if not _fits(group.get(key), value):  # what is not there yet may be anything
            raise CheckpointError(f"{where}: the optimizer's {key} cannot be {value!r}; here it is {group.get(key)!r}")
    for group, key, value in changes:
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _fits(now: Any, value: Any) -> bool:
    """Whether an option may become `value`: a number a number, as many numbers as many; the rest are flags."""
    if now is None or isinstance(now, Tensor):
        return now is None or _is_number(value)
    if isinstance(now, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(now) and all(map(_fits, now, value))
    return _is_number(now) == _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def groups_for_torch(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The same under the names that torch's `get_optimizer_state_dict` gives them, of one optimizer."""
    if len(optimizers) != 1:
        return {}
    objects = {}
    for index, group in enumerate(optimizers[0].param_groups):
        for key, value in group.items():
            named = [getattr(param, "full_name", "") for param in value] if key == "params" else value
            objects[f"optim.param_groups.{index}.{key}"] = named
    return objects
