"""The optimizer's parameters: each original parameter as this rank's slice of the master, under its own name.

[Note: Slices] To C++, a `ShardedParameter` is a plain 1-D tensor, a view of the flat master: plain, foreach and fused
optimizers run on it at full speed. To Python, `shape`, `ndim`, `size()` and `numel()` are the original parameter's,
since people split weight decay by them. Elementwise functions are right on slices. Norms are not, so they are taken
over all ranks; whatever else would mix elements raises, since its result would silently be of one slice. So does what
autograd would differentiate: a unit computes with leaves of its own, and a slice gets no gradient from autograd.

What an elementwise function returns of a slice is a slice of a tensor too, and guarded likewise: `p.grad / 2` may be
the gradient from then on, and `p.grad.isnan().any()` raises rather than let ranks decide differently. Copies and new
tensors (`clone`, `detach`, `to`, `zeros_like`: `_PLAIN`) are this rank's own, as optimizers' states are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import ModelError, OptimizerError

NormOf = Callable[[Sequence[Tensor], float], list[Tensor]]
"""Norms over all ranks of the tensors that the given local slices belong to, one 0-d tensor each."""

AgreeMax = Callable[[Tensor], None]
"""Replaces a tensor by its maximum over all ranks."""

# Functions that only make sense on whole tensors. Elementwise ones are far more numerous and new ones appear with every
# release of torch, so the refused are listed; tests run all of torch.optim's allowed optimizers against this.
_REFUSED = frozenset(
    """
    sum mean prod std var std_mean var_mean max min amax amin aminmax argmax argmin all any median mode quantile
    nanmedian nansum nanmean norm dist cdist matmul mm bmm mv dot vdot addmm addmv addbmm baddbmm addr outer ger
    inner linear conv1d conv2d conv3d embedding einsum tensordot softmax log_softmax logsumexp cumsum cumprod sort
    topk argsort unique view reshape view_as reshape_as transpose permute t unsqueeze squeeze flatten unflatten
    expand expand_as repeat cat stack split chunk tensor_split unbind index_select gather scatter scatter_
    scatter_add_ index_add_ index_copy_ index_fill_ take masked_select nonzero histc bincount trace diag tril triu
    svd qr cholesky matrix_norm cond det inv inverse pinverse cross renorm normalize layer_norm rms_norm group_norm
    batch_norm roll flip rot90 __getitem__ __setitem__ __matmul__ __rmatmul__ tolist item numpy __array__
    mse_loss l1_loss smooth_l1_loss huber_loss cosine_similarity pairwise_distance vecdot linalg_vecdot linalg_matmul
    linalg_matrix_norm kthvalue select narrow index_put index_put_ equal allclose
    count_nonzero normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_
    """.split()  # noqa: SIM905  # a page of quotes and commas is harder to read
)
_PLAIN = frozenset(
    """
    clone detach to as_subclass type float double half bfloat16 cpu cuda contiguous
    zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor
    """.split()  # noqa: SIM905  # likewise
)
_NORMS = frozenset({"vector_norm", "linalg_vector_norm", "linalg_norm", "_foreach_norm"})
_UNSCALE = frozenset({"_amp_foreach_non_finite_check_and_unscale_"})
_ZERO = frozenset({"zero_", "_foreach_zero_"})


class _Slice(torch.Tensor):
    """This rank's slice of a tensor: [Note: Slices]."""

    global_shape: torch.Size
    full_name: str
    norm_of: NormOf
    agree_max: AgreeMax
    zeroed: bool
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
        name = func.__name__
        if func in _GUARDED:
            _GUARDED[func](*args, **(kwargs or {}))
        if name in ("__get__", "__set__"):  # attributes: most calls of a step by far
            with torch._C.DisableTorchFunctionSubclass():
                return _plain(func(*args))
        if func is torch.numel:
            return args[0].numel()
        if name in _REFUSED and not _sets_by_mask(name, args):
            raise _refusal(name, args)
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name in _NORMS:
                return _norm(name, args, kwargs)
            result = func(*args, **kwargs)
            if torch.is_grad_enabled():
                _watch_gradient(name, args, kwargs, result)
            if name in _UNSCALE:
                _agree_on_found_inf(args)
            if name.endswith("_") and (name.startswith("__i") or not name.endswith("__")):
                _note_zeroed(args[0], name in _ZERO)
                return result
            return _plain(result) if name in _PLAIN else _of_slice(name, result, args, kwargs)


