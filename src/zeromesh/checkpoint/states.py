"""The contents of a checkpoint other than parameters, buffers and optimizer states.

Stored as JSON: the caller's state, and options of optimizers' groups. Stored as tensors of bytes and integers: modules'
extra states (`get_extra_state`), under the names that torch's `state_dict` gives them, and the states of each rank's
random number generators.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.checkpoint.manifest import DamagedError
from zeromesh.checkpoint.read import Reader
from zeromesh.errors import CheckpointError
from zeromesh.modules import clean_name
from zeromesh.owners.optimizer import OwnerOptimizer
from zeromesh.pieces.piece import DTYPE_NAMES, DTYPES, Piece, whole

EXTRA = "extra."
RANDOM = "rng."
_MAX_RANDOM_NUMEL = 1 << 16
"""Longer states of a generator are not read. This is several times the length of numpy's and torch's Mersenne
twisters."""

# ---- JSON that restores values exactly: also tuples, 0-d tensors, and dicts whose keys are not text


def to_plain(value: Any, path: str) -> Any:
    """Converts a value made of None, bool, int, float, str, 0-d tensors, lists, tuples and dicts to plain JSON values.
    `path` is its name, for messages.

    Raises:
        CheckpointError: the value holds anything else, which only a pickle could store.

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
        DamagedError: `value` was not made by `to_plain`.

    >>> from_plain(to_plain({"betas": (0.9, 0.95), 30: 1}, "x"))
    {'betas': (0.9, 0.95), 30: 1}
    """
    try:
        return _from_plain(value)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # RuntimeError includes RecursionError
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


def read_state(reader: Reader) -> dict[str, Any]:
    """Returns the state that was given to `save`. Raises DamagedError if it cannot be read."""
    try:
        state = from_plain(reader.manifest.state.get("user", {}))
    except CheckpointError as error:
        raise DamagedError(f"{reader.where}: {error}") from error
    if not isinstance(state, dict):
        raise DamagedError(f"{reader.where}: its state must be a dict; got {type(state).__name__}")
    return state


# ---- the options of optimizers' parameter groups

Groups = Mapping[str, tuple[str | None, Mapping[str, Any]]]
"""By parameter: the class of its optimizer (None if the checkpoint does not say), and its options, such as the learning
rate."""


def require_one_holder(optimizers: Sequence[Optimizer]) -> None:
    """Raises CheckpointError if two optimizers hold a parameter: states and options are saved under its name."""
    held = set[Tensor]()
    for optimizer in optimizers:
        own = {param for group in optimizer.param_groups for param in group["params"]}
        if both := sorted(getattr(param, "full_name", "") for param in held & own):
            raise CheckpointError(
                f"two optimizers hold {both[0]}, and a checkpoint has one state for each parameter: let one of them "
                f"hold it, or save the state_dict() of the other with torch.distributed.checkpoint"
            )
        held |= own


Own = Mapping[Tensor, Sequence[str]]
"""The parameters of a checkpoint, with their names. An optimizer may also hold parameters of other models."""


def describe_groups(optimizers: Sequence[Optimizer], own: Own) -> list[Any]:
    """Returns each parameter group's options, with its optimizer's class and its parameters' names in `own`."""
    require_one_holder(optimizers)
    return [[_describe(optimizer, group, own) for group in optimizer.param_groups] for optimizer in optimizers]


def _describe(optimizer: Optimizer, group: Mapping[str, Any], own: Own) -> dict[str, Any]:
    options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
    plain = to_plain(options, "the optimizer's options")
    return {"kind": _kind(optimizer), "options": plain, "params": _names(group, own)}


def _names(group: Mapping[str, Any], own: Own) -> list[str]:
    return [own[param][0] for param in group["params"] if param in own]


def _kind(optimizer: Optimizer) -> str:
    return (optimizer.kind if isinstance(optimizer, OwnerOptimizer) else type(optimizer)).__name__


def read_groups(reader: Reader) -> Groups:
    """Reads the result of `describe_groups`. Raises DamagedError if it is malformed."""
    described = reader.manifest.state.get("groups", [])
    found: dict[str, tuple[str | None, Mapping[str, Any]]] = {}
    try:
        for group in (group for groups in described for group in groups):
            found |= dict.fromkeys(group["params"], (group.get("kind"), dict(from_plain(group["options"]))))
    except (AttributeError, TypeError, KeyError, ValueError, CheckpointError) as error:
        raise DamagedError(f"{reader.where}: the optimizer's options cannot be read: {error!r}") from error
    return found


def require_kinds(optimizers: Sequence[Optimizer], groups: Groups, where: str, own: Own) -> None:
    """Raises CheckpointError if a parameter's optimizer is of another class than the saved one."""
    for optimizer in optimizers:
        for name in (name for group in optimizer.param_groups for name in _names(group, own)):
            saved, _ = groups.get(name, (None, {}))
            if saved not in (None, _kind(optimizer)):
                raise CheckpointError(
                    f"{where} was saved with {saved} for {name}, and here {_kind(optimizer)} steps on it: make "
                    f"optimizers of the classes that were saved, or load the model alone, with optimizers=False"
                )


