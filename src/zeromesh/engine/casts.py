"""The arguments of the calls of a unit with a compute dtype. Only `param_dtype` loads this.

[Note: Cast containers] A unit with a compute dtype is given the floating tensors of all its inputs in that dtype, also
those in containers. A container in which nothing needs a cast stays the object that it is. One in which something does
is copied, since the caller's own tensors are none of the unit's. Whenever the forward adds, removes or replaces an item
of the copy, the same happens to the caller's object as the forward returns: models hand lists of losses and caches
from block to block to be filled.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from zeromesh.engine.calls import SEQUENCES, items_of


class CastCalls:
    """The calls of one unit that are under way, inner ones last: [Note: Cast containers]."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._open: list[tuple[dict[str, Any], _Copies]] = []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        copies = _Copies(self._dtype)
        cast = tuple(copies.of(arg) for arg in args), {key: copies.of(arg) for key, arg in kwargs.items()}
        self._open.append((cast[1], copies))
        return cast

    def end(self, kwargs: dict[str, Any]) -> None:
        """A forward that was called with `kwargs` has returned, or raised."""
        # Calls above it were interrupted. Another hook may have put other `kwargs` in the place of ours.
        depth = next((at for at in reversed(range(len(self._open))) if self._open[at][0] is kwargs), -1)
        ended, self._open[depth:] = self._open[depth:], []
        for _, copies in ended[:1]:
            copies.write_back()


class _Copies:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._made: dict[int, tuple[Any, Any]] = {}
        self._copies: list[tuple[Any, Any, dict[Any, Any], dict[Any, Any]]] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._dtype) if value.is_floating_point() else value
        items = items_of(value)
        if not items:
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        self._made[id(value)] = value, value  # a container may hold itself
        cast = {key: self.of(item) for key, item in items.items()}
        if any(cast[key] is not item for key, item in items.items()):
            made = _rebuilt(value, items, cast)
            self._made[id(value)] = value, made
            self._copies.append((value, made, items, cast))
            return made
        return value

    def write_back(self) -> None:
        for value, made, items, cast in self._copies:
            given = {id(cast[key]): item for key, item in items.items()}
            _write(value, cast, items_of(made) or {}, given)


def _rebuilt(value: Any, items: dict[Any, Any], cast: dict[Any, Any]) -> Any:
    """A container like `value`, which holds `items`, with their casts in their places."""
    if isinstance(value, tuple):
        return getattr(type(value), "_make", type(value))(cast.values())
    if isinstance(value, frozenset):
        return type(value)(cast.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return value  # there is no telling how it is made
    made = copy.copy(value)
    _write(made, items, cast, {})
    return made


def _write(value: Any, before: dict[Any, Any], after: dict[Any, Any], given: dict[int, Any]) -> None:
    """Changes `value` as `before` was changed into `after`; `given` has, by id, items to put in the place of others."""
    changed = {
        key: given.get(id(item), item) for key, item in after.items() if key not in before or before[key] is not item
    }
    if isinstance(value, MutableMapping):
        for key in before.keys() - after.keys():
            value.pop(key, None)
        for key, item in changed.items():
            value[key] = item
    elif isinstance(value, list | deque | set):
        if changed or len(before) != len(after):
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(given.get(id(i), i) for i in after.values())
    elif not isinstance(value, (*SEQUENCES, Mapping)):
        for name, item in changed.items():
            object.__setattr__(value, name, item)  # frozen ones too, as they are made