class ShardedParameter(_Slice, nn.Parameter):
    """What the optimizer holds of one parameter: this rank's slice of the master. See [Note: Slices].

    Attributes:
        full_name: the parameter's qualified name.
        global_shape: the original parameter's shape.
        flat_start: where the slice starts in the flattened original parameter.
        unit: index of the unit it belongs to.
        engine: weak reference to the engine.
        changed: the unit's generation since which its values are those of now.
    """

    flat_start: int
    unit: int
    engine: Callable[[], Any]
    changed: int = 1
    _shown: Tensor | None = None

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
        self._shown = value

    @grad.deleter
    def grad(self) -> None:
        self._shown = None


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
    """What has an element for each of a slice's is a slice too, of a tensor of the same shape; what has not, raises."""
    if name.startswith("_foreach_") and isinstance(result, list | tuple):
        lists = [arg for arg in [*args, *kwargs.values()] if isinstance(arg, list | tuple)]
        name = name.removeprefix("_foreach_")
        return [_of_slice(name, one, [arg[i] for arg in lists if i < len(arg)], {}) for i, one in enumerate(result)]
    several = type(result).__module__ == "torch.return_types"
    if not several and (type(result) is not torch.Tensor or kwargs.get("out") is not None):
        return result
    owner = next((arg for arg in _flat([args, [*kwargs.values()]]) if isinstance(arg, _Slice)), None)
    if owner is None:
        return result
    if several or result.shape != owner.local.shape:
        raise _refusal(name, [owner])
    # What autograd has made stays as it is: `_watch_gradient` looks at gradients that arrive there.
    return result if result.grad_fn is not None else _slice_like(owner, result)


def _slice_like(owner: _Slice, local: Tensor) -> ShardedGrad:
    """Values for the elements of the owner's slice."""
    common = {name: getattr(owner, name) for name in ("full_name", "global_shape", "norm_of", "agree_max")}
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


def _refusal(name: str, args: Any) -> OptimizerError:
    owner = next((arg for arg in _flat(args) if isinstance(arg, _Slice)), None)
    label = f"{owner.full_name} {tuple(owner.global_shape)}" if owner is not None else "a sharded parameter"
    return OptimizerError(
        f"{name} needs all of {label}, but each rank holds a slice of it, so the result would differ on every rank; "
        f"use zm.full_state_dict(model) for whole tensors, `.local` for this rank's slice, or an elementwise optimizer"
    )


def _sets_by_mask(name: str, args: Any) -> bool:
    """Whether elements are set where a condition on elements holds, as `sign[sign > 0] = 1` does."""
    return name == "__setitem__" and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool


def _flat(args: Any) -> Any:
    for arg in args:
        if isinstance(arg, list | tuple):
            yield from _flat(arg)
        else:
            yield arg


def _norm(name: str, args: Any, kwargs: Any) -> Any:
    tensors = args[0] if name == "_foreach_norm" else [args[0]]
    order = args[1] if len(args) > 1 else kwargs.get("ord")
    slices = [tensor for tensor in tensors if isinstance(tensor, _Slice)]
    if kwargs.get("dim") is not None or len(args) > 2 or len(slices) != len(tensors):
        raise _refusal(f"{name} over a dimension, or of sharded and plain tensors together,", args)
    if name == "linalg_norm" and order is not None and any(tensor.ndim != 1 for tensor in slices):
        raise _refusal(f"linalg.norm with ord={order!r}, a norm of matrices,", args)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in slices):
        raise _no_gradient(name, slices[0].full_name)
    of_model: dict[NormOf, list[int]] = defaultdict(list)  # one function for each model: layouts differ
    for index, tensor in enumerate(slices):
        of_model[tensor.norm_of].append(index)
    norms: dict[int, Tensor] = {}
    for norm_of, own in of_model.items():
        norms |= zip(
            own, norm_of([slices[index].local for index in own], 2.0 if order is None else float(order)), strict=True
        )
    return [norms[index] for index in range(len(slices))] if name == "_foreach_norm" else norms[0]


