"""Which parameters can be sharded: each unit computes with plain tensors, views of one flat buffer, whose gradients are
reduced later.

DistributedDataParallel is kept off sharded parameters. It takes every parameter inside the module that it wraps, slices
of sharded parts too: it would broadcast the first rank's over all others, and wait for gradients that never come. It
looks for parameters to ignore on the wrapped module only, which a sharded part does not know. So the list is set on
that module at the moment when it is wrapped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache, partial
from itertools import combinations, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from zeromesh.engine.calls import as_python
from zeromesh.engine.leaf import local_of
from zeromesh.engine.param import ShardedParameter
from zeromesh.errors import ModelError
from zeromesh.modules import Lazy, is_sharded

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}


def require_unwrapped(model: nn.Module) -> None:
    """Raises ModelError where torch reduces or shards already: its parameters would be gone."""
    for name, part in model.named_modules():
        for kind in type(part).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                raise ModelError(
                    f"{name or 'the model'} is in torch's {kind.__name__} already, which would go on with parameters "
                    f"that are gone: give zm.shard the plain model, before any other wrapper or fully_shard"
                )


def can_shard(owner: nn.Module, param: nn.Parameter, name: str) -> bool:
    """Whether the parameter is sharded; frozen ones of dtypes that no checkpoint holds stay as they are.

    Raises:
        ModelError: its class, or something attached to it, would be lost; or another sharded model has it.
    """
    retired = getattr(param, "_zeromesh_retired", None)
    if retired is not None:
        raise ModelError(
            f"{name} is a parameter of another model too, {retired!r}, which is sharded already: each would train its "
            f"own. Shard both as one model; of a pipeline's stages, keep what is tied in one stage, or untie it"
        )
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ModelError(
            f"{name} has hooks for its gradient, which would never be called: a sharded parameter's gradient comes in "
            f"parts, reduced later. Remove them and change `.grad` after the last backward, before the step"
        )
    if any(kind.__module__.partition(".")[0] == "bitsandbytes" for kind in type(param).__mro__):
        raise ModelError(
            f"{name} is a {type(param).__name__} of bitsandbytes, which keeps scales and layout beside its values, "
            f"where neither sharding nor a checkpoint finds them. Load the base without quantization_config, in bf16, "
            f"and freeze it; or hold quantised values and scales in plain frozen parameters: both are sharded so"
        )
    if param.requires_grad and not is_sharded(param):
        raise ModelError(
            f"{name} has dtype {param.dtype}; parameters that are trained must be fp64, fp32, bf16 or fp16. "
            f"Convert it, or freeze it (requires_grad=False)"
        )
    if not is_sharded(param):
        return False
    _require_plain(param, name)
    # Rows that each forward would change in a gathered copy, and the master never see.
    if param.requires_grad and isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.max_norm is not None:
        raise ModelError(
            f"{name} is renormalised in place by each forward ({type(owner).__name__} with max_norm={owner.max_norm}), "
            f"on the rows that a rank looks up: ranks would hold different rows. Drop max_norm, or freeze the weight"
        )
    return True


def _require_plain(param: nn.Parameter, name: str) -> None:
    kind: type[Tensor] = type(param)
    if isinstance(param, nn.UninitializedParameter):
        raise ModelError(
            f"{name} has no shape yet ({kind.__name__}): run the model once on a sample, on every rank, before zm.shard"
        )
    plain = nn.Parameter.__torch_function__, Tensor.__torch_dispatch__
    known = kind is DTensor or issubclass(kind, Lazy)
    if not known and (kind.__torch_function__, kind.__torch_dispatch__) != plain:
        raise ModelError(
            f"{name} is a {kind.__name__}, a subclass of Tensor that computes in its own way, and would be a plain "
            f"{param.dtype} tensor once it is sharded. Leave its module out of what zm.shard is given, or make it a "
            f"plain parameter; a frozen one may hold its values in plain tensors of integers or of fp8"
        )
    own = getattr(param, "grad_dtype", param.dtype) if param.requires_grad else param.dtype
    if own != param.dtype:
        raise ModelError(
            f"{name} has grad_dtype={own}, which would be lost: gradients are computed in the compute dtype, sent in "
            f"reduce_dtype and summed in grad_dtype, for all parameters. Unset it and give zm.shard these options"
        )


def require_apart(params: Mapping[nn.Parameter, str]) -> None:
    """Raises ModelError where two parameters, given with their names, share memory and one of them is trained: they
    would have a master each, and drift apart."""
    by_storage: dict[int, list[nn.Parameter]] = defaultdict(list)
    for param in params:
        if _memory(param).numel():
            by_storage[_memory(param).untyped_storage()._cdata].append(param)
    for sharing in by_storage.values():
        sharing.sort(key=lambda param: _span(_memory(param))[0])
        spans = [_span(_memory(param)) for param in sharing]
        if all(first[1] <= second[0] for first, second in pairwise(spans)):
            continue
        for first, second in combinations(sharing, 2):
            if (first.requires_grad or second.requires_grad) and _overlap(_memory(first), _memory(second)):
                raise ModelError(
                    f"{params[first]} and {params[second]} share memory and are not one parameter, so that each would "
                    f"be trained by itself. Tie them by assigning the parameter itself (one.weight = other.weight), or "
                    f"give one a copy"
                )


def _memory(param: nn.Parameter) -> Tensor:
    return param.meta() if isinstance(param, Lazy) else local_of(param)


def _span(param: Tensor) -> tuple[int, int]:
    """The bytes of its storage that lie between its first and its last element."""
    first = int(param.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    return first * param.itemsize, (last + 1) * param.itemsize


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether a byte of their storage belongs to both; they may be cut out of it like the columns of a matrix."""
    (start, stop), (other_start, other_stop) = _span(first), _span(second)
    if stop <= other_start or other_stop <= start:
        return False
    begin = min(start, other_start)
    mask = torch.zeros(max(stop, other_stop) - begin, dtype=torch.bool, device="cpu")

    def bytes_of(param: Tensor) -> Tensor:
        size, strides = param.itemsize, [stride * param.itemsize for stride in param.stride()]
        return mask.as_strided((*param.shape, size), (*strides, 1), _span(param)[0] - begin)

    bytes_of(first).fill_(True)
    return bool(bytes_of(second).any())


