"""The optimizer's parameters: each original parameter as this rank's slice of the master, under its own name.

[Note: Slices] To C++, a slice is a plain 1-D tensor; a `ShardedParameter` is a view of the flat master. To Python it is
the whole tensor. A list says which functions take it (`zeromesh.engine.allowed`): elementwise ones, which give slices
and never communicate, and reductions (`zeromesh.engine.reductions`), which are collectives. Everything else raises,
since its result would silently be of one slice: docs/decisions/0002.

Autograd does not reach the parameters that a unit computes with, which are leaves of its own. So a result that autograd
would follow raises when a gradient arrives at it.

A write to a parameter, or through a tensor that shows its values, tells the engine, which brings copies up to date.

Inside a forward of the model nothing is refused: a function that uses a parameter whose unit is not open opens the unit
for as long as it takes, as a call of the unit. All ranks run the same code there; elsewhere one of them may be alone.

[Note: Stepping] Inside the step of an optimizer that has been looked at, operands are not compared, and new tensors are
plain 1-D tensors of this rank's elements. `MARKED` says which, so that the same optimizer's functions outside of a step
(`eval()` of a schedule-free one) may use them beside slices. Hooks and closures of the user's are outside of the step.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms as grads
from torch._functorch import vmap
from torch.utils.weak import WeakTensorKeyDictionary

from zeromesh.engine import allowed
from zeromesh.engine.elements import Elements, require_alike, tensors_in
from zeromesh.errors import CheckpointError, ModelError, OptimizerError
from zeromesh.pieces.region import Region
from zeromesh.pieces.sliced import Sliced

if TYPE_CHECKING:
    from zeromesh.pieces.piece import Piece


def stepping() -> bool:
    """Whether an optimizer that has been looked at steps now."""
    return _thread.acts is _STEPPING


@contextmanager
def in_step(value: bool = True) -> Iterator[None]:
    """`stepping()` is `value` meanwhile."""
    was, _thread.acts = _thread.acts, _STEPPING if value else _ALLOWED
    try:
        yield
    finally:
        _thread.acts = was


UNSETTLED: list[weakref.ref[Any]] = []
"""The work on slices in the host's memory that there may be: [Note: Beside] of `zeromesh.engine.beside`."""


def settle(looked: object) -> None:
    """Comes after the steps on slices in the host's memory. Raises ModelError if those of the control that is looked at
    are parked."""
    for each in [*UNSETTLED]:
        if (work := each()) is not None:
            work.settle(looked)


MARKED: MutableMapping[Tensor, Elements] = WeakTensorKeyDictionary()
"""Optimizers' plain states, weakly: [Note: Stepping]."""