def _agree_on_found_inf(args: Any) -> None:
    """A step is skipped by all ranks or by none: each rank has looked at its slices only."""
    for agree in dict.fromkeys(tensor.agree_max for tensor in args[0] if isinstance(tensor, _Slice)):
        agree(args[1])


def _note_zeroed(target: Any, zeroed: bool) -> None:
    for tensor in target if isinstance(target, list | tuple) else (target,):
        if isinstance(tensor, _Slice):
            tensor.zeroed = zeroed


def _keep_trainable(target: Any, value: bool = True) -> None:
    """Whether a parameter is trained decided its buffers and its place in them."""
    if isinstance(target, ShardedParameter) and bool(value) != target.requires_grad:
        was, now = ("trainable", "freeze") if target.requires_grad else ("frozen", "unfreeze")
        raise ModelError(f"{target.full_name} was {was} when zm.shard was called: {now} it before zm.shard")


def _keep_memory(target: Any, value: Tensor) -> None:
    """A slice is a view of the master: other memory would not be gathered."""
    if not isinstance(target, _Slice):
        return
    old = target.local
    new = value.local if isinstance(value, _Slice) else value
    if (old.dtype, old.device, old.data_ptr(), old.shape) != (new.dtype, new.device, new.data_ptr(), new.shape):
        raise ModelError(
            f"{target.full_name} is a view of this rank's shard ({old.dtype} on {old.device}), so it can be neither "
            f"moved nor cast (to {new.dtype} on {new.device}) nor replaced: move and cast the model before zm.shard, "
            f"choose dtypes by param_dtype= and master_dtype=, and write values by `.local.copy_` and zm.refresh(model)"
        )


def _no_hook(target: Any, hook: Any) -> None:
    if isinstance(target, ShardedParameter):
        raise ModelError(
            f"a hook on {target.full_name} would never be called: autograd computes gradients for copies of "
            f"parameters, and they are reduced later. Change `.grad` after the last backward, before the step"
        )


def _no_grad_of(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
    owner = next((arg for arg in _flat([inputs]) if isinstance(arg, ShardedParameter)), None)
    if owner is not None:
        raise ModelError(
            f"torch.autograd.grad with respect to {owner.full_name}: autograd knows copies of sharded parameters only, "
            f"and gradients are reduced in backward: call loss.backward() and read `.grad`"
        )


def _no_view(target: Any, *_: Any) -> None:
    raise _refusal("a transposed view", [target])


# By torch's function, since most attributes are set all the time and these never.
_GUARDED: dict[Any, Callable[..., None]] = {
    torch.Tensor.requires_grad.__set__: _keep_trainable,  # type: ignore[attr-defined]  # a getset_descriptor
    torch.Tensor.requires_grad_: _keep_trainable,
    torch.Tensor.data.__set__: _keep_memory,  # type: ignore[attr-defined]  # a getset_descriptor
    # `nn.Module.to` asks this, and would put a plain parameter in the slice's place where the answer is no.
    torch._has_compatible_shallow_copy_type: _keep_memory,
    torch.Tensor.register_hook: _no_hook,
    torch.Tensor.register_post_accumulate_grad_hook: _no_hook,
    torch.autograd.grad: _no_grad_of,
    **{getattr(torch.Tensor, name).__get__: _no_view for name in ("T", "mT", "H", "mH")},
}
