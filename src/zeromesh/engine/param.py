"""The optimizer's parameters: each original parameter as this rank's slice of the master, under its own name.

[Note: Slices] To C++, a `ShardedParameter` is a plain 1-D tensor, a view of the flat master: plain, foreach and fused
optimizers run on it at full speed. To Python, `shape`, `ndim`, `size()` and `numel()` are the original parameter's,
since people split weight decay by them. What may be done with it is a list (`zeromesh.engine.allowed`): elementwise
functions, norms, which are taken over all ranks, and what tells as much of a slice as of the whole. Everything else
raises, since its result would silently be of one slice. So does what autograd would differentiate: a unit computes with
leaves of its own, and a slice gets no gradient from autograd.

What an elementwise function returns of a slice is a slice of a tensor too, and guarded likewise: `p.grad / 2` may be
the gradient from then on, and `p.grad.isnan().any()` raises rather than let ranks decide differently. So are `p.data`
and `p.detach()`. Copies and new tensors (`clone`, `to`, `zeros_like`) are this rank's own, as optimizers' states are.

A write to a parameter, or through what shows its values, tells the engine, which brings copies up to date.

Inside a forward of the model nothing is refused: what computes with a parameter whose unit is not open opens it for as
long as it takes, as a call of the unit. So it is inside another method of one of its modules (`encode` of a VAE, the
forward of a layer that is no unit), but that functions of slices are as elsewhere there. All ranks run the same code of
the model; elsewhere one of them may be alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.engine import allowed
from zeromesh.engine.control import Span
from zeromesh.engine.norms import slice_norms
from zeromesh.errors import ModelError, OptimizerError
from zeromesh.pieces.piece import Piece
from zeromesh.pieces.region import Region
from zeromesh.pieces.sliced import SlicedTensor, part_of

AgreeMax = Callable[[Tensor], None]
"""Replaces a tensor by its maximum over all ranks."""


class _Slice(torch.Tensor):
    """This rank's slice of a tensor: [Note: Slices]."""

    global_shape: torch.Size
    full_name: str
    spans: tuple[Span, ...]
    agree_max: AgreeMax
    zeroed: bool
    owner: ShardedParameter | None = None  # of whose values it is a view
    # Asked by optimizers of each tensor in each step: an attribute of Tensor costs a detour, one of ours does not.
    is_sparse = False

    @property
    def local(self) -> Tensor:
        """The slice as a plain 1-D tensor that shares its memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).detach()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # a property in C too
        return self.global_shape

    @property
    def ndim(self) -> int:  # type: ignore[override]  # a property in C too
        return len(self.global_shape)

    def dim(self) -> int:
        return len(self.global_shape)

    ndimension = dim

    def size(self, dim: int | None = None) -> Any:
        return self.global_shape if dim is None else self.global_shape[dim]

    def numel(self) -> int:
        return math.prod(self.global_shape)

    nelement = numel

    def __len__(self) -> int:
        if not self.global_shape:
            raise TypeError("len() of a 0-d tensor")
        return self.global_shape[0]

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor's takes tensor_contents
        return f"{type(self).__name__}({self.full_name!r}, shape={tuple(self.global_shape)}, local={self.local})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.local.clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        act, kwargs = _ALLOWED.get(func), kwargs or {}
        if (act in _GATHERS or func in _DETACHED) and (engine := _running_engine(func, args, kwargs)) is not None:
            return engine.on_demand(func, args, kwargs)
        if act is None:
            raise _refusal(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return act(func, args, kwargs)


class ShardedParameter(_Slice, nn.Parameter):
    """What the optimizer holds of one parameter: this rank's slice of the master. See [Note: Slices].

    Attributes:
        full_name: the parameter's qualified name.
        global_shape: the original parameter's shape.
        region: what of the original parameter this rank's data-parallel ranks have: all of one that is no DTensor.
        writes: whether this rank, and no other that has the same of it beyond the mesh, saves it.
        flat_start: where the slice starts in the flattened region.
        unit: index of the unit it belongs to.
        engine: weak reference to the engine.
        changed: the unit's generation since which its values are those of now.
        changed_by: the optimizer that made them what they are; None: a load, or somebody by hand.
    """

    region: Region
    writes: bool = True
    flat_start: int
    unit: int
    engine: Callable[[], Any]
    changed: int = 1
    changed_by: Callable[[], object] | None = None
    _shown: Tensor | None = None

    def sliced(self, name: str, local: Tensor | None = None) -> SlicedTensor:
        """Its slice, or other values for the same elements, as part of a whole tensor of that name."""
        return SlicedTensor(self.piece(name, self.local if local is None else local), writes=self.writes)

    def piece(self, name: str, local: Tensor) -> Piece:
        """Values for the elements of its slice, as those of a whole tensor of that name."""
        return Piece(name=name, shape=self.region.shape, start=self.flat_start, local=local, within=self.region)

    # Autograd never writes it, so it need not be where C++ would look for it, behind a detour.
    @property
    def grad(self) -> Tensor | None:
        """The slice of the reduced gradient; None before the last micro-batch's backward."""
        return self._shown

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, ShardedGrad):
            local = self.local
            if (value.shape, value.device) != (local.shape, local.device):
                raise OptimizerError(
                    f"the gradient of {self.full_name} must be of this rank's slice, {tuple(local.shape)} on "
                    f"{local.device}; got {tuple(value.shape)} on {value.device}"
                )
            value = _slice_like(self, value)
        dropped = value is None and self._shown is not None
        self._shown = value
        if dropped and (engine := self.engine()) is not None:
            engine.changes.dropped(self)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class ShardedGrad(_Slice):
    """The reduced gradient of one parameter's slice, or what was computed of it element by element."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as what it is: this rank's values.
        return self.local.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it so


def make_slice(kind: type[_Slice], local: Tensor, requires_grad: bool, **attributes: Any) -> Any:
    """A slice over the memory of `local`, a 1-D tensor."""
    self = torch.Tensor._make_subclass(kind, local, requires_grad)
    self.zeroed = False
    for name, value in attributes.items():
        setattr(self, name, value)
    return self


def _plain(result: Any) -> Any:
    return result.as_subclass(torch.Tensor) if type(result) is ShardedParameter else result


def _of_slice(name: str, result: Any, args: Any, kwargs: Any) -> Any:
    """What an elementwise function has made of slices is a slice too, of a tensor of the same shape."""
    if name.startswith("_foreach_") and isinstance(result, list | tuple):
        lists = [arg for arg in [*args, *kwargs.values()] if isinstance(arg, list | tuple)]
        name = name.removeprefix("_foreach_")
        return [_of_slice(name, one, [arg[i] for arg in lists if i < len(arg)], {}) for i, one in enumerate(result)]
    owner = _first_slice(args, kwargs)
    if owner is None or result is NotImplemented:
        return result
    if not isinstance(result, torch.Tensor) or result.shape != owner.local.shape:
        raise _refusal(name, [owner])
    # What autograd has made stays as it is: `_watch_gradient` looks at gradients that arrive there.
    return result if result.grad_fn is not None else _slice_like(owner, result)


def _slice_like(like: _Slice, local: Tensor) -> ShardedGrad:
    """Values for the elements of another slice."""
    common = {name: getattr(like, name) for name in ("full_name", "global_shape", "spans", "agree_max")}
    made: ShardedGrad = make_slice(ShardedGrad, local, False, **common)
    return made


def leave_memory(grad: ShardedGrad) -> ShardedGrad:
    """Gives `grad` a copy of its values; returns another one over the memory that it had."""
    local = grad.local
    with torch._C.DisableTorchFunctionSubclass():
        grad.data = local.clone()
    return _slice_like(grad, local)


def return_memory(grad: ShardedGrad, own: ShardedGrad) -> ShardedGrad:
    """Gives `grad`, which whoever held it before still holds, the memory of `own`."""
    with torch._C.DisableTorchFunctionSubclass():
        grad.data = own.local
    return grad


def _watch_gradient(name: str, args: Any, kwargs: Any, result: Any) -> None:
    """A gradient that arrives at `result` would go on to a slice, where no optimizer looks for it: raises then."""
    tensors = [tensor for tensor in _flat([result]) if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None]
    owners = (arg for arg in _flat([args, [*kwargs.values()]]) if isinstance(arg, ShardedParameter))
    owner = next((owner.full_name for owner in owners if owner.requires_grad), None) if tensors else None
    if owner is None:
        return

    def arrived(_: Tensor) -> None:
        raise _no_gradient(name, owner)

    for tensor in tensors:
        tensor.register_hook(arrived)  # type: ignore[no-untyped-call]  # torch leaves it so


def _no_gradient(name: str, owner: str) -> ModelError:
    return ModelError(
        f"{name} of {owner} is differentiated, but outside the forward of its unit a parameter is this rank's slice of "
        f"it and gets no gradient: compute it under torch.no_grad(), or inside that forward; for a penalty on weights "
        f"use the optimizer's weight_decay"
    )


def _running_engine(func: Any, args: Any, kwargs: Any) -> Any:
    """Of the first parameter among the arguments, if its model computes now."""
    for arg in _flat([args, [*kwargs.values()]]):
        if type(arg) is ShardedParameter:
            engine = arg.engine()
            if engine is None or engine.runs():
                return engine
            return engine if _needs_whole(arg, func, args, kwargs) and engine.runs_a_method() else None
    return None


def _needs_whole(param: ShardedParameter, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether `func` computes, and not element by element of slices outside of autograd."""
    act, name = _ALLOWED.get(func), _name_of(func)
    if act is not _compute:
        return act is None and (name.endswith("__") or not name.endswith("_"))
    plain = [arg.shape for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor) and arg.ndim]
    beside = any(shape not in (param.global_shape, param.local.shape) for shape in plain)
    return beside or not param.global_shape or (torch.is_grad_enabled() and param.requires_grad)


