"""A number for each parameter, alike under every layout: in a checkpoint for frozen ones that are left out of it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeromesh.checkpoint.collect import buffers_of, param_piece, replica_of
from zeromesh.checkpoint.held import Held
from zeromesh.checkpoint.manifest import DamagedError
from zeromesh.engine.engine import Engine
from zeromesh.engine.flat import FlatShards
from zeromesh.errors import CheckpointError
from zeromesh.pieces.piece import Piece, share

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD = -0x61C8864680B583EB
"""An odd number with its bits well mixed: 2**64 over the golden ratio, as a signed integer (Knuth, volume 3, 6.4)."""

_CHUNK = 1 << 20


def checksums(held: Held) -> dict[str, int]:
    """Of every frozen parameter of all stages, by name: the sum, modulo 2**64, of a number for each element's place and
    bits.

    Collective; a sum has no order, so it is the same on any number of ranks.
    """
    sums = {name: total for engine in held.engines for name, total in checksums_of(engine, _frozen(engine)).items()}
    return {name: total for stages in held.along(sums) for name, total in stages.items()}


def _frozen(engine: Engine) -> list[str]:
    buffers = [buffer for buffer in buffers_of(engine) if not buffer.spec.trainable]
    return [place.info.name for buffer in buffers for place in buffer.places]


def checksums_of(engine: Engine, names: Sequence[str]) -> dict[str, int]:
    """Of one model's parameters of these names; collective on its ranks, with the same names."""
    order = {name: index for index, name in enumerate(names)}
    sums = torch.zeros(len(names), dtype=torch.int64, device=engine.control.device)
    for buffer in buffers_of(engine):
        for piece in _pieces(buffer, order):
            for row in piece.rows():
                sums[order[row.name]] += _checksum(row)
    engine.control.reduce_all(sums)
    return dict(zip(names, sums.tolist(), strict=True))


def _pieces(buffer: FlatShards, names: Container[str]) -> Iterator[Piece]:
    """Every element on one rank of all that have it."""
    params = [param for param in buffer.optimizer_params if param.writes and param.full_name in names]
    held = [param_piece(param, prefix="") for param in params]
    yield from share(held, *replica_of(buffer))


def _checksum(row: Piece) -> Tensor:
    bits = row.local.view(_BITS[row.local.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        first = row.start + start
        places = torch.arange(first, first + part.numel(), device=bits.device)
        mixed = (part + 1) * _SPREAD * (2 * places + 1)
        total += (mixed ^ (mixed >> 29)).sum()  # no element's bits alone decide the highest ones
    return total


def left_out(state: Mapping[str, Any], where: str) -> dict[str, int]:
    """The checksums in a manifest's state; none of a checkpoint that has everything.

    Raises:
        DamagedError: they are not what `checksums` returned.
    """
    found = state.get("frozen", {})
    if not isinstance(found, dict) or not all(type(value) is int for value in found.values()):
        raise DamagedError(f"{where}: what it says of frozen parameters cannot be read")
    return found


def require_same(held: Held, saved: Mapping[str, int], where: str) -> None:
    """Raises CheckpointError, on all ranks, unless the model's frozen parameters are those that a checkpoint was saved
    beside. Collective."""
    if not saved:
        return
    own = checksums(held)
    differ = [name for name, value in saved.items() if own.get(name) != value]
    if differ:
        raise CheckpointError(
            f"{where} holds what is trained alone, and was saved beside other values of {len(differ)} of "
            f"{len(saved)} frozen parameters than the model has here, such as {differ[0]}: make the model of the same "
            f"pretrained files, in the same param_dtype"
        )
