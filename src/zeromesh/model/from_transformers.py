"""Reads the `config.json` of any model that transformers knows: built without values, and run on fake tensors. Imports
torch and transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeromesh.errors import ModelError, nearest
from zeromesh.model.from_module import from_module
from zeromesh.model.huggingface import Config
from zeromesh.model.spec import ModelSpec


def from_architecture(config: Config, *, name: str, where: str, seq_len: int, dtype: str = "bf16") -> ModelSpec:
    """The model that a config, already read, describes, with the head that it is trained with, where it has one.

    Args:
        config: with `model_type`.
        name: of the model.
        where: opens messages.
        seq_len: tokens in the sequence that it is run on.
        dtype: of compute and activations.

    Raises:
        ModelError: transformers does not know the type, cannot build it, or it does not run on token ids.
    """
    with torch.device("meta"):
        module = _build(dict(config), where)
    try:
        return from_module(module, seq_len=seq_len, dtype=dtype, name=name)
    except ModelError as error:
        raise ModelError(
            f"{where}: {type(module).__name__} has been built, but not read: {error}. Give package.module:function "
            f"that returns the module with inputs that it runs on instead"
        ) from error


def _build(fields: dict[str, Any], where: str) -> nn.Module:
    from transformers import (
        CONFIG_MAPPING,
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
    )

    model_type = fields.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        close = nearest(model_type, CONFIG_MAPPING.keys())
        clause = close if close.startswith("did") else 'for example "llama", "qwen3" or "t5"'
        raise ModelError(f"{where}: model_type must be one that transformers knows, got {model_type!r}; {clause}")
    try:
        config: Any = AutoConfig.for_model(model_type, **fields)
        # An encoder may be made a decoder too, as BERT: a config that does not say its class is of what it is for.
        heads = (AutoModelForSeq2SeqLM, AutoModelForMaskedLM, AutoModelForCausalLM)
        named = next(iter(config.architectures or ()), "")
        suits = [auto for auto in heads if type(config) in auto._model_mapping]
        auto = next((one for one in suits if one._model_mapping[type(config)].__name__ == named), None)
        module: nn.Module = (auto or next(iter(suits), AutoModel)).from_config(config, trust_remote_code=False)
    except Exception as error:  # each version and model of transformers has its own classes for a bad value
        raise ModelError(f"{where}: transformers cannot build model_type {model_type!r}: {error}") from error
    return module
