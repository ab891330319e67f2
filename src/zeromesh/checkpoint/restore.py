"""A sharded model and its optimizers filled from the tensors of a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeromesh.checkpoint.collect import MODEL, STATE, buffers_of
from zeromesh.checkpoint.frozen import left_out
from zeromesh.checkpoint.full_state import persistent_buffers
from zeromesh.checkpoint.held import Held
from zeromesh.checkpoint.manifest import TensorEntry
from zeromesh.checkpoint.read import Reader, require_match
from zeromesh.engine.engine import Engine
from zeromesh.engine.flat import Place
from zeromesh.engine.optim import NUMBERS, WHOLE
from zeromesh.engine.param import ShardedParameter
from zeromesh.errors import CheckpointError
from zeromesh.pieces.piece import DTYPES, Piece, whole
from zeromesh.pieces.region import Region


def restore_models(held: Held, reader: Reader) -> None:
    """Fills parameters and buffers in place.

    The caller tells the engines that they have changed, on all ranks when all have come through: what follows are
    collectives, and one rank alone may find a file damaged.

    Raises:
        CheckpointError: of another model, on all ranks alike; nothing is changed then.
    """
    entries = reader.manifest.tensors
    elsewhere = left_out(reader.manifest.state, reader.where)
    tensors = [tensor for tensor in held.tensors() if tensor.names[0].removeprefix(MODEL) not in elsewhere]
    chosen = {next((name for name in t.names if name in entries), t.names[0]): t.entry for t in tensors}
    known = {name for tensor in held.tensors() for name in tensor.names}
    compared = {name: entry for name, entry in entries.items() if name not in known or name in chosen}
    require_match(reader.where, compared, chosen, MODEL)
    pieces, targets = list[Piece](), list[tuple[Tensor, Piece]]()
    for model, engine in zip(held.models, held.engines, strict=True):
        engine.at_rest()
        for param, place in _places(engine):
            if place.info.name in elsewhere:
                continue
            name = next(MODEL + name for name in place.info.names if MODEL + name in entries)
            pieces.append(param.piece(name, param.local))
        for name, buffer in persistent_buffers(model):
            targets.append((buffer, whole(MODEL + name, torch.empty_like(buffer))))
    reader.fill([*pieces, *(piece for _, piece in targets)])
    for buffer, piece in targets:
        buffer.copy_(piece.local.view(buffer.shape))


def restore_optimizers(held: Held, optimizers: Sequence[Optimizer], reader: Reader) -> None:
    """Replaces the optimizers' states by those of the checkpoint, in the layout of this run.

    States that are there already are filled in place: no rank holds two copies. Saved states of parameters that are
    frozen here are passed over, and a parameter without saved states begins with none.

    Raises:
        CheckpointError: states of trained parameters that no optimizer has, or of other shapes; nothing is changed
            then.
    """
    saved = _saved_states(reader.manifest.tensors)
    fresh: dict[Optimizer, dict[Tensor, dict[str, Tensor]]] = {}
    pieces: list[Piece] = []
    names = {param: place.info.names for engine in held.engines for param, place in _places(engine)}
    for optimizer in optimizers:
        states = fresh[optimizer] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                found = next((saved.pop(name) for name in names.get(param, ()) if name in saved), None)
                if found and param in WHOLE.get(optimizer, (param,)):
                    present, owned = optimizer.state.get(param, {}), WHOLE.get(optimizer, {}).get(param)
                    targets = _state_targets(param, group, found, reader, present, owned)
                    states[param] = {piece.name.rpartition(".")[2]: tensor for piece, tensor in targets}
                    pieces += [piece for piece, _ in targets]
    own = {name for known in names.values() for name in known}
    elsewhere = {name.removeprefix(MODEL) for tensor in held.tensors() for name in tensor.names} - own
    frozen = {name for param, known in names.items() if not param.requires_grad for name in known}
    saved = {name: states for name, states in saved.items() if name not in elsewhere | frozen}
    if saved:
        raise CheckpointError(
            f"{reader.where} has optimizer states of {len(saved)} parameters that the optimizer does not have, such as "
            f"{next(iter(saved))}: give all optimizers that were saved, over the same parameters"
        )
    reader.fill(pieces)
    for optimizer, states in fresh.items():
        optimizer.state.clear()
        optimizer.state.update(states)


def _places(engine: Engine) -> Iterator[tuple[ShardedParameter, Place]]:
    for buffer in buffers_of(engine):
        yield from zip(buffer.optimizer_params, buffer.places, strict=True)


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
    owned: Region | None,
) -> list[tuple[Piece, Tensor]]:
    """What each state of a parameter is read into, and the tensor that it is then: what belongs to an `owned` region,
    which may be all, or the elements of this rank's slice."""
    targets = []
    local, shape = param.local, tuple(param.shape)
    number_device = local.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
    for name, entry in found.items():
        key, dtype = name.rpartition(".")[2], DTYPES[reader.entry(name).dtype]
        number = entry.shape == () and (shape != () or key in NUMBERS)  # of a 0-d parameter it may be its slice
        fits = entry.shape == shape if owned is None else owned.is_part_of(entry.shape)
        if not number and not fits:
            raise CheckpointError(f"{reader.where}: {name} must have shape {shape} or (); it has {entry.shape}")
        model = reader.manifest.tensors.get(MODEL + name.removeprefix(STATE).rpartition(".")[0])
        if not number and model is not None and entry.dtype == model.dtype:
            dtype = local.dtype  # as the optimizer makes it: like the parameter, which may have another one than saved
        region = None if number or owned is None else owned.of(entry.shape)
        sizes = entry.shape if number else (local.numel(),) if region is None else region.sizes
        tensor = _in_place(present.get(key), sizes, dtype, number_device if number else local.device)
        all_of_it = Piece(name=name, shape=entry.shape, start=0, local=tensor.view(-1), within=region)
        targets.append((all_of_it if number or owned is not None else param.piece(name, tensor), tensor))
    return targets


def _in_place(held: Any, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if (
        type(held) is Tensor
        and (held.shape, held.dtype, held.device) == (sizes, dtype, device)
        and held.is_contiguous()
    ):
        return held
    return torch.empty(sizes, dtype=dtype, device=device)