def _refusal(func: Any, args: Any, kwargs: Any = MappingProxyType({})) -> OptimizerError:
    owner = _first_slice(args, kwargs)
    label = f"{owner.full_name} {tuple(owner.global_shape)}" if owner is not None else "a sharded parameter"
    name = func if isinstance(func, str) else _name_of(func)
    return OptimizerError(
        f"{name} needs all of {label}, or is not known to do without; each rank holds a slice of it, so the "
        f"result could differ on every rank: use zm.full_state_dict(model) for whole tensors, `.local` for this rank's "
        f"slice, or an elementwise function or optimizer; to compute with it, call the model"
    )


def _name_of(func: Any) -> str:
    name: str = func.__name__
    return func.__self__.__name__ if name in ("__get__", "__set__") else name


def _first_slice(args: Any, kwargs: Any) -> _Slice | None:
    return next((arg for arg in _flat([args, [*kwargs.values()]]) if isinstance(arg, _Slice)), None)


def _flat(args: Any) -> Any:
    for arg in args:
        if isinstance(arg, list | tuple):
            yield from _flat(arg)
        else:
            yield arg


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.__name__
    tensors = args[0] if name == "_foreach_norm" else [args[0]]
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    slices = [tensor for tensor in tensors if isinstance(tensor, _Slice)]
    if kwargs.get("dim") is not None or len(args) > 2 or len(slices) != len(tensors):
        raise _refusal(f"{name} over a dimension, or of sharded and plain tensors together,", args)
    frobenius, matrices = order in (None, "fro"), any(tensor.ndim != 1 for tensor in slices)
    if not frobenius and (isinstance(order, str) or (name == "linalg_norm" and matrices)):
        raise _refusal(f"{name} with ord={order!r}, a norm of matrices,", args)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in slices):
        raise _no_gradient(name, slices[0].full_name)
    spans = [tensor.spans for tensor in slices]
    norms = slice_norms([tensor.local for tensor in slices], spans, 2.0 if frobenius else float(order))
    return norms if name == "_foreach_norm" else norms[0]


