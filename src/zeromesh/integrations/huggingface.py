"""Saves a sharded model to Hugging Face's safetensors files, and loads it from them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import nn

from zeromesh.checkpoint.full_state import buffers_of, persistent_buffers, require_own
from zeromesh.checkpoint.loader import load_one
from zeromesh.checkpoint.peers import make_peers
from zeromesh.checkpoint.safetensors import Spec, read_headers, write_safetensors
from zeromesh.checkpoint.sources import FileSource, SourcesReader
from zeromesh.checkpoint.tensors import MODEL, Held, param_rows, restore_models
from zeromesh.engine.api import engine_of
from zeromesh.engine.units import DTYPES
from zeromesh.integrations.saved import is_pretrained
from zeromesh.modules import DTYPE_NAMES
from zeromesh.pieces.piece import Piece, whole
from zeromesh.progress import progress


@progress("writing safetensors")
def save_safetensors(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    save_original_format: bool = True,
) -> None:
    """Writes a sharded model for Hugging Face's `from_pretrained`. All ranks call it, and each writes its shard.

    A tied parameter is written once, under its first name. A model with a `config` gets its `config.json`. A model of
    transformers is written as that library writes it: under that library's names for files, with packed experts split.

    Args:
        model: a sharded model.
        directory: directory that all ranks see; created if it does not exist.
        dtype: dtype of floating-point parameters in the files. Default: the compute dtype.
        max_file_bytes: a larger model is split into several files.
        save_original_format: False writes a model of transformers under its own names.

    Raises:
        CheckpointError: on all ranks, if one of them could not write.
    """
    engine, location = engine_of(model), Path(directory)
    require_own(engine)
    peers = make_peers(engine.control)
    engine.at_rest()
    specs, pieces = list[Spec](), list[Piece]()
    for buffer in buffers_of(engine):
        kind = written_dtype(dtype, DTYPES[buffer.spec.param_dtype])
        specs += [Spec(name=p.full_name, shape=p.region.shape, dtype=kind) for p in buffer.optimizer_params]
        pieces += param_rows(buffer)
    for name, value in persistent_buffers(model):
        specs.append(Spec(name=name, shape=tuple(value.shape), dtype=written_dtype(dtype, value.dtype)))
        unsharded = whole(name, value)  # raises on all ranks
        pieces += [unsharded] if peers.rank == 0 else []
    if peers.rank == 0:
        with suppress(OSError):  # the first file fails in the same way, with a message
            location.mkdir(parents=True, exist_ok=True)
            if save_config := getattr(getattr(model, "config", None), "save_pretrained", None):
                save_config(location)
    written: Iterable[Piece] = pieces
    if save_original_format and is_pretrained(model):
        from zeromesh.integrations.published import published

        specs, written = published(model, specs, pieces)
    write_safetensors(location, specs, written, peers, max_file_bytes=max_file_bytes)


def written_dtype(asked: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """The dtype in which values are written. Integer and fp8 tensors keep their own."""
    return asked if asked is not None and own in DTYPE_NAMES else own


@progress("reading safetensors")
def load_safetensors(model: nn.Module, location: str | os.PathLike[str]) -> None:
    """Fills a sharded model from a safetensors file or a Hugging Face model's directory. Each rank reads its shard.

    A model of transformers may have files with the names and shapes of its state dict or of its published files.

    Raises:
        CheckpointError: on all ranks, if names are missing or unknown, or a shape or a kind of number differs (nothing
            is changed then); or if a file is missing or damaged.
    """
    engine, path = engine_of(model), Path(location)
    held = Held(models=(model,), engines=(engine,), control=engine.control)

    def opened() -> SourcesReader:
        stored = read_headers(path)
        sources: Mapping[str, FileSource] = stored
        if is_pretrained(model):
            from zeromesh.integrations.loading import sources_of
            from zeromesh.integrations.published import stands_of

            found, others = sources_of(model, stored, stands_of(model))
            sources = found | others
        return SourcesReader(path, MODEL, sources)

    load_one(os.fspath(location), opened, make_peers(engine.control), partial(restore_models, held))
    engine.changed()
