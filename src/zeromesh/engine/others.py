"""What else would move, broadcast or reduce parameters, kept off sharded ones.

DistributedDataParallel takes every parameter inside what it wraps, slices of sharded parts too: it would broadcast the
first rank's over all others, and wait for gradients that never come to them. Asked for what it is to leave alone, it
looks at the wrapped module itself, which a part does not know; so it is told as it takes the module in.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from zeromesh.engine.param import ShardedParameter
from zeromesh.errors import ModelError

MERGES = ("merge_and_unload", "merge_adapter", "unmerge_adapter")
"""PEFT's methods that compute whole weights of a model."""


def keep_others_out(model: nn.Module) -> None:
    """Of a model that has just been sharded, and of whatever wraps it later."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # cuDNN's would move the weights out of the memory that is gathered into
            object.__setattr__(module, "flatten_parameters", lambda: None)
        for name in MERGES:
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
    register_module_module_registration_hook(_taken_in)


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