def restore_groups(optimizers: Sequence[Optimizer], groups: Groups, where: str, own: Own) -> None:
    """Sets each group's options to those saved for the first of its parameters that has any. Raises CheckpointError,
    and changes nothing, if an option has a value of another type."""
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            _, saved = next((groups[name] for name in _names(group, own) if name in groups), (None, {}))
            changes += [(group, key, value) for key, value in saved.items() if key != "params"]
    for group, key, value in changes:
        if not _fits(group.get(key), value):  # a new key may have any value
            raise CheckpointError(f"{where}: the optimizer's {key} cannot be {value!r}; here it is {group.get(key)!r}")
    for group, key, value in changes:
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _fits(now: Any, value: Any) -> bool:
    """Whether an option may become `value`: numbers replace numbers, sequences those as long; the rest are flags."""
    if now is None or isinstance(now, Tensor):
        return now is None or is_plain_number(value)
    if isinstance(now, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(now) and all(map(_fits, now, value))
    return is_plain_number(now) == is_plain_number(value)


def is_plain_number(value: Any) -> bool:
    """Whether `value` is a Python number; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def join_groups(described: Sequence[Sequence[Any]]) -> list[Any]:
    """Joins the results of `describe_groups` of all stages, by optimizer. Groups at the same place with equal options
    become one."""
    joined: list[list[dict[str, Any]]] = []
    for optimizers in described:
        joined += ([] for _ in range(len(joined), len(optimizers)))
        for own, groups in zip(joined, optimizers, strict=False):
            for place, group in enumerate(groups):
                if place < len(own) and all(own[place][key] == group[key] for key in ("kind", "options")):
                    own[place] = {**group, "params": [*own[place]["params"], *group["params"]]}
                else:
                    own.append(group)
    return joined


def groups_for_torch(described: Sequence[Any]) -> dict[str, Any]:
    """The groups under the names of torch's `get_optimizer_state_dict`; empty unless there is exactly one optimizer."""
    if len(described) != 1:
        return {}
    groups = [{**from_plain(group["options"]), "params": group["params"]} for group in described[0]]
    return {f"optim.param_groups.{i}.{key}": value for i, group in enumerate(groups) for key, value in group.items()}


# ---- modules' extra states; those of the first rank are saved


def _stateful(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield clean_name(f"{prefix}._extra_state" if prefix else "_extra_state"), module


def extra_names(model: nn.Module) -> list[str]:
    return [name for name, _ in _stateful(model)]


def extra_states(model: nn.Module) -> dict[str, Any]:
    return {name: module.get_extra_state() for name, module in _stateful(model)}


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Sets the extra states of the modules that `states` names."""
    for name, module in _stateful(model):
        if name in states:
            module.set_extra_state(states[name])


def extra_pieces(model: nn.Module) -> list[Piece]:
    """Returns the extra states as pieces. Raises CheckpointError if loading one would run code from the file."""
    return [whole(f"{EXTRA}{name}", _to_bytes(name, state)) for name, state in extra_states(model).items()]


def restore_extra(model: nn.Module, reader: Reader) -> None:
    """Restores the modules' saved extra states. Raises DamagedError if one was not made by `extra_pieces`."""
    names = [name for name in extra_names(model) if EXTRA + name in reader.manifest.tensors]
    set_extra_states(model, {name: _from_bytes(reader, EXTRA + name) for name in names})


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


def _from_bytes(reader: Reader, name: str) -> Any:
    file = io.BytesIO(reader.whole(name, torch.uint8).numpy().tobytes())
    try:
        is_file, state = torch.load(file, weights_only=True, map_location="cpu")
        return io.BytesIO(state) if is_file else state
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError) as error:
        raise DamagedError(f"{reader.where}: {name} cannot be read: {error}") from error


# ---- random number generators


def random_states() -> dict[str, Tensor]:
    """Returns the states of the generators of torch (on the CPU and on this rank's device), Python and numpy."""
    _, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "python": _twister(words, gauss is not None, gauss or 0.0),
        "numpy": _twister(np.append(key, position), bool(has_gauss), float(cached)),
    }
    # If the device is not initialised, nothing has been drawn there, and asking would take memory on it.
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and torch.get_device_module(device).is_initialized():
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def random_pieces(rank: int) -> list[Piece]:
    return [whole(f"{RANDOM}{rank}.{key}", state) for key, state in random_states().items()]


def restore_random(rank: int, reader: Reader) -> None:
    """Sets the generators to this rank's saved states. Raises DamagedError if a generator rejects its state."""
    states: dict[str, Tensor] = {}
    mine = f"{RANDOM}{rank}."
    for name, entry in reader.manifest.tensors.items():
        if name.startswith(mine):
            key = name.removeprefix(mine)
            if entry.numel > _MAX_RANDOM_NUMEL:
                raise DamagedError(f"{reader.where}: {name} cannot be a generator's state: it has shape {entry.shape}")
            states[key] = reader.whole(name, torch.int64 if key in ("python", "numpy") else torch.uint8)
    try:
        set_random_states(states)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise DamagedError(f"{reader.where}: a random generator does not take its saved state: {error}") from error


def set_random_states(states: Mapping[str, Tensor]) -> None:
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])
    if "python" in states:
        words, gauss = _untwisted(states["python"])
        random.setstate((3, tuple(words), gauss))
    if "numpy" in states:
        (*key, position), gauss = _untwisted(states["numpy"])
        np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, int(gauss is not None), gauss or 0.0))


def _twister(words: Any, has_gauss: bool, gauss: float) -> Tensor:
    """Packs a Mersenne twister: its words, whether the second of two normal numbers is left, and that one's bits."""
    numbers = np.array([gauss], dtype=np.float64).view(np.int64)
    return torch.from_numpy(np.concatenate([np.array(words, dtype=np.int64), [np.int64(has_gauss)], numbers]))


def _untwisted(state: Tensor) -> tuple[list[int], float | None]:
    *words, has_gauss = state[:-1].tolist()
    return words, float(state[-1:].view(torch.float64).item()) if has_gauss else None
