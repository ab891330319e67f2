"""Saves and generates with sharded models of transformers and PEFT, on all ranks together."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from zeromesh.checkpoint.full_state import full_state_dict
from zeromesh.engine.api import engine_of
from zeromesh.engine.steps import register_forward_method
from zeromesh.engine.units import DTYPES
from zeromesh.errors import InputError
from zeromesh.integrations.huggingface import save_safetensors, written_dtype
from zeromesh.integrations.published import places_of, shown_as, stands_of
from zeromesh.integrations.saved import is_peft
from zeromesh.integrations.versions import changed
from zeromesh.modules import find_blocks, give_method
from zeromesh.sharding.value import Sharding


def with_blocks_only(sharding: Sharding, model: nn.Module) -> Sharding:
    """Adapts `sharding` to a model whose forward was replaced, for example by TRL's fused heads.

    Such a forward uses the head's or the embedding's weight in its own autograd functions, without calling the module,
    so no hook runs. These modules therefore stay in the root unit, which is gathered while the forward runs.
    """
    replaced = any(isinstance(part, PreTrainedModel) and "forward" in vars(part) for part in model.modules())
    if not replaced or sharding.units is not None or sharding.strategy == "auto":
        return sharding
    blocks = dict.fromkeys(type(block) for block in find_blocks(model))
    return replace(sharding, units=tuple(blocks)) if blocks else sharding


def adapt(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Gives a model that has just been sharded its `save_pretrained` and `generate`. Its files are in `dtype`; None:
    the dtypes in which parameters compute."""
    if is_peft(model):
        give_method(model, "save_pretrained", functools.partial(_save_adapters, dtype=dtype))
        _keep_trainable(model)
        register_forward_method(model, "get_prompt")  # virtual tokens: `generate` computes them before any forward
    elif isinstance(model, PreTrainedModel):
        give_method(model, "save_pretrained", functools.partial(_save_pretrained, dtype=dtype))
    for part in model.modules() if engine_of(model).schedule.shards_params else ():
        if isinstance(part, GenerationMixin):
            give_method(part, "generate", _generate)


def _keep_trainable(model: nn.Module) -> None:
    """Makes `disable_adapter()` only skip the adapters. PEFT would also freeze them meanwhile, but a sharded model
    cannot change which parameters are trained."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for part in model.modules():
        if isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper):
            give_method(part, "enable_adapters", _enable_adapters)


def _enable_adapters(layer: Any, enabled: bool) -> None:
    layer._disable_adapters = not enabled
    if layer.disable_adapters == enabled:  # `disable_adapters` is the public name of the same value
        raise changed("peft", f"{type(layer).__name__}.disable_adapters does not read _disable_adapters")


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `generate` of a model whose parameters are sharded. Each token gathers them, so a rank whose sequences are
    complete continues until those of all ranks are."""
    return type(model).generate(model, *args, **(kwargs | {"synced_gpus": True}))


def _save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    *,
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    max_file_bytes: int = 5_000_000_000,
    save_original_format: bool = True,
    dtype: torch.dtype | None,
    **options: Any,
) -> None:
    """Replaces transformers' `save_pretrained`: all ranks call it, and each writes its slices."""
    if state_dict is not None:  # whole tensors that the caller has gathered
        if state_dict:  # else this rank has nothing to write; transformers would write an empty file
            options |= {"is_main_process": is_main_process, "save_original_format": save_original_format}
            type(model).save_pretrained(model, save_directory, state_dict=state_dict, **options)
        return
    if options:
        raise InputError(
            f"save_pretrained of a sharded model takes the directory, is_main_process, max_file_bytes and "
            f"save_original_format; got {', '.join(options)}: gather it with zm.full_state_dict(model), and give that "
            f"as state_dict=..."
        )
    model.config.architectures = [type(model).__name__]
    if dtype is not None:
        model.config.dtype = str(dtype).removeprefix("torch.")
    save_safetensors(
        model,
        save_directory,
        dtype=dtype,
        max_file_bytes=max_file_bytes,
        save_original_format=save_original_format,
    )
    if is_main_process and model.can_generate():
        model.generation_config.save_pretrained(save_directory)


def _save_adapters(
    model: Any,
    save_directory: str | os.PathLike[str],
    *,
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None,
    **options: Any,
) -> None:
    """Replaces PEFT's `save_pretrained`: all ranks call it. Only tensors that PEFT saves are gathered."""
    if state_dict is None:
        kinds = {name: DTYPES[buffer.spec.param_dtype] for name, buffer, _ in places_of(model)}
        whole = full_state_dict(model, names=_asked_for(model, options))
        state_dict = {
            name: value.to(written_dtype(dtype, kinds.get(name, value.dtype)))
            for name, value in whole.items()
            if isinstance(value, torch.Tensor)
        }
    if is_main_process and state_dict:  # else this rank has nothing to write
        with shown_as(model, state_dict):
            type(model).save_pretrained(model, save_directory, state_dict=state_dict, **options)


class _Used(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it so
    """Notes the ids of the meta tensors that are read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {id(arg) for arg in tree_leaves((args, kwargs))}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            kwargs = (kwargs or {}) | {"device": "meta"}
        return func(*args, **(kwargs or {}))


def _asked_for(model: Any, options: Mapping[str, Any]) -> frozenset[str]:
    """The names of the tensors that PEFT saves, and of those from which it computes them (virtual tokens, for example).
    PEFT's own code is run on meta tensors."""
    from peft import get_peft_model_state_dict

    stands = stands_of(model)
    adapters: Iterable[str] = options.get("selected_adapters") or model.peft_config
    try:
        with shown_as(model, stands), _Used() as used:
            for adapter in adapters:
                found = get_peft_model_state_dict(
                    model,
                    state_dict=dict(stands),
                    adapter_name=adapter,
                    save_embedding_layers=options.get("save_embedding_layers", "auto"),
                )
                used.seen |= set(map(id, found.values()))
    except RuntimeError:  # PEFT needs values, so any tensor may be asked for
        return frozenset(stands)
    return frozenset(name for name, stand in stands.items() if id(stand) in used.seen)
