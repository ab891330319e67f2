"""Causal language models of transformers, as `zeromesh train` and its rehearsals make them before sharding."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from zeromesh.errors import ConfigError, nearest
from zeromesh.files.users import parse_json, read_text
from zeromesh.integrations.texts import Tokenizer


def causal_language_model(
    vocab_size: int,
    *,
    config: Path | Mapping[str, Any] | None = None,
    pretrained: Path | None = None,
    trainable: str | Sequence[str] = "all",
    activation_checkpointing: str = "none",
    values: bool = True,
) -> nn.Module:
    """Makes a causal language model on the default device, with random values or those of `pretrained`.

    Args:
        vocab_size: the tokenizer's; the model's may be larger.
        config: the keys of a Hugging Face config.json, or its path, for a new model.
        pretrained: the directory of a model to continue from.
        trainable: "all"; "lora:RANK" for PEFT's adapters on every linear layer of the blocks; or patterns of parameter
            names. Other parameters are frozen.
        activation_checkpointing: how the blocks recompute: "none", "full" or "selective".
        values: True to read the values of `pretrained` when the model is sharded.

    Raises:
        ConfigError: transformers or PEFT is missing, the configuration is unknown or invalid, its vocabulary too small,
            the directory holds no model in safetensors, or no parameter has a name that `trainable` asks for.
    """
    try:
        import transformers

        model = _fresh(config, vocab_size) if pretrained is None else _pretrained(pretrained, vocab_size, values=values)
        if not isinstance(trainable, str):
            _freeze_others(model, trainable)
        elif trainable != "all":
            model = _with_adapters(model, int(trainable.removeprefix("lora:")))
    except ModuleNotFoundError as error:
        extra = "peft" if error.name == "peft" else "hf"
        raise ConfigError(f'[model] needs the {error.name} library: pip install "zeromesh[{extra}]"') from error
    if activation_checkpointing != "none":
        options: dict[str, Any] = {"use_reentrant": False}
        if activation_checkpointing == "selective":
            from zeromesh.integrations.recomputation import selective

            options["context_fn"] = selective
        inner: Any = next(part for part in model.modules() if isinstance(part, transformers.PreTrainedModel))
        inner.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    return model


@torch.no_grad()
def continuation(model: Any, tokenizer: Tokenizer, prompt: str, most: int) -> str:
    """Continues `prompt` by at most `most` tokens, always the likeliest. The sharded `model` must be in evaluation
    mode. All ranks call this and get the same text."""
    start = tokenizer.encode([prompt.encode()])[0].tolist()
    inputs = torch.tensor([start[:-1] if start[-1] == tokenizer.end else start], device=model.device)
    found = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=tokenizer.end,
        pad_token_id=tokenizer.end or 0,
    )
    return tokenizer.decode(found[0, inputs.shape[1] :].tolist())


def require_pretrained(directory: Path | None) -> None:
    """Raises ConfigError if `model.pretrained` is a directory that holds no model."""
    if directory is not None and not any(directory.glob("*.safetensors")):
        found = "has no safetensors file" if directory.is_dir() else "is no directory"
        raise ConfigError(
            f"model.pretrained must be the directory of a Hugging Face model, with config.json and *.safetensors; "
            f"{directory} {found}"
        )


def seed_of_rank(seed: int, rank: int, model: nn.Module) -> int:
    """The seed for a rank's random numbers in training: different from the weights' seed, and on each rank.

    But models that skip layers at random get one seed on all ranks. They must skip the same layers everywhere, since
    all ranks gather a layer's parameters together.
    """
    options = vars(getattr(model, "config", None) or model)
    skips = any(name.endswith("layerdrop") and value for name, value in options.items())
    return Random(f"{seed} {0 if skips else rank}").getrandbits(63)


def _fresh(config: Path | Mapping[str, Any] | None, vocab_size: int) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    given: Any = config
    if isinstance(config, Path):
        text = read_text(config, kind="model.config (a Hugging Face config.json)", error=ConfigError)
        given = parse_json(text, where=f"model.config: {config}", error=ConfigError)
    if not isinstance(given, Mapping):
        raise ConfigError(f"model.config: {config} must hold a JSON object; got {type(given).__name__}")
    fields = {"vocab_size": vocab_size, **given}
    _require_vocabulary(fields["vocab_size"], vocab_size, "model.config.vocab_size")
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        close = nearest(str(model_type), CONFIG_MAPPING.keys())
        clause = close if close.startswith("did") else 'for example "llama", "qwen2" or "mixtral"'
        raise ConfigError(f"model.config.model_type must be one that transformers knows; got {model_type!r}; {clause}")
    known = set(AutoConfig.for_model(model_type).to_dict())
    unknown = [key for key in fields if key not in known]
    if unknown and given is config:  # typed by hand; a published config.json may have keys of other versions
        raise ConfigError(f"unknown key model.config.{unknown[0]} for {model_type}; {nearest(unknown[0], known)}")
    # Ids of a published vocabulary's first and last token mean nothing under another tokenizer, and may lie outside it.
    ids = dict.fromkeys({"bos_token_id", "eos_token_id", "pad_token_id"} & known)
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **ids | fields))
    except Exception as error:  # each version and model of transformers has its own classes for a bad value
        raise ConfigError(f"model.config: transformers cannot build this model: {error!r}") from error
    return model


def _pretrained(directory: Path, vocab_size: int, *, values: bool) -> nn.Module:
    """Uses the dtype that the configuration names, else fp32, so that it is the same on all ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from zeromesh.integrations.loading import from_pretrained

    require_pretrained(directory)
    try:
        config = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
        dtype = config.dtype or torch.float32
        model: nn.Module
        if values:
            model = from_pretrained(AutoModelForCausalLM, directory, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        raise ConfigError(f"model.pretrained: transformers cannot load {directory}: {error}") from error
    _require_vocabulary(config.get_text_config().vocab_size, vocab_size, f"the vocabulary of {directory}")
    return model


def _require_vocabulary(size: int, needed: int, what: str) -> None:
    if size < needed:
        raise ConfigError(
            f"{what} must be at least the tokenizer's {needed}; got {size}. Leave model.config.vocab_size out to take "
            f"the tokenizer's, or set data.tokenizer to the model's own"
        )


def _freeze_others(model: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
            raise ConfigError(
                f"model.trainable: no parameter is called {pattern!r}; {nearest(pattern, kinds)} (* stands for any "
                f"part of a name)"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatch(name, pattern) for pattern in patterns))


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # PEFT reads a property by its old name
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        found: nn.Module = get_peft_model(model, adapters)
    return found
