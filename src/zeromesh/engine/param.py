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
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms as grads
from torch._functorch import vmap
from torch.utils.weak import WeakTensorKeyDictionary

from zeromesh.engine import allowed
from zeromesh.engine.elements import Agree, Elements, require_alike, tensors_in
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
"""Weakly, all work on slices in the host's memory that may not have ended: [Note: Beside] of `zeromesh.engine.beside`.
"""


def settle(looked: object) -> None:
    """Waits for steps on slices in the host's memory. Raises ModelError if those of the control `looked` are parked."""
    for each in [*UNSETTLED]:
        if (work := each()) is not None:
            work.settle(looked)


MARKED: MutableMapping[Tensor, Elements] = WeakTensorKeyDictionary()  # optimizers' plain states: [Note: Stepping]


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
            args, kwargs = _other("first_by_position")(func, args, kwargs)
        gathers = acts is _ALLOWED and (act in _GATHERS or func in _DETACHED)  # an optimizer steps on slices
        if gathers and (engine := _running_engine(args, kwargs)) is not None:
            return engine.on_demand(func, args, kwargs)
        if act is None:
            raise refusal(func, args, kwargs)
        if UNSETTLED and act not in _VALUELESS and (like := first_slice(args, kwargs)) is not None:
            settle(like.elements.control)
        with torch._C.DisableTorchFunctionSubclass():
            return act(func, args, kwargs)


class ShardedParameter(Slice, nn.Parameter):
    """This rank's slice of a parameter's master, as the optimizer holds it. See [Note: Slices]."""

    unit: int
    engine: Callable[[], Any]
    on_host: bool = False  # whether it lies in the host's memory, where an optimizer then steps on it
    streamed: bool = False  # whether an optimizer steps on the device although it lies there
    grads_on: torch.device
    changed: int = 1  # the unit's generation in which its values last changed
    changed_by: Callable[[], object] | None = None  # weakly, the optimizer that did it; None: a load, or a user by hand
    _shown: Slice | None = None

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
        shown = self._shown
        if shown is not None and shown.zeroed and (engine := self.engine()) is not None and engine.holds_sums:
            # Sums of this step's first micro-batches lie in its memory.
            self._shown = shown = slice_of(self.elements, torch.zeros_like(shown.local))
        return shown

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
    """The elements that a slice holds, or a plain tensor that an optimizer has made from a slice; None if unknown."""
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
    if (own := _elements_of(operand)) is not None:
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
    likes = [first_slice(each) for each in columns or [[*args, *kwargs.values()]]]

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
    like = first_slice(args, kwargs)
    if like is None:
        return result
    if isinstance(result, Slice):
        return result
    if not isinstance(result, Tensor) or result.shape != (like.elements.numel,):
        raise refusal(name, [like])
    if result.grad_fn is None:
        return make_slice(Slice, result, result.requires_grad, elements=like.elements)
    made = result.as_subclass(Slice)
    made.elements = like.elements
    return made


def first_slice(args: Any, kwargs: Any = MappingProxyType({})) -> Slice | None:
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


def apart(name: str, compute: Callable[[], Any], args: Any, kwargs: Any, written: Sequence[Tensor] = ()) -> Any:
    """Returns `compute()`; if autograd would follow it, as a result of `_Apart`."""
    if not torch.is_grad_enabled():
        return compute()
    followed = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if tensor.requires_grad]
    if not followed:
        return compute()
    like = first_slice(args, kwargs)
    assert like is not None  # else nothing is refused
    return _Apart.apply(compute, name, like.full_name, written, *written, *followed)  # type: ignore[no-untyped-call]


def refusal(func: Any, args: Any, kwargs: Any = MappingProxyType({})) -> OptimizerError:
    owner = first_slice(args, kwargs)
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
        raise refusal("torch.func", [tensor])
    return wrap(tensor, *args)


# ---- the functions of the list, by kind


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    return result.as_subclass(torch.Tensor) if type(result) is ShardedParameter else result


