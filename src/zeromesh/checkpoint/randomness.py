"""The states of a rank's random number generators as tensors, one set a rank."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeromesh.errors import CheckpointError
from zeromesh.pieces.piece import Piece, whole

PREFIX = "rng."
_MAX_NUMEL = 1 << 16
"""Of one generator's state: several times that of the largest, numpy's and torch's Mersenne twisters."""


def random_pieces(rank: int) -> list[Piece]:
    """Of torch on the CPU and on this rank's device, of Python and of numpy."""
    states = {"torch": torch.get_rng_state(), "python": _python(), "numpy": _numpy()}
    # Else nothing has been drawn there, and to ask would take memory on the device.
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and torch.get_device_module(device).is_initialized():
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return [whole(f"{PREFIX}{rank}.{key}", value) for key, value in states.items()]


def empty_pieces(rank: int, shapes: dict[str, tuple[int, ...]]) -> list[Piece]:
    """To read this rank's states into.

    Args:
        rank: this one.
        shapes: of the tensors of a checkpoint, by name.

    Raises:
        CheckpointError: one of them is none that a generator has.
    """
    mine = f"{PREFIX}{rank}."
    dtypes = {"python": torch.int64, "numpy": torch.int64}
    names = [name for name in shapes if name.startswith(mine)]
    for name in names:
        if prod(shapes[name]) > _MAX_NUMEL:
            raise CheckpointError(f"{name} cannot be a generator's state: it has shape {shapes[name]}")
    tensors = {
        name: torch.empty(shapes[name], dtype=dtypes.get(name.removeprefix(mine), torch.uint8), device="cpu")
        for name in names
    }
    return [whole(name, tensor) for name, tensor in tensors.items()]


def restore_random(pieces: Iterable[Piece]) -> None:
    """Sets the generators to what `random_pieces` returned on a rank.

    Raises:
        CheckpointError: a state is none that the generator takes.
    """
    try:
        _restore({piece.name.rpartition(".")[2]: piece.local for piece in pieces})
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"a random generator does not take the state that was saved: {error}") from error


def _restore(states: Mapping[str, Tensor]) -> None:
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])
    if "python" in states:
        *words, has_gauss, gauss = states["python"].tolist()
        random.setstate((3, tuple(words), _float(gauss) if has_gauss else None))
    if "numpy" in states:
        *key, position, has, cached = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has, _float(cached)))


def _python() -> Tensor:
    _, words, gauss = random.getstate()
    return _state(np.array(words, dtype=np.int64), gauss is not None, _bits(gauss or 0.0))


def _numpy() -> Tensor:
    _, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    return _state(np.asarray(key, dtype=np.int64), int(position), int(has_gauss), _bits(float(cached)))


def _state(words: Any, *numbers: int) -> Tensor:
    # Not from one list of Python's numbers: training waits for this.
    return torch.cat([torch.from_numpy(words), torch.tensor(numbers, dtype=torch.int64, device="cpu")])


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _float(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
