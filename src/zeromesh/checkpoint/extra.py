"""Modules' extra state (`get_extra_state`), by the name that torch's `state_dict` gives it; the first rank's counts."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import CheckpointError
from zeromesh.modules import clean_name
from zeromesh.pieces.piece import Piece, whole

PREFIX = "extra."


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Of the modules that have one."""
    return {name: module.get_extra_state() for name, module in _stateful(model)}


def extra_names(model: nn.Module) -> list[str]:
    """Of the states."""
    return [name for name, _ in _stateful(model)]


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Gives the modules those that `states` has."""
    for name, module in _stateful(model):
        if name in states:
            module.set_extra_state(states[name])


def extra_pieces(model: nn.Module) -> list[Piece]:
    """As bytes, to be saved.

    Raises:
        CheckpointError: one of them cannot be read again without running what it says.
    """
    return [whole(f"{PREFIX}{name}", _to_bytes(name, state)) for name, state in extra_states(model).items()]


def empty_pieces(shapes: Mapping[str, tuple[int, ...]]) -> list[Piece]:
    """To read those of a checkpoint into, whose tensors have these shapes."""
    names = [name for name in shapes if name.startswith(PREFIX)]
    return [whole(name, torch.empty(shapes[name], dtype=torch.uint8, device="cpu")) for name in names]


def restore_extra(model: nn.Module, pieces: list[Piece]) -> None:
    """Gives the modules what was saved.

    Raises:
        CheckpointError: it is none that `extra_pieces` has made.
    """
    set_extra_states(model, {piece.name.removeprefix(PREFIX): _from_bytes(piece) for piece in pieces})


def _stateful(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield clean_name(f"{prefix}._extra_state" if prefix else "_extra_state"), module


def _to_bytes(name: str, state: Any) -> Tensor:
    file = io.BytesIO()
    is_file = isinstance(state, io.BytesIO)
    torch.save((is_file, state.getvalue() if is_file else state), file)
    try:
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} must be made of tensors, numbers, text, bytes, lists and dicts to be saved, since a checkpoint is "
            f"read without running code; got {type(state).__name__}: {str(error).splitlines()[0]}"
        ) from error
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _from_bytes(piece: Piece) -> Any:
    try:
        found = torch.load(io.BytesIO(piece.local.numpy().tobytes()), weights_only=True, map_location="cpu")
        is_file, state = found
        return io.BytesIO(state) if is_file else state
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError) as error:
        raise CheckpointError(f"{piece.name} cannot be read: {error}") from error
