"""Steps of torch's optimizers on slices in the host's memory, which run beside the next forward.

[Note: Beside] Torch's elementwise optimizers keep all that they know of a parameter in its group, its state and its
gradient. So an optimizer of the same class steps on one unit at a time, over plain tensors of the same memory, in a
lane of the host. Units go in the order of the forward, and the refresh of each follows its step. The groups are copies:
a scheduler may go on to the next rate at once.

Gradients and states stay at their places meanwhile. Whoever looks at a slice's values, a gradient's or a state comes
after the steps (`settle`), and so does the first backward after them, which writes to the gradients' memory. A plain
tensor of such memory that somebody has kept from before knows nothing of it.

The first step on a parameter, which makes its states, is waited for: memory may not suffice, and it then raises as a
step does. Torch's fused kernels are chosen where the user has chosen none: without them one Python thread would issue
each operation of each parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zeromesh.engine.param import MARKED, ShardedParameter, settle

_Step = Callable[[Any], object]
_HERE = (None, -1)


def _settled(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    def called(self: Any, *args: Any) -> Any:
        settle(self)
        return method(self, *args)

    return called


_LOOKS = ("__getitem__", "__iter__", "__reduce__", "copy", "get", "items", "pop", "popitem", "setdefault", "values")

States: Any = type("States", (defaultdict,), {name: _settled(name) for name in _LOOKS})
"""An optimizer's states: whoever looks at one comes after the steps under way."""


def step_beside(step: _Step, optimizer: Optimizer) -> bool:
    """Hands an elementwise optimizer's step on slices that lie on the host to a lane there.

    Args:
        step: the optimizer's, without hooks.
        optimizer: whose slices have had their gradients.

    Returns:
        Whether it did; if not, nothing lies there, or the step has to run here.
    """
    if any(group.get("capturable") or group.get("differentiable") for group in optimizer.param_groups):
        return False
    if type(optimizer.state) is not States:
        optimizer.state = States(dict, optimizer.state)
    own = dict(vars(optimizer))
    if own.get("found_inf") is not None:
        own["found_inf"] = own["found_inf"].clamp(max=1)  # GradScaler adds up devices; kernels skip a step for 1 alone
    on_host = {name: _on_host(value) for name, value in own.items()}
    parts: dict[tuple[Any, int], _Part] = {}
    first = False
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if (grad := param.grad) is None:
                continue
            key = (param.engine(), param.unit) if isinstance(param, ShardedParameter) and param.on_host else _HERE
            if key not in parts:
                hosted = key is not _HERE
                parts[key] = _Part(optimizer, on_host if hosted else own, hosted=hosted)
            if not parts[key].take(index, param, grad):
                return False
            first = first or not dict.__contains__(optimizer.state, param)
    here = parts.pop(_HERE, None)
    for (engine, unit), part in sorted(parts.items(), key=lambda item: item[0][0].schedule.order.index(item[0][1])):
        engine.backend.step(unit, partial(part.run, step))
    if here is not None:
        here.run(step)
    if first:
        settle(optimizer)
    return True


class _Part:
    """Some parameters of an optimizer, to be stepped on by themselves.

    Args:
        optimizer: the whole one.
        attributes: of its own, a GradScaler's numbers among them.
        hosted: whether they lie on the host.
    """

    def __init__(self, optimizer: Optimizer, attributes: Mapping[str, Any], *, hosted: bool) -> None:
        self._whole, self._hosted = optimizer.state, hosted
        self._own: Any = object.__new__(type(optimizer))
        vars(self._own).update(attributes, state=defaultdict(dict), param_groups=[])
        self._groups = optimizer.param_groups
        self._taken: dict[int, dict[str, Any]] = {}
        self._plain: list[tuple[Any, Tensor]] = []

    def take(self, index: int, param: Any, grad: Any) -> bool:
        """A parameter of the group of this index; whether its gradient is of its dtype, as torch wants it."""
        if index not in self._taken:
            group = {key: value for key, value in self._groups[index].items() if key != "params"}
            if self._hosted:
                group = {key: _on_host(value) for key, value in group.items()}
            # Not SGD's, which wants momenta of all parameters or of none.
            if self._hosted and "momentum" not in group and group.get("fused", False) is group.get("foreach") is None:
                group["fused"] = True
            self._taken[index] = {**group, "params": []}
            self._own.param_groups.append(self._taken[index])
        plain = param
        if isinstance(param, ShardedParameter):
            plain, own = param.local, grad.local
            if own.dtype != plain.dtype:
                return False
            plain.grad = own
        self._taken[index]["params"].append(plain)
        self._plain.append((param, plain))
        return True

    def run(self, step: _Step) -> None:
        """Steps on them, on their states."""
        for param, plain in self._plain:
            if (state := dict.get(self._whole, param)) is not None:
                self._own.state[plain] = state
        step(self._own)
        for param, plain in self._plain:
            state = self._own.state.get(plain)
            if state is None or dict.get(self._whole, param) is state:
                continue
            dict.__setitem__(self._whole, param, state)
            for value in state.values() if plain is not param else ():
                if type(value) is Tensor and value.shape == plain.shape:
                    MARKED[value] = param.elements


def _on_host(value: Any) -> Any:
    """A copy of a number that the device may hold and others may change. It is there on return: torch's kernels there
    would have it copied without waiting, and read at once."""
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
