"""Values of state dicts as JSON and back, exactly: also tuples, 0-d tensors, and dicts whose keys are not text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zeromesh.checkpoint.manifest import DamagedError
from zeromesh.errors import CheckpointError
from zeromesh.pieces.piece import DTYPE_NAMES, DTYPES


def to_plain(value: Any, path: str) -> Any:
    """What JSON can hold.

    Args:
        value: None, bool, int, float, str, 0-d tensors, and lists, tuples and dicts of those.
        path: its name, for messages.

    Raises:
        CheckpointError: anything else, which only a pickle could hold.

    >>> to_plain({"betas": (0.9, 0.95), 30: 1}, "x")
    {'__items__': [['betas', {'__tuple__': [0.9, 0.95]}], [30, 1]]}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is Tensor and value.dim() == 0 and value.dtype in DTYPE_NAMES:  # a learning rate, say
        return {"__tensor__": [DTYPE_NAMES[value.dtype], value.item()]}
    if isinstance(value, tuple):
        return {"__tuple__": [to_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [to_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: to_plain(item, f"{path}.{key}") for key, item in value.items()}
        return {"__items__": [[to_plain(k, path), to_plain(item, f"{path}.{k}")] for k, item in value.items()]}
    raise CheckpointError(
        f"{path} must be made of numbers, text, 0-d tensors, lists, tuples and dicts, since nothing in a checkpoint is "
        f"pickled; got {type(value).__module__}.{type(value).__qualname__}"
    )


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`.

    Raises:
        DamagedError: `to_plain` has not made this.

    >>> from_plain(to_plain({"betas": (0.9, 0.95), 30: 1}, "x"))
    {'betas': (0.9, 0.95), 30: 1}
    """
    try:
        return _from_plain(value)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # a RecursionError too
        raise DamagedError(f"a state is not what a checkpoint holds: {error}") from error


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {"__tuple__"}:
            return tuple(_from_plain(item) for item in value["__tuple__"])
        if set(value) == {"__tensor__"}:
            dtype, number = value["__tensor__"]
            return torch.tensor(number, dtype=DTYPES[dtype])
        if set(value) == {"__items__"}:
            return {_from_plain(key): _from_plain(item) for key, item in value["__items__"]}
        return {key: _from_plain(item) for key, item in value.items()}
    return value
