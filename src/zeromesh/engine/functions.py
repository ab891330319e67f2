"""Functions of slices that no step of an optimizer needs: [Note: Slices] of `zeromesh.engine.param`, which loads this
when one is called first. Numbers of whole tensors, random ones, elements that an index chooses, and refusals.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from zeromesh.engine import allowed
from zeromesh.engine.elements import Elements
from zeromesh.engine.param import (
    ShardedParameter,
    Slice,
    apart,
    compute_each,
    first_slice,
    local_operand,
    make_like,
    refusal,
    slice_of,
    stepping,
    write_to,
)
from zeromesh.engine.reductions import whole_norms, whole_value
from zeromesh.errors import ModelError, OptimizerError

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


def first_by_position(func: Any, _: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call without any by position, with the first one there."""
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
        raise refusal(func, args, kwargs)
    named = dict(zip(names, args, strict=False)) | {_SAME.get(key, key): value for key, value in kwargs.items()}
    # Not by equality: dimension 0 is equal to False.
    return {k: v for k, v in named.items() if not (v is None or v is False or (isinstance(v, list | tuple) and not v))}


def _fits(value: Any, parameter: tuple[str, bool]) -> bool:
    return isinstance(value, Tensor) == parameter[1] or value is None


def _chosen(elements: Elements, index: Any, call: str) -> Tensor:
    """Which of these elements an index into the whole tensor chooses, as a mask.

    Raises:
        OptimizerError: on every rank, where torch would take no such index.
    """
    given = tuple(each.cpu() if isinstance(each, Tensor) else each for each in ([index], index)[type(index) is tuple])
    masks = (each.dim() if isinstance(each, Tensor) and each.dtype == torch.bool else 1 for each in given)
    # The mask has one element along each dimension that the index does not mention.
    dims = len(elements.shape) if any(each is Ellipsis for each in given) else sum(masks)
    mask = torch.zeros((*elements.shape[:dims], *(1 for _ in elements.shape[dims:])), dtype=torch.bool)
    try:
        mask[given] = True
    except (IndexError, TypeError, RuntimeError) as error:
        raise OptimizerError(f"{call} of {elements} was given {index!r}: {error}") from error
    return elements.part_of(mask, call).expand(elements.numel)


def set_chosen(func: Any, args: Any, kwargs: Any) -> Any:
    """One number for the elements that an index or a mask chooses, as in `grad[:n] = 0` and `sign[sign > 0] = 1`."""
    name, target = func.__name__, args[0]
    if name == "__setitem__":
        _, index, value = args
    else:
        named = _by_name(func, args, kwargs)
        dim, index, value = (named.get(key, 0) for key in ("dim", "index", "value"))
    if stepping() and isinstance(index, Tensor) and index.dtype == torch.bool:
        return write_to(func, args, kwargs)
    one = not isinstance(value, Slice) and (not isinstance(value, Tensor) or value.numel() == 1)
    masks = not isinstance(index, Slice) or index.dtype == torch.bool
    if not one or not masks or not isinstance(target, Slice):
        raise refusal(func, args)
    if name != "__setitem__":
        if not -target.ndim <= dim < target.ndim:
            raise refusal(f"{name} over dimension {dim}", args)
        index = (*(slice(None) for _ in range(dim % target.ndim)), index)
        target = target if name.endswith("_") else make_like(torch.clone, (target,), {})
    if not isinstance(index, Slice):
        index = slice_of(target.elements, _chosen(target.elements, index, name).to(target.device))
    value = value.reshape(()) if isinstance(value, Tensor) else value
    return write_to(torch.Tensor.masked_fill_, (target, index, value), {})


def draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Random numbers for the whole tensor, of which this rank takes its elements: alike on ranks that hold the same."""
    source = args[0]
    whole = func(torch.empty((), dtype=source.dtype, device=source.device).expand(source.shape), *args[1:], **kwargs)
    own = source.elements.part_of(whole, func.__name__).expand(source.elements.numel).clone()
    return own if stepping() else slice_of(source.elements, own)


def reduce(func: Any, args: Any, kwargs: Any) -> Any:
    name, options = func.__name__, _by_name(func, args, kwargs)
    operands = [options.pop(key) for key in ("input", "other", "tensor") if key in options]
    dtype = options.pop("dtype", None)
    further = options.keys() - ({"rtol", "atol", "equal_nan"} if name == "allclose" else set())
    if further or (len(operands) > 1 and dtype is not None):
        raise refusal(f"{name} over a dimension, or into a tensor,", args, kwargs)
    if name in ("max", "min") and len(operands) > 1:
        return compute_each(getattr(torch, f"{name}imum"), operands, {})
    like = first_slice(operands)
    assert like is not None
    if name == "equal" and any(each.shape != like.shape for each in operands):
        return False
    own = [torch.Tensor.as_subclass(local_operand(like, each, name), torch.Tensor) for each in operands]
    own = [each.expand(like.elements.numel) for each in own]
    if any(each.is_complex() for each in own):
        raise refusal(f"{name} of complex numbers", args, kwargs)
    if name.endswith("dot") and any(each.dim() != 1 or each.shape != like.shape for each in operands):
        raise refusal(f"{name} of tensors that are not of one dimension and one length", args, kwargs)
    if name in allowed.NUMBERS:
        return _number(func, like)
    own = own if dtype is None else [each.to(dtype) for each in own]
    like_torch = func(*(torch.ones(1, dtype=each.dtype) for each in own), **options)

    def compute() -> Any:
        found = whole_value(name, like.elements, own, options)
        return found.to(dtype or like_torch.dtype) if isinstance(like_torch, Tensor) else found.item()

    return apart(name, compute, args, kwargs) if isinstance(like_torch, Tensor) else compute()


def _number(func: Any, source: Slice) -> Any:
    """The only element of a tensor, as a number; only some ranks hold it."""
    if source.numel() != 1:
        raise refusal(func, [source])
    found = whole_value("item", source.elements, [source.local], {})
    return func(found.to(source.dtype))


def norm(func: Any, args: Any, kwargs: Any) -> Any:
    name, options = func.__name__, _by_name(func, args, kwargs)
    tensors, dtype = options.pop("input"), options.pop("dtype", None)
    order = options.pop("ord", options.pop("p", None))
    tensors = tensors if name == "_foreach_norm" else [tensors]
    slices = [tensor for tensor in tensors if isinstance(tensor, Slice)]
    if options or len(slices) != len(tensors):
        raise refusal(f"{name} over a dimension, or of sharded and plain tensors together,", args)
    if not all(tensor.is_floating_point() for tensor in slices):  # torch refuses them where a rank has elements
        raise refusal(f"{name} of numbers that are not real", args)
    frobenius, matrices = order in (None, "fro"), any(tensor.ndim != 1 for tensor in slices)
    if not frobenius and (isinstance(order, str) or (name == "linalg_norm" and matrices)):
        raise refusal(f"{name} with ord={order!r}, a norm of matrices,", args)
    local, elements = [tensor.local for tensor in slices], [tensor.elements for tensor in slices]
    power = 2.0 if frobenius else float(order)
    local = local if dtype is None else [each.to(dtype) for each in local]
    norms = apart(name, lambda: whole_norms(name, elements, local, power), args, kwargs)
    return list(norms) if name == "_foreach_norm" else norms[0]


def keep_trainable(func: Any, args: Any, kwargs: Any) -> Any:
    """Whether a parameter is trained decided its buffers and its place in them."""
    target, value = args[0], bool([*args[1:], *kwargs.values(), True][0])
    if isinstance(target, ShardedParameter) and value != target.requires_grad:
        was, now = ("trainable", "freeze") if target.requires_grad else ("frozen", "unfreeze")
        raise ModelError(f"{target.full_name} was {was} when zm.shard was called: {now} it before zm.shard")
    return func(*args, **kwargs)


def keep_memory(func: Any, args: Any, kwargs: Any) -> Any:
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


def no_hook(func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], ShardedParameter):
        raise ModelError(
            f"a hook on {args[0].full_name} would never be called: autograd computes gradients for copies of "
            f"parameters, and they are reduced later. Change `.grad` after the last backward, before the step"
        )
    return func(*args, **kwargs)


def no_grad_of(func: Any, args: Any, kwargs: Any) -> Any:
    owner = first_slice(args, kwargs)
    assert owner is not None
    raise ModelError(
        f"torch.autograd.{func.__name__} with respect to {owner.full_name}: autograd knows copies of sharded "
        f"parameters only, and gradients are reduced in backward: call loss.backward(), without inputs=, and read "
        f"`.grad`"
    )