class Slice(Sliced, torch.Tensor):
    """This rank's slice of a tensor: [Note: Slices]."""

    elements: Elements
    zeroed = False  # whether it holds zeros because the user zeroed it, so that a backward may drop it
    owner: ShardedParameter | None = None  # the parameter whose memory this shows
    # Optimizers ask this of each tensor in each step: an attribute of Tensor costs a detour, one of ours does not.
    is_sparse = False
    __hash__ = object.__hash__  # states are looked up by it; Tensor's is the same in Python

    @property
    def local(self) -> Tensor:
        """The slice as a plain 1-D tensor that shares its memory."""
        if UNSETTLED:
            settle(self.elements.control)
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).detach()

    @property
    def full_name(self) -> str:
        return self.elements.name

    def piece(self, name: str | None = None, local: Tensor | None = None) -> Piece:
        """Its values, or others for the same elements, as those of a whole tensor of that name."""
        return self.elements.piece(name or self.full_name, self.local if local is None else local)

    @property
    def writes(self) -> bool:  # type: ignore[override]  # nobody sets it
        return self.elements.writes

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # a property in C too
        return self.elements.shape

    def dim(self) -> int:
        return len(self.elements.shape)

    ndimension = dim
    ndim = property(dim)

    def size(self, dim: int | None = None) -> Any:
        return self.elements.shape if dim is None else self.elements.shape[dim]

    def numel(self) -> int:
        return math.prod(self.elements.shape)

    nelement = numel

    def __len__(self) -> int:
        if not self.elements.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.elements.shape[0]

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor's takes tensor_contents
        return f"{type(self).__name__}({self.full_name!r}, shape={tuple(self.shape)}, local={self.local})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.shape else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Slice:
        return slice_of(self.elements, self.local.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.elements.is_whole and type(self) is Slice:
            return self.local.view(self.shape).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        raise CheckpointError(
            f"{self.elements} is one rank's slice, and pickled by itself (torch.save, a state dict of your own) the "
            f"others' would be lost: save the model with zm.Checkpoints or zm.full_state_dict(model); a moving average "
            f"is saved like a model if it is one, sharded as the trained one is"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        acts = _thread.acts
        act, kwargs = acts.get(func), kwargs or {}
        if not args:
            args, kwargs = _first_by_position(func, kwargs)
        gathers = acts is _ALLOWED and (act in _GATHERS or func in _DETACHED)  # an optimizer steps on slices
        if gathers and (engine := _running_engine(args, kwargs)) is not None:
            return engine.on_demand(func, args, kwargs)
        if act is None:
            raise _refusal(func, args, kwargs)
        if UNSETTLED and act not in _VALUELESS and (like := _first_slice(args, kwargs)) is not None:
            settle(like.elements.control)
        with torch._C.DisableTorchFunctionSubclass():
            return act(func, args, kwargs)


class ShardedParameter(Slice, nn.Parameter):
    """This rank's slice of a parameter's master, as the optimizer holds it. See [Note: Slices].

    Attributes:
        on_host: whether it lies in the host's memory, where an optimizer then steps on it.
        streamed: whether an optimizer steps on the device although it lies there.
        changed: the unit's generation in which its values last changed.
        changed_by: weak reference to the optimizer that changed them then; None: a load, or a user by hand.
    """

    unit: int
    engine: Callable[[], Any]
    on_host: bool = False
    streamed: bool = False
    grads_on: torch.device
    changed: int = 1
    changed_by: Callable[[], object] | None = None
    _shown: Tensor | None = None

    @property
    def steps_there(self) -> bool:
        return self.on_host and not self.streamed

    def change(self, generation: int, by: Callable[[], object] | None) -> None:
        """Its values have changed in the unit's `generation`; for `by` see `changed_by`."""
        self.changed, self.changed_by = generation, by

    @property
    def region(self) -> Region:
        """The part of the original parameter that this rank's data-parallel ranks have: all of a plain one."""
        return self.elements.region

    @property
    def owner(self) -> ShardedParameter:  # type: ignore[override]  # a field of other slices
        return self

    def shown(self) -> Slice:
        """Its values, outside of autograd; who writes to them writes to it."""
        found = slice_of(self.elements, self.local)
        found.owner = self
        return found

    # Autograd never writes it, so it need not be where C++ would look for it, behind a detour.
    @property
    def grad(self) -> Tensor | None:
        """The slice of the reduced gradient; None before the last micro-batch's backward."""
        return self._shown

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and (type(value) is not Slice or value.elements is not self.elements):
            value = self._as_grad(value)
        dropped = value is None and self._shown is not None
        self._shown = value
        if (engine := self.engine()) is not None:
            engine.forget_sum(self)
            if dropped:
                engine.changes.dropped(self)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _as_grad(self, value: Tensor) -> Slice:
        if value.shape != self.shape and not (stepping() and value.shape == self.local.shape):
            raise OptimizerError(
                f"the gradient of {self.elements} must be a slice of the same elements, or the whole tensor; got one "
                f"of shape {tuple(value.shape)}. For this rank's values write into `.grad.local`"
            )
        local = local_operand(self, value, "assignment of a gradient")
        if local.device != self.grads_on:
            raise OptimizerError(
                f"the gradient of {self.full_name} must be on {self.grads_on}; got it on {local.device}"
            )
        return slice_of(self.elements, local.detach())


def make_slice(kind: type[Slice], local: Tensor, requires_grad: bool, **attributes: Any) -> Any:
    self = torch.Tensor._make_subclass(kind, local, requires_grad)
    for name, value in attributes.items():
        setattr(self, name, value)
    return self


def slice_of(elements: Elements, local: Tensor) -> Slice:
    made: Slice = torch.Tensor._make_subclass(Slice, local, False)
    made.elements = elements
    return made


def give_memory(grad: Slice, memory: Tensor) -> Slice:
    """Has `grad`, which somebody else may hold, show other memory."""
    with torch._C.DisableTorchFunctionSubclass():
        grad.data = memory
    return grad


# ---- operands


def _elements_of(tensor: Any) -> Elements | None:
    """Those that a tensor is known to hold: a slice, or a plain one that an optimizer has made of a slice."""
    if isinstance(tensor, Slice):
        return tensor.elements
    return MARKED.get(tensor) if type(tensor) is Tensor else None


def local_operand(target: Slice, operand: Any, call: str) -> Any:
    """This rank's part of an argument of an elementwise function of `target`; arguments that are no tensors stay.

    Raises:
        OptimizerError: on every rank, where it holds other elements than `target`, or is not of the whole shape.
    """
    if not isinstance(operand, Tensor):
        return operand
    own = _elements_of(operand)
    if own is not None:
        require_alike(call, target.elements, own)
        return operand
    if stepping() and operand.dim() == 1 and type(operand) is Tensor:
        return operand
    return target.elements.part_of(operand, call)


def loaded_operand(elements: Elements, value: Tensor, call: str) -> Tensor:
    """This rank's part of a value that `load_state_dict` is given for some elements.

    Raises:
        CheckpointError, OptimizerError: on every rank, where it is a slice of others, or not of the whole shape.
    """
    if isinstance(value, Slice):
        if value.elements == elements:
            return value.local
        if not value.elements.is_whole:
            raise CheckpointError(
                f"{call} of {elements} was given a slice of {value.elements}, of other elements: load it with "
                f"zm.Checkpoints or torch.distributed.checkpoint, which go from one layout to another, or with "
                f"zm.copy_values from a model of that layout"
            )
        value = value.local.view(value.shape)
    return elements.part_of(value, call)


def _localised(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an elementwise function, with each operand as it is on this rank; of one over lists of tensors,
    position by position."""
    columns = _columns((*args, *kwargs.values()))
    likes = [_first_slice(each) for each in columns or [[*args, *kwargs.values()]]]

    def local(like: Slice | None, value: Any) -> Any:
        return value if like is None else local_operand(like, value, name)

    def each(arg: Any) -> Any:
        if not columns:
            return local(likes[0], arg)
        return list(map(local, likes, arg)) if isinstance(arg, list | tuple) else arg

    return tuple(map(each, args)), {key: each(value) for key, value in kwargs.items()}


def _columns(operands: Sequence[Any]) -> list[list[Any]]:
    """The elements of lists among these operands, position by position; none without lists."""
    lists = [each for each in operands if isinstance(each, list | tuple)]
    width = max(map(len, lists), default=0)
    return [[each[at] for each in lists if at < len(each)] for at in range(width)]


def _sliced_result(name: str, result: Any, args: Any, kwargs: Any) -> Any:
    """The result of an elementwise function of slices, as slices of the same elements."""
    if result is NotImplemented:
        return result
    if isinstance(result, list | tuple) and name.startswith("_foreach_"):
        columns = _columns((*args, *kwargs.values()))
        return [_sliced_result(name, one, column, {}) for one, column in zip(result, columns, strict=True)]
    like = _first_slice(args, kwargs)
    if like is None:
        return result
    if isinstance(result, Slice):
        return result
    if not isinstance(result, Tensor) or result.shape != (like.elements.numel,):
        raise _refusal(name, [like])
    if result.grad_fn is None:
        return make_slice(Slice, result, result.requires_grad, elements=like.elements)
    made = result.as_subclass(Slice)
    made.elements = like.elements
    return made


def _first_slice(args: Any, kwargs: Any = MappingProxyType({})) -> Slice | None:
    return next((arg for arg in tensors_in([*args, *kwargs.values()]) if isinstance(arg, Slice)), None)


def _running_engine(args: Any, kwargs: Any) -> Any:
    """The engine of the first parameter among the arguments, if its model computes now."""
    for arg in tensors_in([*args, *kwargs.values()]):
        if type(arg) is ShardedParameter:
            engine = arg.engine()
            return engine if engine is not None and engine.runs() else None
    return None


# ---- autograd


class _Apart(torch.autograd.Function):
    """Functions of slices, as one node through which no gradient goes: it would go on to a slice, where no optimizer
    looks for it, and would be of this rank's elements only."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Any], name: str, owner: str, written: Any, *_: Tensor) -> Any:
        ctx.name, ctx.owner = name, owner
        ctx.mark_dirty(*written)
        result = compute()
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ModelError(
            f"{ctx.name} of {ctx.owner} is differentiated, but outside the forward of its unit a parameter is this "
            f"rank's slice of it and gets no gradient: compute it under torch.no_grad(), or inside that forward; for a "
            f"penalty on weights use the optimizer's weight_decay"
        )


def _apart(name: str, compute: Callable[[], Any], args: Any, kwargs: Any, written: Sequence[Tensor] = ()) -> Any:
    """Returns `compute()`; if autograd would follow it, as a result of `_Apart`."""
    if not torch.is_grad_enabled():
        return compute()
    followed = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if tensor.requires_grad]
    if not followed:
        return compute()
    like = _first_slice(args, kwargs)
    assert like is not None  # else nothing is refused
    return _Apart.apply(compute, name, like.full_name, written, *written, *followed)  # type: ignore[no-untyped-call]


def _refusal(func: Any, args: Any, kwargs: Any = MappingProxyType({})) -> OptimizerError:
    owner = _first_slice(args, kwargs)
    label = f"{owner.full_name} {tuple(owner.shape)}" if owner is not None else "a sharded parameter"
    name = func if isinstance(func, str) else func.__name__
    name = func.__self__.__name__ if name in ("__get__", "__set__") else name
    return OptimizerError(
        f"{name} needs all of {label}, or is not known to do without; each rank holds a slice of it, so the "
        f"result could differ on every rank: use zm.full_state_dict(model) for whole tensors, `.local` for this rank's "
        f"slice, or an elementwise function or optimizer; to compute with it, call the model, or a method that "
        f"zm.register_forward_method has made a forward of it"
    )


@cache
def refuse_transforms() -> None:
    """Where torch.func wraps tensors in C++, it asks no subclass; its function would be of this rank's elements."""
    for module, name in ((vmap, "_add_batch_dim"), (grads, "_wrap_for_grad"), (grads, "_wrap_functional_tensor")):
        if hasattr(module, name):  # else this torch has it elsewhere, and tests of the versions say so
            setattr(module, name, partial(_transformed, getattr(module, name)))


def _transformed(wrap: Callable[..., Any], tensor: Any, *args: Any) -> Any:
    if isinstance(tensor, Slice):
        raise _refusal("torch.func", [tensor])
    return wrap(tensor, *args)


# ---- spellings

_SAME = dict(self="input", x="input", a="input", x1="input", x2="other", axis="dim", keepdims="keepdim")
"""Names that torch takes for another."""


@cache
def _forms(func: Any) -> list[list[tuple[str, bool]]]:
    """The parameters that each form of a function takes by position: names, and whether they are tensors."""
    if hasattr(func, "__code__"):
        return [[(_SAME.get(name, name), False) for name in func.__code__.co_varnames[: func.__code__.co_argcount]]]
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{func.__name__}")
    forms = [[arg for arg in schema.arguments if not arg.kwarg_only] for schema in schemas]
    return [[(_SAME.get(arg.name, arg.name), "Tensor" in str(arg.type)) for arg in form] for form in forms]


def _first_by_position(func: Any, kwargs: Any) -> tuple[Any, Any]:
    first = {form[0][0] for form in _forms(func) if form}
    for key, value in kwargs.items():
        if _SAME.get(key, key) in first:
            return (value,), {other: kwargs[other] for other in kwargs if other != key}
    return (), kwargs


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments by name, without those that say no dimension, or not to keep one."""
    fitting = (form for form in _forms(func) if len(form) >= len(args) and all(map(_fits, args[1:], form[1:])))
    names = [name for name, _ in next(fitting, [("input", True)])]
    if len(args) > len(names):
        raise _refusal(func, args, kwargs)
    named = dict(zip(names, args, strict=False)) | {_SAME.get(key, key): value for key, value in kwargs.items()}
    # Not by equality: dimension 0 is equal to False.
    return {k: v for k, v in named.items() if not (v is None or v is False or (isinstance(v, list | tuple) and not v))}


def _fits(value: Any, parameter: tuple[str, bool]) -> bool:
    return isinstance(value, Tensor) == parameter[1] or value is None


# ---- the functions of the list, by kind


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    return result.as_subclass(torch.Tensor) if type(result) is ShardedParameter else result


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.__name__
    out = kwargs.get("out")
    if isinstance(out, Slice) or (out is not None and not stepping()):
        raise _refusal(f"{name}(out=...)", args, kwargs)
    if stepping():
        result = func(*args, **kwargs)
        return result if out is not None else _sliced_result(name, result, args, kwargs)
    own, options = _localised(name, args, kwargs)
    result = _apart(name, lambda: func(*own, **options), args, kwargs)
    return _sliced_result(name, result, args, kwargs)


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """In place. Operands are compared before anything is written."""
    targets = args[0] if type(args[0]) in (list, tuple) else args[:1]
    slices = [each for each in targets if isinstance(each, Slice)]
    own, options = args, kwargs
    if not stepping():
        own, options = _localised(func.__name__, args, kwargs)
        if len(slices) < len(targets):
            _require_slices(func, targets, args, kwargs)
    for each in slices:
        tell_of_write(each)
    if not torch.is_grad_enabled() or any(each.requires_grad and each.is_leaf for each in slices):
        result = func(*own, **options)  # with autograd, torch's own error about leaves
    else:
        result = None
        _apart(func.__name__, lambda: (func(*own, **options), slices)[1], args, kwargs, written=slices)
    for each in slices:
        each.zeroed = func in allowed.ZEROING
    return None if isinstance(args[0], list | tuple) else NotImplemented if result is NotImplemented else args[0]


def _write_in_step(func: Any, args: Any, kwargs: Any) -> Any:
    """`_write`, shorter where no autograd is, since each parameter has several a step."""
    if torch.is_grad_enabled():
        return _write(func, args, kwargs)
    first = args[0]
    if type(first) is not Tensor:  # but an optimizer's state
        for each in first if type(first) in (list, tuple) else (first,):
            if isinstance(each, Slice):
                tell_of_write(each)
                each.zeroed = func in allowed.ZEROING
    return func(*args, **kwargs)


def _require_slices(func: Any, targets: Sequence[Any], args: Any, kwargs: Any) -> None:
    """A plain target cannot take a slice's values: it would hold this rank's elements, as if they were the whole."""
    operands = (*args[1:], *kwargs.values())
    columns = _columns(operands) if isinstance(args[0], list | tuple) else [operands]
    for target, others in zip(targets, columns, strict=False):
        if _elements_of(target) is None and (like := _first_slice(others)) is not None:
            raise _refusal(f"{func.__name__} into a plain tensor", [like])


def tell_of_write(target: Slice) -> None:
    """Tells the engine before a write to a tensor that may show a parameter's values."""
    owner = target.owner
    if owner is not None and (engine := owner.engine()) is not None:
        engine.changing(owner)


def _set_chosen(func: Any, args: Any, kwargs: Any) -> Any:
    """One number for the elements that an index or a mask chooses, as in `grad[:n] = 0` and `sign[sign > 0] = 1`."""
    name, target = func.__name__, args[0]
    if name == "__setitem__":
        _, index, value = args
    else:
        named = _by_name(func, args, kwargs)
        dim, index, value = (named.get(key, 0) for key in ("dim", "index", "value"))
    if stepping() and isinstance(index, Tensor) and index.dtype == torch.bool:
        return _write(func, args, kwargs)
    one = not isinstance(value, Slice) and (not isinstance(value, Tensor) or value.numel() == 1)
    masks = not isinstance(index, Slice) or index.dtype == torch.bool
    if not one or not masks or not isinstance(target, Slice):
        raise _refusal(func, args)
    if name != "__setitem__":
        if not -target.ndim <= dim < target.ndim:
            raise _refusal(f"{name} over dimension {dim}", args)
        index = (*(slice(None) for _ in range(dim % target.ndim)), index)
        target = target if name.endswith("_") else _make(torch.clone, (target,), {})
    if not isinstance(index, Slice):
        index = slice_of(target.elements, target.elements.chosen(index, name).to(target.device))
    value = value.reshape(()) if isinstance(value, Tensor) else value
    return _write(torch.Tensor.masked_fill_, (target, index, value), {})


def _make(func: Any, args: Any, kwargs: Any) -> Any:
    """Copies and new tensors of the same elements."""
    source, name = args[0] if args else None, func.__name__
    if not isinstance(source, Slice):  # a plain one made like a slice: of its device and dtype
        return func(*args, **kwargs)
    followed = () if name.endswith("_like") else args  # those have no values of their source's
    result = _apart(name, lambda: func(*args, **kwargs), followed, {})
    if not isinstance(result, Tensor) or result is source:
        return result
    if not stepping():
        return _sliced_result(name, result, [source], {})
    result = result.as_subclass(torch.Tensor)
    MARKED[result] = source.elements
    return result


def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Random numbers for the whole tensor, of which this rank takes its elements: alike on ranks that hold the same."""
    source = args[0]
    whole = func(torch.empty((), dtype=source.dtype, device=source.device).expand(source.shape), *args[1:], **kwargs)
    own = source.elements.part_of(whole, func.__name__).expand(source.elements.numel).clone()
    return own if stepping() else slice_of(source.elements, own)


def _show(func: Any, args: Any, kwargs: Any) -> Any:
    """The same memory, outside of autograd."""
    owner = args[0].owner
    return slice_of(args[0].elements, args[0].local) if owner is None else owner.shown()


# ---- numbers of the whole tensor


def _reduce(func: Any, args: Any, kwargs: Any) -> Any:
    name, options = func.__name__, _by_name(func, args, kwargs)
    operands = [options.pop(key) for key in ("input", "other", "tensor") if key in options]
    dtype = options.pop("dtype", None)
    further = options.keys() - ({"rtol", "atol", "equal_nan"} if name == "allclose" else set())
    if further or (len(operands) > 1 and dtype is not None):
        raise _refusal(f"{name} over a dimension, or into a tensor,", args, kwargs)
    if name in ("max", "min") and len(operands) > 1:
        return _compute(getattr(torch, f"{name}imum"), operands, {})
    like = _first_slice(operands)
    assert like is not None
    if name == "equal" and any(each.shape != like.shape for each in operands):
        return False
    own = [torch.Tensor.as_subclass(local_operand(like, each, name), torch.Tensor) for each in operands]
    own = [each.expand(like.elements.numel) for each in own]
    if any(each.is_complex() for each in own):
        raise _refusal(f"{name} of complex numbers", args, kwargs)
    if name.endswith("dot") and any(each.dim() != 1 or each.shape != like.shape for each in operands):
        raise _refusal(f"{name} of tensors that are not of one dimension and one length", args, kwargs)
    if name in allowed.NUMBERS:
        return _number(func, like)
    own = own if dtype is None else [each.to(dtype) for each in own]
    like_torch = func(*(torch.ones(1, dtype=each.dtype) for each in own), **options)

    def compute() -> Any:
        from zeromesh.engine.reductions import whole_value  # of numbers of whole tensors

        found = whole_value(name, like.elements, own, options)
        return found.to(dtype or like_torch.dtype) if isinstance(like_torch, Tensor) else found.item()

    return _apart(name, compute, args, kwargs) if isinstance(like_torch, Tensor) else compute()


def _number(func: Any, source: Slice) -> Any:
    """The only element of a tensor, as a number; only some ranks hold it."""
    if source.numel() != 1:
        raise _refusal(func, [source])
    from zeromesh.engine.reductions import whole_value

    found = whole_value("item", source.elements, [source.local], {})
    return func(found.to(source.dtype))


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    name, options = func.__name__, _by_name(func, args, kwargs)
    tensors, dtype = options.pop("input"), options.pop("dtype", None)
    order = options.pop("ord", options.pop("p", None))
    tensors = tensors if name == "_foreach_norm" else [tensors]
    slices = [tensor for tensor in tensors if isinstance(tensor, Slice)]
    if options or len(slices) != len(tensors):
        raise _refusal(f"{name} over a dimension, or of sharded and plain tensors together,", args)
    if not all(tensor.is_floating_point() for tensor in slices):  # torch refuses them where a rank has elements
        raise _refusal(f"{name} of numbers that are not real", args)
    frobenius, matrices = order in (None, "fro"), any(tensor.ndim != 1 for tensor in slices)
    if not frobenius and (isinstance(order, str) or (name == "linalg_norm" and matrices)):
        raise _refusal(f"{name} with ord={order!r}, a norm of matrices,", args)
    local, elements = [tensor.local for tensor in slices], [tensor.elements for tensor in slices]
    power = 2.0 if frobenius else float(order)
    local = local if dtype is None else [each.to(dtype) for each in local]
    from zeromesh.engine.reductions import whole_norms

    norms = _apart(name, lambda: whole_norms(name, elements, local, power), args, kwargs)
    return list(norms) if name == "_foreach_norm" else norms[0]


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    """A step is skipped by all ranks or by none: each rank has looked at its slices only."""
    if args[2].device.type == "cpu" and args[2].is_pinned():  # GradScaler copies its scale there and does not wait
        torch.accelerator.current_stream().synchronize()
    func(*args, **kwargs)
    agreements = (tensor.elements.agree_max for tensor in args[0] if isinstance(tensor, Slice))
    for agree in dict.fromkeys(each for each in agreements if each is not None):
        agree(args[1])


def _count(func: Any, args: Any, kwargs: Any) -> int:
    return math.prod(args[0].shape)


# ---- parameters alone


def _keep_trainable(func: Any, args: Any, kwargs: Any) -> Any:
    """Whether a parameter is trained decided its buffers and its place in them."""
    target, value = args[0], bool([*args[1:], *kwargs.values(), True][0])
    if isinstance(target, ShardedParameter) and value != target.requires_grad:
        was, now = ("trainable", "freeze") if target.requires_grad else ("frozen", "unfreeze")
        raise ModelError(f"{target.full_name} was {was} when zm.shard was called: {now} it before zm.shard")
    return func(*args, **kwargs)


def _keep_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """A slice is a view of the master: other memory would not be gathered."""
    target, value = args
    if isinstance(target, Slice):
        old = target.local
        new = value.local if isinstance(value, Slice) else value
        if (old.dtype, old.device, old.data_ptr(), old.shape) != (new.dtype, new.device, new.data_ptr(), new.shape):
            raise ModelError(
                f"{target.full_name} is a view of this rank's shard ({old.dtype} on {old.device}), so it can be "
                f"neither moved nor cast (to {new.dtype} on {new.device}) nor replaced: move and cast the model before "
                f"zm.shard, choose dtypes by param_dtype= and master_dtype=, and write values by `.copy_`"
            )
    return func(*args, **kwargs)


def _no_hook(func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], ShardedParameter):
        raise ModelError(
            f"a hook on {args[0].full_name} would never be called: autograd computes gradients for copies of "
            f"parameters, and they are reduced later. Change `.grad` after the last backward, before the step"
        )
    return func(*args, **kwargs)


def _no_grad_of(func: Any, args: Any, kwargs: Any) -> Any:
    owner = _first_slice(args, kwargs)
    assert owner is not None
    raise ModelError(
        f"torch.autograd.{func.__name__} with respect to {owner.full_name}: autograd knows copies of sharded "
        f"parameters only, and gradients are reduced in backward: call loss.backward(), without inputs=, and read "
        f"`.grad`"
    )


_KINDS: dict[Callable[..., Any], Iterable[Any]] = {
    _read: allowed.PROPERTIES | allowed.SIZED,
    _compute: allowed.OUT_OF_PLACE,
    _write: allowed.IN_PLACE,
    _make: allowed.COPIES,
    _draw: allowed.RANDOM,
    _norm: allowed.NORMS,
    _reduce: allowed.REDUCTIONS,
    _unscale: allowed.UNSCALING,
    _count: [torch.numel],
    _set_chosen: allowed.CHOOSING,
    _show: [torch.detach, torch.Tensor.detach, torch.Tensor.data.__get__],  # type: ignore[attr-defined]
    _keep_trainable: [torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__],  # type: ignore[attr-defined]
    # `nn.Module.to` asks the first, and would put a plain parameter in the slice's place where the answer is no.
    _keep_memory: [torch._has_compatible_shallow_copy_type, torch.Tensor.data.__set__],  # type: ignore[attr-defined]
    _no_hook: [torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook],
    _no_grad_of: [torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward],
}
_VALUELESS = frozenset({_read, _count, _keep_trainable, _keep_memory, _no_hook, _no_grad_of})
"""These ask a slice for nothing that a step changes."""
_DETACHED = frozenset({torch.detach, torch.Tensor.detach})
_GATHERS = frozenset({None, _compute, _make, _norm, _reduce})
"""Functions that compute with values; inside a forward they use those of the whole parameter."""

_ALLOWED = {function: kind for kind, functions in _KINDS.items() for function in functions}
_STEPPING = _ALLOWED | {function: _write_in_step for function, kind in _ALLOWED.items() if kind is _write}
"""The same inside an optimizer's step: [Note: Stepping]."""


class _Thread(threading.local):
    acts = _ALLOWED  # one lookup a call tells whether an optimizer steps, and how


_thread = _Thread()