def keep_others_out(model: nn.Module) -> None:
    """Keeps other libraries' wrappers off a model that has just been sharded, now and later."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # cuDNN's would move the weights out of the memory that is gathered into
            object.__setattr__(module, "flatten_parameters", lambda: None)
        for name in ("merge_and_unload", "merge_adapter", "unmerge_adapter"):  # PEFT's, which compute whole weights
            if hasattr(type(module), name):
                object.__setattr__(module, name, partial(_refuse_merge, name))
    # Launchers wrap models in DistributedDataParallel by themselves: it then says that there is nothing to do.
    names = [name for named in (model.named_parameters(), model.named_buffers()) for name, _ in named]
    object.__setattr__(model, "_ddp_params_and_buffers_to_ignore", names)
    _watch_wrappers()


def _refuse_merge(name: str, *_: Any, **__: Any) -> NoReturn:
    raise ModelError(
        f"{name} needs whole weights, and each rank holds slices: save the adapters (save_pretrained of an "
        f"integration's model, or zm.full_state_dict), load them into a model that is not sharded, and merge there"
    )


@cache
def _watch_wrappers() -> None:
    register_module_module_registration_hook(as_python(_taken_in))  # a compiled function may make modules


def _taken_in(wrapper: nn.Module, _: str, module: nn.Module | None) -> None:
    if module is None or not isinstance(wrapper, DistributedDataParallel):
        return
    sharded = {name: param for name, param in module.named_parameters() if isinstance(param, ShardedParameter)}
    if not sharded:
        return
    own = {id(param) for param in sharded.values()}
    # It compares names as f"{module}.{key}" too, so with a dot ahead of those that the wrapped module itself holds, as
    # the list does that torch's composable `replicate` hands it.
    wrapper.parameters_to_ignore |= sharded.keys() | {f".{name}" for name in sharded}
    wrapper._module_parameters = [param for param in wrapper._module_parameters if id(param) not in own]
    for param in sharded.values():
        param._ddp_ignored = True  # type: ignore[attr-defined]  # asked where DDP computes in mixed precision
    if not any(param.requires_grad for param in wrapper._module_parameters):
        raise ModelError(
            "DistributedDataParallel has nothing to do here: all that is trained is sharded by zm.shard, which reduces "
            "gradients itself. Use the model without it"
        )
