"""The options of optimizers' parameter groups: what an optimizer has beside tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zeromesh.checkpoint.manifest import DamagedError
from zeromesh.checkpoint.plain import from_plain, to_plain
from zeromesh.checkpoint.read import Reader
from zeromesh.errors import CheckpointError
from zeromesh.owners.optimizer import OwnerOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A parameter group as a checkpoint has it.

    Args:
        kind: the name of the optimizer's class; None where the checkpoint does not say.
        options: learning rate and the like.
    """

    kind: str | None
    options: Mapping[str, Any]


def describe_groups(optimizers: Sequence[Optimizer]) -> list[Any]:
    """The options of every parameter group, with its optimizer's class and the names of its parameters."""
    return [[_describe(optimizer, group) for group in optimizer.param_groups] for optimizer in optimizers]


def _describe(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
    names = [getattr(param, "full_name", "") for param in group["params"]]
    return {"kind": _kind(optimizer), "options": to_plain(options, "the optimizer's options"), "params": names}


def _kind(optimizer: Optimizer) -> str:
    kind = optimizer.kind if isinstance(optimizer, OwnerOptimizer) else type(optimizer)
    return kind.__name__


def read_groups(reader: Reader) -> dict[str, Group]:
    """By parameter: its group.

    Raises:
        DamagedError: they are not what `describe_groups` returned.
    """
    described = reader.manifest.state.get("groups", [])
    found: dict[str, Group] = {}
    try:
        for group in (group for groups in described for group in groups):
            saved = Group(kind=group.get("kind"), options=dict(from_plain(group["options"])))
            found |= dict.fromkeys(group["params"], saved)
    except (AttributeError, TypeError, KeyError, ValueError, CheckpointError) as error:
        raise DamagedError(f"{reader.where}: the optimizer's options cannot be read: {error!r}") from error
    return found


def require_kinds(optimizers: Sequence[Optimizer], groups: Mapping[str, Group], where: str) -> None:
    """Raises CheckpointError where a parameter's optimizer is of another class than the one that was saved."""
    for optimizer in optimizers:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            name = getattr(param, "full_name", "")
            saved = groups[name].kind if name in groups else None
            if saved not in (None, _kind(optimizer)):
                raise CheckpointError(
                    f"{where} was saved with {saved} for {name}, and here {_kind(optimizer)} steps on it: make "
                    f"optimizers of the classes that were saved, or load the model alone, with optimizers=False"
                )


def restore_groups(optimizers: Sequence[Optimizer], groups: Mapping[str, Group], where: str) -> None:
    """Sets each group's options to those of the first of its parameters that was saved.

    Raises:
        CheckpointError: an option has a value of another type; nothing is changed then.
    """
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            names = [getattr(param, "full_name", "") for param in group["params"]]
            saved = next((groups[name].options for name in names if name in groups), {})
            changes += [(group, key, value) for key, value in saved.items() if key != "params"]
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


def join_groups(described: Sequence[Sequence[Any]]) -> list[Any]:
    """What `describe_groups` has of all stages, by optimizer: groups of one place are one where their options are."""
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
    """The same under the names that torch's `get_optimizer_state_dict` gives them, of one optimizer."""
    if len(described) != 1:
        return {}
    groups = [{**from_plain(group["options"]), "params": group["params"]} for group in described[0]]
    return {f"optim.param_groups.{i}.{key}": value for i, group in enumerate(groups) for key, value in group.items()}
