"""Watches torch's optimizers through their global step hooks.

From an optimizer's first step on its `state_dict()` holds slices of whole tensors, as the model's does. A library that
saves states of all ranks sees which elements this rank has, and one that would save this rank's for all raises.

An optimizer that steps on slices must work element by element. Torch's that do are listed; any other is refused at its
first step, unless the user has vouched for it with `zm.elementwise(optimizer)` or made it with `zm.by_owner`.
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from zeromesh.engine.calls import as_python
from zeromesh.engine.leaf import Leaf
from zeromesh.engine.param import MARKED, ShardedParameter, Slice, in_step, loaded_operand, slice_of
from zeromesh.errors import CheckpointError, OptimizerError
from zeromesh.modules import DTYPE_NAMES
from zeromesh.pieces.region import Region

if TYPE_CHECKING:
    from zeromesh.engine.engine import Engine

ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)

NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""States of torch's optimizers that are one number for a parameter of any shape."""

_checked: weakref.WeakKeyDictionary[Optimizer, tuple[int, ...]] = weakref.WeakKeyDictionary()
"""By optimizer: the parameters that it had when it was looked at."""

_BY_OWNER = "by_owner"  # a key in the groups of a state dict with whole states, which some ranks may have none of

VOUCHED: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # by `zm.elementwise`

UNPROVEN: weakref.WeakKeyDictionary[Optimizer, Callable[[Optimizer, RuntimeError | None], None]]
UNPROVEN = weakref.WeakKeyDictionary()
"""Other optimizers that have not stepped yet, so nobody knows the kinds of their states; and who looks at them then."""


class Whole(ABC, dict[ShardedParameter, Region]):
    """The parameters that an optimizer of whole tensors (`zeromesh.owners`) steps on here, each with the region that it
    has: all, or those tensors of a batch that the ranks along further axes do not have."""

    @abstractmethod
    def shown(self, param: ShardedParameter, key: str, value: Any) -> Any:
        """A state as `state_dict()` holds it."""

    @abstractmethod
    def take(self, optimizer: Optimizer) -> None:
        """`take_slices` of such an optimizer."""


WHOLE: weakref.WeakKeyDictionary[Optimizer, Whole] = weakref.WeakKeyDictionary()

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_installed: list[Any] = []


def watch_optimizers(engine: Engine) -> None:
    """Looks at all optimizers from now on, also at those that were made before: they may hold the model's originals."""
    _engines.add(engine)
    _checked.clear()
    if not _installed:
        for kind, params_of in ((Optimizer, _params), (nn.Module, nn.Module.parameters)):
            kind.zero_grad = _with_sums(kind.zero_grad, params_of)  # type: ignore[method-assign]  # both have one
        # Torch chooses its foreach implementations, on CUDA, for listed types only; DTensor is listed the same way.
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            types = getattr(importlib.import_module(name), "_foreach_supported_types", [])
            types.extend(kind for kind in (ShardedParameter, Slice) if kind not in types)
        _installed.append(register_optimizer_step_pre_hook(_before_step))


def _with_sums(zero_grad: Callable[..., None], params_of: Callable[[Any], Iterable[Any]]) -> Callable[..., None]:
    """Torch's `zero_grad`, which looks at `.grad` alone, also of sums of micro-batches, which that does not show."""

    @as_python
    @wraps(zero_grad)
    def with_sums(owner: Any, set_to_none: bool = True) -> None:
        zero_grad(owner, set_to_none)
        for param in params_of(owner) if any(engine.holds_sums for engine in _engines) else ():
            if isinstance(param, ShardedParameter) and (engine := param.engine()) is not None:
                engine.forget_sum(param, zeros=not set_to_none)

    return with_sums


def _params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


_surrounded: set[Callable[..., Any]] = set()

_HOOKED: CodeType = Optimizer.profile_hook_step(_params).__code__  # torch's wrapper of `step`, which calls the hooks


@as_python
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = tuple(map(id, _params(optimizer)))
    if _checked.get(optimizer) != held:
        check_optimizer(optimizer)
        take_slices(optimizer)
        sharded = [param for param in _params(optimizer) if isinstance(param, ShardedParameter)]
        if sharded and "_on_slices" not in vars(optimizer):
            vars(optimizer)["_on_slices"] = optimizer not in WHOLE
            _surround_step(type(optimizer))
            optimizer.register_state_dict_post_hook(_as_slices)
            optimizer.register_load_state_dict_post_hook(take_slices)
        on_host = any(param.on_host for param in sharded)
        vars(optimizer)["_streams"] = any(param.streamed for param in sharded)
        vars(optimizer)["_steps_beside"] = on_host and steps_elementwise(type(optimizer))
        _checked[optimizer] = held
    without = not any(map(callable, (*args[1:], *kwargs.values()))) and all(p.grad is None for p in _params(optimizer))
    for engine, params in by_engine(optimizer).items():
        engine.before_step(params)
        if without:
            engine.require_gradients(params)


