"""A sharded model and its optimizers filled from the tensors of a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.checkpoint.collect import MODEL, STATE, buffers_of
from zeromesh.checkpoint.frozen import left_out
from zeromesh.checkpoint.full_state import persistent_buffers
from zeromesh.checkpoint.manifest import TensorEntry
from zeromesh.checkpoint.read import Reader, require_match
from zeromesh.engine.engine import Engine
from zeromesh.engine.optim import NUMBERS, WHOLE
from zeromesh.engine.param import ShardedParameter
from zeromesh.errors import CheckpointError
from zeromesh.pieces.piece import DTYPES, Piece, whole


def restore_model(model: nn.Module, engine: Engine, reader: Reader) -> None:
    """Fills parameters and buffers in place.

    The caller tells the engine that it has changed, on all ranks when all have come through: what follows are
    collectives, and one rank alone may find a file damaged.

    Raises:
        CheckpointError: of another model; nothing is changed then.
    """
    entries = reader.manifest.tensors
    elsewhere = left_out(reader.manifest.state, reader.where)
    pieces, targets = [], []
    for buffer in buffers_of(engine):
        for place, param in zip(buffer.places, buffer.optimizer_params, strict=True):
            if place.info.name in elsewhere:
                continue
            name = next((name for name in place.info.names if MODEL + name in entries), place.info.name)
            pieces.append(param.piece(MODEL + name, param.local))
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
                if found and param in WHOLE.get(optimizer, (param,)):
                    whole_states = optimizer in WHOLE
                    present = optimizer.state.get(param, {})
                    targets = _state_targets(param, group, found, reader, present, whole_states=whole_states)
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
    *,
    whole_states: bool,
) -> list[tuple[Piece, Tensor]]:
    """What each state of a parameter is read into, and the tensor that it is then: of `whole_states` all, of others
    the elements of this rank's slice."""
    targets = []
    local, shape = param.local, tuple(param.global_shape)
    number_device = local.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
    for name, entry in found.items():
        key, dtype = name.rpartition(".")[2], DTYPES[reader.entry(name).dtype]
        number = entry.shape == () and (shape != () or key in NUMBERS)  # of a 0-d parameter it may be its slice
        if not number and entry.shape != shape and not whole_states:
            raise CheckpointError(f"{reader.where}: {name} must have shape {shape} or (); it has {entry.shape}")
        model = reader.manifest.tensors.get(MODEL + name.removeprefix(STATE).rpartition(".")[0])
        if not number and model is not None and entry.dtype == model.dtype:
            dtype = local.dtype  # as the optimizer makes it: like the parameter, which may have another one than saved
        sizes = entry.shape if number or whole_states else (local.numel(),)
        tensor = _in_place(present.get(key), sizes, dtype, number_device if number else local.device)
        piece = Piece(name=name, shape=entry.shape, start=0, local=tensor.view(-1))
        targets.append((piece if number or whole_states else param.piece(name, tensor), tensor))
    return targets


def _in_place(held: Any, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if (
        type(held) is Tensor
        and (held.shape, held.dtype, held.device) == (sizes, dtype, device)
        and held.is_contiguous()
    ):
        return held
    return torch.empty(sizes, dtype=dtype, device=device)
