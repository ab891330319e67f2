"""Builds the Hugging Face causal language model that a configuration describes."""

from __future__ import annotations

import re
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zeromesh.errors import ConfigError, nearest
from zeromesh.files import parse_json, read_text
from zeromesh.train.config import ModelConfig

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""What `scaled_dot_product_attention` calls; where it is made of matrix products instead, those are not among the
`_PRODUCTS`, which have two dimensions."""


def build_language_model(config: ModelConfig, vocab_size: int, *, values: bool = True) -> nn.Module:
    """The causal language model that a configuration describes, on the default device.

    Its values are random, from torch's generator, or those of `model.pretrained`.

    Args:
        config: names a Hugging Face configuration, or the directory of a model.
        vocab_size: of the tokenizer; the model's may be larger.
        values: those of `model.pretrained` are to be read where it is sharded; else leave what the default device has,
            the meta device say.

    Raises:
        ConfigError: transformers or PEFT is missing, the configuration is unknown or invalid, its vocabulary too small,
            the directory holds no model in safetensors, or no parameter is called as `model.trainable` says.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ConfigError('[model] needs the transformers library: pip install "zeromesh[hf]"') from error

    if config.pretrained is not None:
        model = _pretrained(config.pretrained, vocab_size, values=values)
    else:
        model = _fresh(config.config, vocab_size)
    model = _with_trainable(model, config)
    if config.recomputes:
        options: dict[str, Any] = {"use_reentrant": False}
        if config.activation_checkpointing == "selective":
            options["context_fn"] = _selective
        inner: Any = next(part for part in model.modules() if isinstance(part, transformers.PreTrainedModel))
        inner.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    return model


def require_pretrained(directory: Path | None) -> None:
    """Raises ConfigError for a `model.pretrained` that holds no model."""
    if directory is not None and not any(directory.glob("*.safetensors")):
        found = "has no safetensors file" if directory.is_dir() else "is no directory"
        raise ConfigError(
            f"model.pretrained must be the directory of a Hugging Face model, with config.json and *.safetensors; "
            f"{directory} {found}"
        )


def _fresh(config: Path | dict[str, Any] | None, vocab_size: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    assert config is not None  # validated
    description = _description(config)
    description.setdefault("vocab_size", vocab_size)
    _require_vocabulary(description["vocab_size"], vocab_size, "model.config.vocab_size")
    hf_config = _hf_config(description, strict=isinstance(config, dict))
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(hf_config)
    except Exception as error:  # each version and model of transformers has its own classes for a bad value
        raise ConfigError(f"model.config: transformers cannot build this model: {error!r}") from error
    return model


def _pretrained(directory: Path, vocab_size: int, *, values: bool) -> nn.Module:
    """In the dtype that its configuration names, else fp32, alike on all ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from zeromesh.integrations.loading import from_pretrained

    require_pretrained(directory)
    try:
        hf_config = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
        dtype = hf_config.dtype or torch.float32
        model: nn.Module
        if values:
            model = from_pretrained(AutoModelForCausalLM, directory, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    except Exception as error:
        raise ConfigError(f"model.pretrained: transformers cannot load {directory}: {error}") from error
    text: Any = hf_config.get_text_config()
    _require_vocabulary(text.vocab_size, vocab_size, f"the vocabulary of {directory}")
    return model


def _require_vocabulary(size: int, needed: int, what: str) -> None:
    if size < needed:
        raise ConfigError(
            f"{what} must be at least the tokenizer's {needed}; got {size}. Leave model.config.vocab_size out to take "
            f"the tokenizer's, or set data.tokenizer to the model's own"
        )


def _with_trainable(model: nn.Module, config: ModelConfig) -> nn.Module:
    if config.lora_rank:
        return _with_adapters(model, config.lora_rank)
    if isinstance(config.trainable, tuple):
        names = [name for name, _ in model.named_parameters()]
        for pattern in config.trainable:
            if not any(fnmatch(name, pattern) for name in names):
                kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
                raise ConfigError(
                    f"model.trainable: no parameter is called {pattern!r}; {nearest(pattern, kinds)} (* stands for any "
                    f"part of a name)"
                )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(fnmatch(name, pattern) for pattern in config.trainable))
    return model


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ConfigError(
            'model.trainable = "lora:RANK" needs the PEFT library: pip install "zeromesh[peft]"'
        ) from error
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # PEFT reads a property by the name that it had before
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        found: nn.Module = get_peft_model(model, adapters)
    return found


@torch.no_grad()
def require_apart(model: nn.Module, vocab_size: int, device: torch.device) -> None:
    """Raises ConfigError where a document computes otherwise beside another one in its row.

    That is what positions that begin anew are for. Models of transformers take them all, and some look at nothing of
    them: those that carry a state along, and those that count positions themselves.

    Args:
        model: sharded; all ranks call it together, and find the same.
        vocab_size: of tokens that it knows.
        device: that it computes on.
    """
    half = torch.arange(4, device=device)
    row = torch.cat([half, half])
    others = torch.cat([half + 4, half])  # the second document is the same
    was_training = model.training
    model.eval()
    one, other = model(
        input_ids=torch.stack([row, others]) % vocab_size, position_ids=row.expand(2, -1), use_cache=False
    ).logits[:, 4:]
    model.train(was_training)
    # Matrices of experts hold other tokens too, which may round otherwise.
    bound = 1e-4 if one.dtype.itemsize >= 4 else 3e-2
    if (one - other).abs().max() > bound * one.abs().max():
        raise ConfigError(
            f"{type(model).__name__} lets documents that share a row look at each other, whatever their positions, so "
            f'records with answers cannot be packed for it: set data.documents = "joined", for one stream in which '
            f"each document comes after those before it"
        )


def _selective() -> Any:
    """Keeps the outputs of attention and of every second matrix product, the first, third and so on of each block:
    `Recomputation.SELECTIVE`, which plans reckon with."""
    products = 0

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal products
        products += function in _PRODUCTS
        keep = products % 2 == 1 if function in _PRODUCTS else function in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]  # torch leaves it so


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