def _surround_step(kind: type[Optimizer]) -> None:
    """Puts `_step_on_slices` around the function that torch's wrapper of `step` calls between its hooks.
    Torch calls no hook after a step that raised; and schedulers and compiled functions hold the wrapper itself."""
    wrapper: Any = inspect.unwrap(kind.step, stop=lambda function: function.__code__ is _HOOKED)
    cell = wrapper.__closure__[_HOOKED.co_freevars.index("func")]
    if (step := cell.cell_contents) in _surrounded:
        return

    @wraps(step)
    def surrounded(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # compiled too: no more than dynamo understands
        if getattr(optimizer, "_on_slices", False):
            return _step_on_slices(step, optimizer, args, kwargs)
        return step(optimizer, *args, **kwargs)

    _surrounded.add(surrounded)
    cell.cell_contents = surrounded


@as_python
def _step_on_slices(step: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Ends before torch calls the optimizer's hooks: a parameter that those write to is changed by hand."""
    has_closure = any(map(callable, (*args, *kwargs.values())))  # whose forward and backward are still to come
    steps_on = {  # as it begins, since a step may drop gradients
        engine: [param for param in params if has_closure or param.grad is not None]
        for engine, params in by_engine(optimizer).items()
    }
    found = _run_step(step, optimizer, args, kwargs)
    for engine, params in steps_on.items():
        if params:
            engine.changes.stepped(params, by=weakref.ref(optimizer))
    look_at_states(optimizer)
    return found


def _run_step(step: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """[Note: Stepping] of `zeromesh.engine.param`."""
    given, loss = [value for value in (*args, *kwargs.values()) if value is not None], None
    if vars(optimizer)["_steps_beside"] and len(given) <= 1 and all(map(callable, given)):
        from zeromesh.engine.beside import step_beside  # of host=

        with torch.enable_grad():
            loss, args, kwargs = given[0]() if given else None, (), {}  # torch's begin with the closure
        if step_beside(step, optimizer):
            return loss
    if vars(optimizer)["_streams"]:
        raise OptimizerError(
            f"step=device needs one of torch's elementwise optimizers, without capturable or differentiable, and "
            f"gradients in the masters' dtype: {type(optimizer).__name__} cannot step so; leave step=device out"
        )
    try:
        with in_step():
            own = {key: _outside(value) for key, value in kwargs.items()}
            found = step(optimizer, *map(_outside, args), **own)
            return found if loss is None else loss
    except RuntimeError as failure:
        if not isinstance(failure, OptimizerError):  # those are alike on all ranks
            look_at_states(optimizer, failure)
            if any(param.grad is not None and param.grad.dtype != param.dtype for param in _params(optimizer)):
                raise OptimizerError(
                    f"{type(optimizer).__name__} takes gradients in the dtype of its parameters alone: give zm.shard "
                    f"one dtype as grad_dtype= and master_dtype= [{failure}]"
                ) from failure
        raise


def _outside(closure: Any) -> Any:
    """A closure as it is outside of the step that calls it."""
    return in_step(False)(closure) if callable(closure) else closure


def _as_slices(optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    """A state dict with this rank's states as slices; the optimizer's own, which `found` refers to, stay."""
    indices = [index for group in found["param_groups"] for index in group["params"]]
    states, groups = dict(found["state"]), found["param_groups"]
    if (whole := WHOLE.get(optimizer)) is not None:
        groups = [{**group, _BY_OWNER: True} for group in groups]
    for index, param in zip(indices, _params(optimizer), strict=True):
        if isinstance(param, ShardedParameter) and index in states:
            shown = _as_slice if whole is None or param not in whole else whole.shown
            states[index] = {key: shown(param, key, value) for key, value in states[index].items()}
    return {**found, "state": states, "param_groups": groups}


def _as_slice(param: ShardedParameter, key: str, value: Any) -> Any:
    value = value.local if isinstance(value, Slice) else value
    if not isinstance(value, torch.Tensor) or value.shape != param.local.shape or value.dtype not in DTYPE_NAMES:
        return value  # not of its elements, or of a dtype that no checkpoint holds
    return slice_of(param.elements, value)


def take_slices(optimizer: Optimizer) -> None:
    """States that came from such a state dict, or from one of whole tensors, as the optimizer steps on them."""
    whole = any([group.pop(_BY_OWNER, False) for group in optimizer.param_groups])
    if optimizer in WHOLE:
        return WHOLE[optimizer].take(optimizer)
    if whole:
        optimizer.state.clear()
        raise CheckpointError(
            f"{type(optimizer).__name__} steps on slices, but load_state_dict got whole states of an optimizer of "
            f"zm.by_owner: load them with zm.Checkpoints"
        )
    for param in _params(optimizer):
        if isinstance(param, ShardedParameter):
            state: dict[str, Any] = optimizer.state.get(param, {})
            sliced = any(isinstance(value, Slice) for value in state.values())  # then others are no whole tensors
            for key, value in state.items():
                sized = isinstance(value, torch.Tensor) and not (sliced or is_number(key, value))
                if isinstance(value, Slice) or (sized and value.shape == param.shape != (param.elements.numel,)):
                    own = loaded_operand(param.elements, value, f"load_state_dict of state {key!r}")
                    own = own.expand(param.elements.numel)  # of one element, which this rank may not have
                    # A clone, or the whole of it would stay in memory.
                    state[key] = own if isinstance(value, Slice) else own.clone()
                if type(state[key]) is torch.Tensor and state[key].shape == (param.elements.numel,):
                    MARKED[state[key]] = param.elements


def is_number(key: str, state: torch.Tensor) -> bool:
    """Whether a 0-d state is no slice of a 0-d parameter: a count, or one of torch's `NUMBERS`."""
    return key in NUMBERS or (not state.dim() and not state.is_floating_point())


def look_at_states(optimizer: Optimizer, failure: RuntimeError | None = None) -> None:
    """After its first step, or as that has failed, if nobody knows the kinds of its states."""
    if (look := UNPROVEN.get(optimizer)) is not None:
        look(optimizer, failure)


def by_engine(optimizer: Optimizer) -> dict[Any, list[ShardedParameter]]:
    """The optimizer's parameters, with or without gradients."""
    found: dict[Any, list[ShardedParameter]] = defaultdict(list)
    for param in _params(optimizer):
        if isinstance(param, ShardedParameter) and (engine := param.engine()) is not None:
            found[engine].append(param)
    return found


def steps_elementwise(kind: type[Optimizer]) -> bool:
    """Whether its `step` is that of one of torch's elementwise optimizers, inherited or its own."""
    for base in kind.__mro__:
        if base.__name__ in ELEMENTWISE and base.__module__.startswith("torch.optim"):
            # Torch wraps the `step` of each class of which there is an optimizer.
            return inspect.unwrap(kind.step) is inspect.unwrap(getattr(base, "step"))  # noqa: B009  # a `type` for mypy
    return False


def check_optimizer(optimizer: Optimizer) -> None:
    params = list(_params(optimizer))
    for param in params:
        retired = getattr(param, "_zeromesh_retired", None)
        if retired is not None:
            raise OptimizerError(
                f"{type(optimizer).__name__} holds {retired!r} as it was before zm.shard, so the sharded model would "
                f"never be updated: make the optimizer after zm.shard, from model.parameters()"
            )
        if isinstance(param, Leaf):
            raise OptimizerError(
                f"{type(optimizer).__name__} holds the gathered copy of {param.full_name!r}, so the sharded model "
                f"would never be updated: it was made inside a forward. Make it again from model.parameters() outside"
            )
    kind, held = type(optimizer), {id(param) for param in params if type(param) is not ShardedParameter}
    for name in (name for engine in _engines for name, param in engine.added() if id(param) in held):
        raise OptimizerError(
            f"{kind.__name__} holds {name!r}, which was added to the model after zm.shard: its gradients would not be "
            f"reduced, and each rank would train its own. Change the model first, then shard it"
        )
    known = optimizer in VOUCHED or optimizer in WHOLE or steps_elementwise(kind)
    if not known and any(type(param) is ShardedParameter for param in params):
        raise OptimizerError(
            f"each rank holds a slice of every parameter, so the optimizer must work element by element; "
            f"{kind.__module__}.{kind.__name__} is not known to. If it does, call zm.elementwise(optimizer); if it "
            f"needs whole tensors (their norms, factors, matrices), make it as zm.by_owner({kind.__name__}, params)"
        )
