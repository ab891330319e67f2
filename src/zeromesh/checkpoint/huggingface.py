"""A sharded model to and from Hugging Face's safetensors files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh.checkpoint.collect import buffers_of, param_piece, replica_of
from zeromesh.checkpoint.full_state import persistent_buffers
from zeromesh.checkpoint.peers import make_peers
from zeromesh.checkpoint.read import same_kind
from zeromesh.checkpoint.safetensors import Spec, read_headers, write_safetensors
from zeromesh.engine.api import engine_of
from zeromesh.engine.units import DTYPES
from zeromesh.errors import CheckpointError, ModelError, nearest
from zeromesh.modules import DTYPE_NAMES
from zeromesh.pieces.piece import Piece, share, whole


def save_safetensors(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Writes a sharded model as Hugging Face's `from_pretrained` loads it. All ranks call it, each writes its shard.

    A tied parameter is written once, under its first name. A model with a `config` gets its `config.json`.

    Args:
        model: sharded.
        directory: of the model; made if need be. All ranks must see it.
        dtype: of floating-point parameters in the files. Default: the compute dtype.
        max_file_bytes: a larger model is cut into several files.

    Raises:
        CheckpointError: on all ranks, where one of them could not write.
    """
    engine, location = engine_of(model), Path(directory)
    engine.require_own()
    peers = make_peers(engine.control)
    engine.at_rest()
    specs, pieces = [], []
    for buffer in buffers_of(engine):
        kind = written_dtype(dtype, DTYPES[buffer.spec.param_dtype])
        specs += [Spec(name=p.full_name, shape=p.region.shape, dtype=kind) for p in buffer.optimizer_params]
        held = [param_piece(param, prefix="") for param in buffer.optimizer_params if param.writes]
        pieces += [row for piece in share(held, *replica_of(buffer)) for row in piece.rows()]
    for name, value in persistent_buffers(model):
        specs.append(Spec(name=name, shape=tuple(value.shape), dtype=written_dtype(dtype, value.dtype)))
        unsharded = whole(name, value)  # which raises on all ranks
        pieces += [unsharded] if peers.rank == 0 else []
    _prepare(model, location, peers.rank)
    write_safetensors(location, specs, pieces, peers, max_file_bytes=max_file_bytes)


def written_dtype(asked: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """What values of a dtype are written in; codes, of fp8 too, are no numbers yet."""
    return asked if asked is not None and own in DTYPE_NAMES else own


def _prepare(model: nn.Module, location: Path, rank: int) -> None:
    """The directory, and the configuration; what fails here fails again, with a message, at the first file."""
    if rank == 0:
        try:
            location.mkdir(parents=True, exist_ok=True)
            config: Any = getattr(model, "config", None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(location)
        except OSError:
            pass


def load_safetensors(model: nn.Module, location: str | os.PathLike[str]) -> None:
    """Fills a sharded model from a safetensors file or a Hugging Face model's directory; each rank reads its shard.

    Raises:
        ModelError: on all ranks, if names are missing or unknown, or a shape or a kind of number differs;
            nothing is changed then.
        CheckpointError: on all ranks, if a file is missing or damaged.
    """
    engine = engine_of(model)
    peers = make_peers(engine.control)
    problem: tuple[str, bool] = ("", False)
    try:
        _load(model, Path(location))
    except (CheckpointError, ModelError) as error:
        problem = str(error), isinstance(error, ModelError)
    for message, of_model in peers.all_gather(problem, f"whether all have loaded {location}"):
        if message:
            raise (ModelError if of_model else CheckpointError)(message)
    engine.changed()


def _load(model: nn.Module, location: Path) -> None:
    engine = engine_of(model)
    stored = read_headers(location)
    pieces, copies = list[Piece](), []
    known: set[str] = set()
    for buffer in buffers_of(engine):
        for place, param in zip(buffer.places, buffer.optimizer_params, strict=True):
            name = next((name for name in place.info.names if name in stored), place.info.name)
            known.update(place.info.names)
            pieces += param.piece(name, param.local).rows()
    for name, value in persistent_buffers(model):
        known.add(name)
        pieces.append(whole(name, torch.empty_like(value)))
        copies.append((value, pieces[-1]))
    for name in stored:
        if name not in known:
            raise ModelError(f"{location} has {name!r}, which the model does not: {nearest(name, known)}")
    for piece in pieces:
        if piece.name not in stored:
            raise ModelError(f"{location} has no {piece.name!r}, which the model has: {nearest(piece.name, stored)}")
        if stored[piece.name].shape != piece.shape:
            raise ModelError(
                f"{piece.name} must have shape {piece.shape}; in {location} it has {stored[piece.name].shape}"
            )
        if not same_kind(piece.local.dtype, stored[piece.name].dtype):
            raise ModelError(
                f"{piece.name} must be of the same kind as the model's {piece.local.dtype}; in {location} it is "
                f"{stored[piece.name].dtype}, which is not converted: the file is of a quantised or of another model"
            )
    engine.at_rest()
    for piece in pieces:
        if piece.local.numel():
            stored[piece.name].fill(piece.local, piece.start)
    for value, piece in copies:
        value.copy_(piece.local.view(value.shape))