# ---- what the list allows, by kind


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    return _plain(func(*args, **kwargs))


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(kwargs.get("out"), _Slice):
        raise _refusal(f"{func.__name__}(out=...)", args, kwargs)
    result = func(*args, **kwargs)
    if torch.is_grad_enabled():
        _watch_gradient(func.__name__, args, kwargs, result)
    return result if kwargs.get("out") is not None else _of_slice(func.__name__, result, args, kwargs)


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    slices = [each for each in (args[0] if type(args[0]) in (list, tuple) else args[:1]) if isinstance(each, _Slice)]
    for each in slices:
        owner = _owner(each)
        if owner is not None and (engine := owner.engine()) is not None:
            engine.changing(owner)
    if func is torch.Tensor.copy_:
        args = (args[0], _part_for(args[0], args[1]), *args[2:])
    result = func(*args, **kwargs)
    if torch.is_grad_enabled():
        _watch_gradient(func.__name__, args, kwargs, result)
    for each in slices:
        each.zeroed = func in allowed.ZEROING
    return result


def _owner(target: _Slice) -> ShardedParameter | None:
    """The parameter whose values `target` shows."""
    return target if type(target) is ShardedParameter else target.owner


def _part_for(target: Any, source: Any) -> Any:
    """This rank's part of what is to be copied, if it is a whole tensor."""
    owner = _owner(target) if isinstance(target, _Slice) else None
    if owner is None or isinstance(source, _Slice) or not isinstance(source, torch.Tensor):
        return source
    if source.shape != owner.global_shape or source.dim() == 0:
        return source
    return part_of(source, owner.full_name, owner.region, owner.flat_start, owner.local.numel())


