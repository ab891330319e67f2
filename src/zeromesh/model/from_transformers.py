"""Reads the `config.json` of any model that transformers knows: builds it without values, and runs it on fake tensors.
Imports torch and transformers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from zeromesh.errors import ModelError, nearest
from zeromesh.model.from_module import from_module, required
from zeromesh.model.spec import ModelSpec

HEADS = (AutoModelForSeq2SeqLM, AutoModelForMaskedLM, AutoModelForCausalLM)


def from_architecture(
    config: Mapping[str, Any], *, name: str, where: str, seq_len: int | None, dtype: str = "bf16"
) -> ModelSpec:
    """Describes the model of a config that has been read and has a `model_type`, with its training head, if there is
    one. It is run on a sequence of `seq_len` tokens; `where` begins messages. Raises ModelError if transformers does
    not know the type or cannot build it, or if the model does not run on token ids."""
    with torch.device("meta"):
        module = _build(dict(config), where)
    try:
        most = _positions(module)
        length = required(seq_len)
        model = from_module(module, seq_len=min(length, most or length), dtype=dtype, name=name)
        return replace(model, max_seq_len=most)
    except ModelError as error:
        raise ModelError(
            f"{where}: {type(module).__name__} has been built, but not read: {error}; or give the config's keys "
            f"or the --seq-len that it asks for. Beside ids it takes {', '.join(_others(module))}"
        ) from error


def _positions(module: nn.Module) -> int | None:
    """The number of rows in the module's position table; None if it has none, as with rotary positions.

    A table is an embedding with as many rows as the config has positions, or a few reserved rows more. On fake tensors
    a lookup beyond its end would not fail.
    """
    keys = ("max_target_positions", "max_position_embeddings", "n_positions")
    most = next((n for n in (getattr(module.config, key, None) for key in keys) if isinstance(n, int)), 0)
    tables = [m for name, m in module.named_modules() if isinstance(m, nn.Embedding) and re.search("pos|wpe", name)]
    known = [table for table in tables if 0 <= table.num_embeddings - most <= 8]
    before = [one.padding_idx + 1 if one.padding_idx is not None and one.padding_idx < 8 else 0 for one in known]
    return min((min(most, one.num_embeddings - n) for one, n in zip(known, before, strict=True)), default=None)


def _others(module: nn.Module) -> list[str]:
    """The names of the tensors that a model takes besides ids and labels."""
    taken = inspect.signature(module.forward).parameters.values()
    named = [one.name for one in taken if "Tensor" in str(one.annotation)]
    return [name for name in named if name not in ("input_ids", "decoder_input_ids", "labels")] or ["nothing"]


def _build(fields: dict[str, Any], where: str) -> nn.Module:
    model_type = fields.pop("model_type")
    if model_type not in CONFIG_MAPPING and "auto_map" in fields:
        raise ModelError(
            f"{where}: model_type {model_type!r} is remote code ({fields['auto_map']}), which is not run from here; "
            "give package.module:function that returns the module"
        )
    if model_type not in CONFIG_MAPPING:
        close = nearest(model_type, CONFIG_MAPPING.keys())
        clause = close if close.startswith("did") else 'for example "llama", "qwen3" or "t5"'
        raise ModelError(f"{where}: model_type must be one that transformers knows, got {model_type!r}; {clause}")
    try:
        config: Any = AutoConfig.for_model(model_type, **fields)
        module: Any = trained_as(config).from_config(config, trust_remote_code=False)
    except Exception as error:  # each version and model of transformers raises its own classes for a bad value
        raise ModelError(
            f"{where}: transformers {transformers.__version__} cannot build model_type {model_type!r} from these "
            f"{len(fields)} keys and its own defaults for the rest: {type(error).__name__}: {str(error).strip()}. Give "
            f"the config.json that a published model has, or package.module:function that returns the module"
        ) from error
    if getattr(module, "loss_type", "") is None:
        module.loss_type = "ForCausalLM"  # the default of transformers, without its warning at each start
    made: nn.Module = module
    return made


def trained_as(config: Any) -> Any:
    """Returns the auto class of transformers that makes a config's model with its training head.

    Some encoders, such as BERT, can also be decoders. If the config names no class, the first of `HEADS` that suits is
    taken.
    """
    named = next(iter(config.architectures or ()), "")
    suits = [auto for auto in HEADS if type(config) in auto._model_mapping]
    auto = next((one for one in suits if one._model_mapping[type(config)].__name__ == named), None)
    return auto or next(iter(suits), AutoModel)
