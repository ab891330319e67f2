"""`state_dict()` and `load_state_dict()` of a sharded model: slices of whole tensors, under the original names.

torch.distributed.checkpoint saves and loads the result of `state_dict()`, under any layout on the other side::

    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.utils._pytree import tree_leaves, tree_map_only

from zeromesh.engine.control import reduce_over
from zeromesh.engine.elements import require_one_of_a_name
from zeromesh.engine.engine import Engine
from zeromesh.engine.param import ShardedParameter, Slice, loaded_operand, refuse_transforms
from zeromesh.errors import CheckpointError, InputError
from zeromesh.modules import clean_name
from zeromesh.pieces.piece import copy_shared, whole


def install_state_dict(model: nn.Module, engine: Engine) -> None:
    """Registers the hooks; they hold the engine weakly."""
    reference = weakref.ref(engine)

    def shown(_: nn.Module, state: dict[str, Any], prefix: str, __: dict[str, Any]) -> None:
        found = reference()
        if found is not None:
            require_one_of_a_name(found.homes)
            for key in [key for key in state if key.startswith(prefix)]:  # the order is kept
                state[prefix + clean_name(key.removeprefix(prefix))] = state.pop(key)

    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Gives names back the parts that wrappers have added."""
        given = {clean_name(key.removeprefix(prefix)): key for key in state if key.startswith(prefix)}
        for name, part in module.named_modules(remove_duplicate=False) if reference() is not None else ():
            # Not `named_parameters`, which checkpoint wrappers override.
            for key in (*part._parameters, *part._buffers):
                actual = f"{name}.{key}" if name else key
                if clean_name(actual) in given:
                    state[prefix + actual] = state.pop(given[clean_name(actual)])

    for module in model.modules():
        _install_part(module, reference)
    model.register_state_dict_post_hook(shown)  # type: ignore[no-untyped-call]  # torch leaves these so
    model.register_load_state_dict_pre_hook(renamed)  # type: ignore[no-untyped-call]
    _gather_where_torch_does()
    refuse_transforms()


def _install_part(module: nn.Module, reference: weakref.ref[Engine]) -> None:
    """Has a module that owns parameters show slices in its state, also inside a forward, and load slices and whole
    tensors. Torch's own loading finds them in place, and with `assign` puts them where they are."""
    own = {key: param for key, param in module._parameters.items() if isinstance(param, ShardedParameter)}
    if not own:
        return

    def shown(_: nn.Module, state: dict[str, Any], prefix: str, __: dict[str, Any]) -> None:
        found = reference()
        if found is not None:
            found.at_rest()
            for key, param in own.items():
                if prefix + key in state:
                    state[prefix + key] = param.shown()

    def taken(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        found = reference()
        if found is None:
            return
        for key, param in own.items():
            value = state.get(prefix + key)
            if isinstance(value, Tensor) and value.shape == (param.elements.numel,) != param.shape:
                raise CheckpointError(
                    f"load_state_dict of {param.elements} was given this rank's part alone, as `.local` is: "
                    f"give it slices, as state_dict() has them, or whole tensors"
                )
            if isinstance(value, Tensor) and value.shape == param.shape and value is not param:
                given = loaded_operand(param.elements, value, "load_state_dict")
                found.changing(param)
                if given.data_ptr() != param.local.data_ptr():
                    param.local.copy_(given)
                state[prefix + key] = param

    module.register_state_dict_post_hook(shown)  # type: ignore[no-untyped-call]  # torch leaves these so
    module.register_load_state_dict_pre_hook(taken)  # type: ignore[no-untyped-call]


def whole_state(state: Any, engine: Engine | None = None, *, everywhere: bool = False) -> Any:
    """A state with whole tensors in the place of its slices: a state dict of a sharded model, a moving average.

    All ranks call it, with the same names.

    Args:
        state: dicts, lists and tuples of slices and of anything else.
        engine: whose ranks have the slices; None for all ranks of the job.
        everywhere: on all ranks, where the slices are; else on the CPU of the job's first rank, and None on the others.
    """
    control = None if engine is None else engine.control
    groups = [dist.group.WORLD] if control is None else [control.group, *control.beyond]

    def gathered(sliced: Slice) -> Tensor | None:
        own = sliced.piece()
        values = torch.zeros(sliced.shape, dtype=own.local.dtype, device=own.local.device)
        copy_shared(own, whole(own.name, values))
        for group in groups if dist.is_initialized() and values.numel() else ():
            # Elements on several ranks are bit-equal there: a maximum of bytes is their union.
            reduce_over(group, values.view(-1).view(torch.uint8), dist.ReduceOp.MAX)
        return values if everywhere else values.cpu() if not dist.is_initialized() or dist.get_rank() == 0 else None

    return tree_map_only(Slice, gathered, state)


def sliced_like(current: Any, state: Any) -> Any:
    """`state`, with a slice in the place of each whole tensor where `current`, which is built alike, has a slice."""
    if isinstance(current, Slice) and isinstance(state, Tensor):
        return torch.zeros_like(current).copy_(state)
    if isinstance(current, Mapping) and isinstance(state, Mapping):
        return {key: sliced_like(current.get(key), value) for key, value in state.items()}
    if isinstance(current, list | tuple) and isinstance(state, list | tuple) and len(current) == len(state):
        return type(state)(map(sliced_like, current, state))
    return state


@cache
def _gather_where_torch_does() -> None:
    """`get_model_state_dict` and its like, which gather DTensors alone, get whole tensors for a full state dict."""
    own = torch_state_dict._maybe_full_or_cpu_state_dict

    def gathered(state_dict: dict[str, Any], info: Any) -> dict[str, Any]:
        params = (param for param in info.fqn_param_mapping if isinstance(param, ShardedParameter))
        engine = next((param.engine() for param in params), None)
        if engine is not None and info.full_state_dict:
            names = [each.full_name for each in tree_leaves(state_dict) if isinstance(each, Slice)]
            if any(other != names for other in engine.control.gather(names)):
                raise InputError(
                    "full_state_dict=True gathers tensors of which every rank has a slice, and an optimizer of "
                    "zm.by_owner has whole states on some ranks: save it with zm.Checkpoints, or leave full_state_dict "
                    "out and save with torch.distributed.checkpoint; zm.full_state_dict(model) gathers the model"
                )
            state_dict = whole_state(state_dict, engine, everywhere=not info.cpu_offload)
        return own(state_dict, info)

    torch_state_dict._maybe_full_or_cpu_state_dict = gathered