@torch.no_grad()
def _fill(func: Any, args: Any, kwargs: Any) -> Any:
    return _write(torch.Tensor.fill_, (*args, *kwargs.values()), {})


def _set_by_mask(func: Any, args: Any, kwargs: Any) -> Any:
    """Elements for which a condition on elements holds, as in `sign[sign > 0] = 1`."""
    target, mask, value = args
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or getattr(value, "numel", lambda: 1)() != 1:
        raise _refusal(func, args)
    return _write(func, (target, mask.as_subclass(torch.Tensor), value), {})


def _make(func: Any, args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    if torch.is_grad_enabled():
        _watch_gradient(func.__name__, args, kwargs, result)
    return _show(func, args, kwargs) if result is args[0] else _plain(result)


def _show(func: Any, args: Any, kwargs: Any) -> Any:
    """The same memory, outside of autograd."""
    shown = _slice_like(args[0], args[0].local)
    shown.owner = _owner(args[0])
    return shown


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    """A step is skipped by all ranks or by none: each rank has looked at its slices only."""
    _write(func, args, kwargs)
    for agree in dict.fromkeys(tensor.agree_max for tensor in args[0] if isinstance(tensor, _Slice)):
        agree(args[1])


def _count(func: Any, args: Any, kwargs: Any) -> int:
    return math.prod(args[0].global_shape)


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
    if isinstance(target, _Slice):
        old = target.local
        new = value.local if isinstance(value, _Slice) else value
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
    _read: allowed.PROPERTIES,
    _compute: allowed.OUT_OF_PLACE,
    _write: allowed.IN_PLACE,
    _fill: allowed.FILLS,
    _make: allowed.NEW,
    _norm: allowed.NORMS,
    _unscale: allowed.UNSCALING,
    _count: [torch.numel],
    _set_by_mask: [torch.Tensor.__setitem__],
    _show: [torch.detach, torch.Tensor.detach, torch.Tensor.data.__get__],  # type: ignore[attr-defined]
    _keep_trainable: [torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__],  # type: ignore[attr-defined]
    # `nn.Module.to` asks the first, and would put a plain parameter in the slice's place where the answer is no.
    _keep_memory: [torch._has_compatible_shallow_copy_type, torch.Tensor.data.__set__],  # type: ignore[attr-defined]
    _no_hook: [torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook],
    _no_grad_of: [torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward],
}
_DETACHED = frozenset({torch.detach, torch.Tensor.detach})
_GATHERS = frozenset({None, _compute, _make, _norm})
"""What computes with values, in a forward with those of the whole parameter."""

_ALLOWED = {function: kind for kind, functions in _KINDS.items() for function in functions}
