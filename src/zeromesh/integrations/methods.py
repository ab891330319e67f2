"""Helpers for libraries' wrappers: sharding a model, adding methods that the library calls, and updating optimizers
that were made before."""

from __future__ import annotations

import sys
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from zeromesh.engine.api import ENGINE
from zeromesh.engine.optim import check_optimizer
from zeromesh.engine.param import ShardedParameter
from zeromesh.engine.shardable import require_unwrapped
from zeromesh.engine.steps import accumulate, clip_grad_norm_
from zeromesh.errors import InputError, ModelError, OptimizerError
from zeromesh.modules import DTYPE_NAMES, give_method
from zeromesh.sharding.value import Sharding

ELSEWHERE = "zeromesh shards the model itself; leave it out (also in what `accelerate config` wrote)"
UNEVEN = "all ranks must run as many forwards, or those that have more wait for ever"

MIXED = ("bf16", "fp16")
"""Mixed precision by accelerate's names that `param_dtype` takes."""


def is_sharded(model: object) -> bool:
    """Whether `zm.shard` has sharded `model`, or a part of it."""
    return isinstance(model, nn.Module) and any(hasattr(module, ENGINE) for module in model.modules())


def with_mixed_precision(sharding: Sharding, name: str | None) -> Sharding:
    """Returns `sharding` with the dtype that a library computes in, unless it has a `param_dtype` of its own."""
    return replace(sharding, param_dtype=sharding.param_dtype or (name if name in MIXED else None))


def require_plain(model: object) -> None:
    """Raises ModelError if the model is sharded already, or in one of torch's wrappers."""
    if is_sharded(model):
        raise ModelError("the model is sharded already: give a plain one, which is sharded as sharding= says")
    if isinstance(model, nn.Module):
        require_unwrapped(model)


def require_sharding(sharding: object) -> None:
    """Raises InputError if `sharding` is not a `zm.Sharding`."""
    if not isinstance(sharding, Sharding):
        raise InputError(f"sharding= takes zm.Sharding(strategy=..., mesh=...); got {sharding!r}")


def refuse(options: Sequence[str], why: str = ELSEWHERE) -> None:
    """Raises InputError if `options`, given to a library, is not empty: they do not go with sharding."""
    if options:
        raise InputError(f"{', '.join(options)} cannot be used with sharding=: {why}")


def require_processes(sharding: Sharding, count: int) -> None:
    """Checks the number of processes among which a library splits its data. Raises MeshError if the mesh has another
    number, and InputError if torch's job has. If accelerate finds no GPU and was not told to use CPUs, each process
    counts as the only one and would train on all of the data."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if count != world:
        raise InputError(
            f"the job has {world} ranks, and accelerate splits data among {count}: to train on CPUs say so, with "
            f"use_cpu=True in TrainingArguments, Accelerator(cpu=True), or ACCELERATE_USE_CPU=1 in the environment"
        )
    sharding.require_ranks(world)


def shard_model(sharding: Sharding, model: nn.Module) -> Any:
    """Shards `model`, and gives it the methods that libraries call on their wrappers: `no_sync`, and those of
    transformers. Returns the shard of each old parameter, with weak keys."""
    before = list(model.named_parameters(remove_duplicate=False))
    own = next((param.dtype for param in model.parameters() if param.dtype in DTYPE_NAMES), None)
    if "transformers" not in sys.modules:  # so it is none of its models
        sharding.shard(model)
    else:
        from zeromesh.integrations.pretrained import adapt, with_blocks_only

        with_blocks_only(sharding, model).shard(model)
        # With no param_dtype, files get the dtype in which each parameter computes.
        adapt(model, own if sharding.param_dtype is not None else None)
    # As in DistributedDataParallel: libraries call it for micro-batches before the step's last.
    give_method(model, "no_sync", partial(accumulate, last=False))
    after = dict(model.named_parameters(remove_duplicate=False))
    shards = WeakIdKeyDictionary()
    for name, param in before:
        shards[param] = after[name]
    return shards


def clip_grads(
    params: Tensor | Iterable[Tensor], most: float, order: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Replaces torch's `clip_grad_norm_`. Calls ours if the gradients are exactly those of one sharded model: it makes
    no extra pass over gradients in the host's memory."""
    params = [params] if isinstance(params, Tensor) else list(params)
    shown = {param for param in params if param.grad is not None}
    for engine in dict.fromkeys(param.engine() for param in shown if isinstance(param, ShardedParameter)):
        if shown == {param for param in engine.optimizer_params() if param.grad is not None}:
            return clip_grad_norm_(engine.model(), most, order, error_if_nonfinite=error_if_nonfinite)
    return nn.utils.clip_grad_norm_(params, most, order, error_if_nonfinite)


def clip_unscaled(accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
    """Replaces `Accelerator.clip_grad_norm_`."""
    accelerator.unscale_gradients()
    return clip_grads(parameters, max_norm, norm_type)


def give_shards(optimizer: Optimizer, shards: MutableMapping[Tensor, Any]) -> None:
    """Replaces an optimizer's parameters by the shards that they became; `shards` has these by parameter. Raises
    OptimizerError if the optimizer has stepped already, or mixes the elements of a parameter."""
    # A constructor may make states of whole tensors (Adagrad's does).
    states = [state for param, state in optimizer.state.items() if param in shards]
    if any(float(state.get("step", 1)) for state in states):
        raise OptimizerError(
            f"{type(optimizer).__name__} has stepped on the model before it was sharded, so its states are of whole "
            f"tensors: prepare model and optimizer before the first step"
        )
    made = optimizer.state_dict() if states else None
    for group in optimizer.param_groups:
        group["params"] = [shards.get(param, param) for param in group["params"]]
    check_optimizer(optimizer)
    if made is not None:
        optimizer.state.clear()
        optimizer.load_state_dict(made)
