"""A model sharded as a library's own wrapper would be, the methods that it has then beside its class's, and optimizers
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
"""Mixed precision by accelerate's names."""


def is_sharded(model: object) -> bool:
    """Whether `zm.shard` has sharded `model`, or a part of it."""
    return isinstance(model, nn.Module) and any(hasattr(module, ENGINE) for module in model.modules())


def with_mixed_precision(sharding: Sharding, name: str | None) -> Sharding:
    """`sharding`, in the dtype that a library is told to compute in, where it says none itself."""
    return replace(sharding, param_dtype=sharding.param_dtype or (name if name in MIXED else None))


def require_plain(model: object) -> None:
    """Raises ModelError of a model that is sharded, or in a wrapper of torch's, already."""
    if is_sharded(model):
        raise ModelError("the model is sharded already: give a plain one, which is sharded as sharding= says")
    if isinstance(model, nn.Module):
        require_unwrapped(model)


def require_sharding(sharding: object) -> None:
    """Raises InputError of another value than the one that says how."""
    if not isinstance(sharding, Sharding):
        raise InputError(f"sharding= takes zm.Sharding(strategy=..., mesh=...); got {sharding!r}")


def refuse(options: Sequence[str], why: str = ELSEWHERE) -> None:
    """Raises InputError if there are options of a library's that do not go with sharding."""
    if options:
        raise InputError(f"{', '.join(options)} cannot be used with sharding=: {why}")


def require_processes(sharding: Sharding, count: int) -> None:
    """Checks the number of processes among which a library splits its data. Raises MeshError if the mesh has another
    number, and InputError if torch's job has: accelerate counts one each where it finds no GPU and was not told to use
    CPUs, and so each would train on all of the data."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if count != world:
        raise InputError(
            f"the job has {world} ranks, and accelerate splits data among {count}: to train on CPUs say so, with "
            f"use_cpu=True in TrainingArguments, Accelerator(cpu=True), or ACCELERATE_USE_CPU=1 in the environment"
        )
    sharding.require_ranks(world)


def shard_model(sharding: Sharding, model: nn.Module) -> Any:
    """Shards `model`, and gives it the methods that libraries call on their wrappers: `no_sync`, and transformers' own.
    Returns the shard that each parameter became; weak in those."""
    before = list(model.named_parameters(remove_duplicate=False))
    own = next((param.dtype for param in model.parameters() if param.dtype in DTYPE_NAMES), None)
    if "transformers" not in sys.modules:  # so it is none of theirs
        sharding.shard(model)
    else:
        from zeromesh.integrations.pretrained import adapt, with_blocks_only

        with_blocks_only(sharding, model).shard(model)
        # Parameters that nobody casts are written as they compute, each in its own dtype.
        adapt(model, own if sharding.param_dtype is not None else None)
    # As DistributedDataParallel's, which libraries call for a micro-batch that is not the step's last.
    give_method(model, "no_sync", partial(accumulate, last=False))
    after = dict(model.named_parameters(remove_duplicate=False))
    shards = WeakIdKeyDictionary()
    for name, param in before:
        shards[param] = after[name]
    return shards


def clip_grads(
    params: Tensor | Iterable[Tensor], most: float, order: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """torch's `clip_grad_norm_`; of just the gradients of a sharded model ours, which makes no pass over those that lie
    in the host's memory."""
    params = [params] if isinstance(params, Tensor) else list(params)
    shown = {param for param in params if param.grad is not None}
    for engine in dict.fromkeys(param.engine() for param in shown if isinstance(param, ShardedParameter)):
        if shown == {param for param in engine.optimizer_params() if param.grad is not None}:
            return clip_grad_norm_(engine.model(), most, order, error_if_nonfinite=error_if_nonfinite)
    return nn.utils.clip_grad_norm_(params, most, order, error_if_nonfinite)


def clip_unscaled(accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
    """`Accelerator.clip_grad_norm_`."""
    accelerator.unscale_gradients()
    return clip_grads(parameters, max_norm, norm_type)


def give_shards(optimizer: Optimizer, shards: MutableMapping[Tensor, Any]) -> None:
    """Puts shards in the place of the parameters that they were made from, by which they are given. Raises
    OptimizerError if the optimizer has stepped already, or mixes the elements of a parameter."""
    # A constructor may make states (Adagrad's), of whole tensors.
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
