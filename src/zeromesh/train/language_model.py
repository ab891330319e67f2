"""Builds the Hugging Face causal language model that a configuration describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from zeromesh.errors import ConfigError, nearest
from zeromesh.files import parse_json, read_text
from zeromesh.train.config import ModelConfig


def build_language_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """A causal language model with random weights from torch's generator, on the default device.

    Args:
        config: names a Hugging Face configuration.
        vocab_size: of the tokenizer; the model's may be larger.

    Raises:
        ConfigError: transformers is missing, the configuration is unknown or invalid, or its vocabulary too small.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise ConfigError('model.config needs the transformers library: pip install "zeromesh[hf]"') from error

    description = _description(config.config)
    description.setdefault("vocab_size", vocab_size)
    if description["vocab_size"] < vocab_size:
        raise ConfigError(
            f"model.config.vocab_size must be at least the tokenizer's {vocab_size}; got {description['vocab_size']}."
            " Leave it out to take the tokenizer's"
        )
    hf_config = _hf_config(description, strict=isinstance(config.config, dict))
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(hf_config)
    except Exception as error:  # the same
        raise ConfigError(f"model.config: transformers cannot build this model: {error!r}") from error
    if config.activation_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model


def _description(config: Path | dict[str, Any]) -> dict[str, Any]:
    if isinstance(config, dict):
        return dict(config)
    text = read_text(config, kind="model.config (a Hugging Face config.json)", error=ConfigError)
    description = parse_json(text, where=f"model.config: {config}", error=ConfigError)
    if not isinstance(description, dict):
        raise ConfigError(f"model.config: {config} must hold a JSON object; got {type(description).__name__}")
    return description


def _hf_config(description: dict[str, Any], *, strict: bool) -> Any:
    """The transformers configuration; `strict` refuses keys that it does not have (a table typed by hand)."""
    from transformers import CONFIG_MAPPING, AutoConfig

    fields = dict(description)
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        close = nearest(str(model_type), CONFIG_MAPPING.keys())
        clause = close if close.startswith("did") else 'for example "llama", "qwen2" or "mixtral"'
        raise ConfigError(f"model.config.model_type must be one that transformers knows; got {model_type!r}; {clause}")
    known = set(AutoConfig.for_model(model_type).to_dict())
    unknown = [key for key in fields if key not in known]
    if strict and unknown:
        raise ConfigError(f"unknown key model.config.{unknown[0]} for {model_type}; {nearest(unknown[0], known)}")
    # Beginning and end ids of a published vocabulary mean nothing under another tokenizer, and may lie outside it.
    ids = {key: None for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in known and key not in fields}
    try:
        return AutoConfig.for_model(model_type, **fields, **ids)
    except Exception as error:  # each version and model of transformers has its own classes for a bad value
        raise ConfigError(f"model.config: {error.__cause__ or error}") from error