def compute_each(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.__name__
    out = kwargs.get("out")
    if isinstance(out, Slice) or (out is not None and not stepping()):
        raise refusal(f"{name}(out=...)", args, kwargs)
    if stepping():
        result = func(*args, **kwargs)
        return result if out is not None else _sliced_result(name, result, args, kwargs)
    own, options = _localised(name, args, kwargs)
    result = apart(name, lambda: func(*own, **options), args, kwargs)
    return _sliced_result(name, result, args, kwargs)


def write_to(func: Any, args: Any, kwargs: Any) -> Any:
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
        apart(func.__name__, lambda: (func(*own, **options), slices)[1], args, kwargs, written=slices)
    for each in slices:
        each.zeroed = func in allowed.ZEROING
    return None if isinstance(args[0], list | tuple) else NotImplemented if result is NotImplemented else args[0]


def _write_in_step(func: Any, args: Any, kwargs: Any) -> Any:
    """`write_to`, shorter where no autograd is, since each parameter has several a step."""
    if torch.is_grad_enabled():
        return write_to(func, args, kwargs)
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
        if _elements_of(target) is None and (like := first_slice(others)) is not None:
            raise refusal(f"{func.__name__} into a plain tensor", [like])


def tell_of_write(target: Slice) -> None:
    """Tells the engine before a write to a tensor that may show a parameter's values."""
    owner = target.owner
    if owner is not None and (engine := owner.engine()) is not None:
        engine.changing(owner)


def make_like(func: Any, args: Any, kwargs: Any) -> Any:
    """Copies and new tensors of the same elements."""
    source, name = args[0] if args else None, func.__name__
    if not isinstance(source, Slice):  # a plain one made like a slice: of its device and dtype
        return func(*args, **kwargs)
    followed = () if name.endswith("_like") else args  # those have no values of their source's
    result = apart(name, lambda: func(*args, **kwargs), followed, {})
    if not isinstance(result, Tensor) or result is source:
        return result
    if not stepping():
        return _sliced_result(name, result, [source], {})
    result = result.as_subclass(torch.Tensor)
    MARKED[result] = source.elements
    return result


def _show(func: Any, args: Any, kwargs: Any) -> Any:
    """The same memory, outside of autograd."""
    owner = args[0].owner
    return slice_of(args[0].elements, args[0].local) if owner is None else owner.shown()


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    """Each rank looks at its own slices, so ranks agree on whether to skip the step."""
    if args[2].device.type == "cpu" and args[2].is_pinned():  # GradScaler copies its scale there and does not wait
        torch.accelerator.current_stream().synchronize()
    func(*args, **kwargs)
    agreements: Iterable[Agree | None] = (t.elements.agree_max for t in args[0] if isinstance(t, Slice))
    # Each wider agreement once: ranks differ in how many of their stages have gradients.
    while narrower := [agree for agree in dict.fromkeys(agreements) if agree is not None]:
        agreements = [agree(args[1]) for agree in narrower]


def _count(func: Any, args: Any, kwargs: Any) -> int:
    return math.prod(args[0].shape)


@cache
def _other(name: str) -> Callable[..., Any]:
    """A function of `zeromesh.engine.functions`, which builds on this module."""

    def act(func: Any, args: Any, kwargs: Any) -> Any:
        return resolve_name(f"zeromesh.engine.functions:{name}")(func, args, kwargs)

    return act


_KINDS: dict[Callable[..., Any], Iterable[Any]] = {
    _read: allowed.PROPERTIES | allowed.SIZED,
    compute_each: allowed.OUT_OF_PLACE,
    write_to: allowed.IN_PLACE,
    make_like: allowed.COPIES,
    _other("draw"): allowed.RANDOM,
    _other("norm"): allowed.NORMS,
    _other("reduce"): allowed.REDUCTIONS,
    _unscale: allowed.UNSCALING,
    _count: [torch.numel],
    _other("set_chosen"): allowed.CHOOSING,
    _show: [torch.detach, Tensor.detach, Tensor.data.__get__],  # type: ignore[attr-defined]
    _other("keep_trainable"): [Tensor.requires_grad_, Tensor.requires_grad.__set__],  # type: ignore[attr-defined]
    # `nn.Module.to` asks the first, and would put a plain parameter in the slice's place where the answer is no.
    _other("keep_memory"): [torch._has_compatible_shallow_copy_type, Tensor.data.__set__],  # type: ignore[attr-defined]
    _other("no_hook"): [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook],
    _other("no_grad_of"): [torch.autograd.grad, torch.autograd.backward, Tensor.backward],
}
_REFUSALS = map(_other, ("keep_trainable", "keep_memory", "no_hook", "no_grad_of"))
_VALUELESS = frozenset({_read, _count, *_REFUSALS})  # these ask a slice for nothing that a step changes
_DETACHED = frozenset({torch.detach, torch.Tensor.detach})
_GATHERS = frozenset({None, compute_each, make_like, _other("norm"), _other("reduce")})
"""Functions that compute with values; inside a forward they use those of the whole parameter."""

_ALLOWED = {function: kind for kind, functions in _KINDS.items() for function in functions}
_STEPPING = _ALLOWED | {function: _write_in_step for function, kind in _ALLOWED.items() if kind is write_to}
"""The same inside an optimizer's step: [Note: Stepping]."""


class _Thread(threading.local):
    acts = _ALLOWED  # one lookup a call tells whether an optimizer steps, and how


_thread = _Thread()
