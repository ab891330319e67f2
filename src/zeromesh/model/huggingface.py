"""Reads a Hugging Face `config.json` without transformers: Llama-like, GPT-2, MPT and Mixtral-like models. Of others
`zeromesh.model.from_transformers` builds the module itself.

A key that a file leaves out has the default of the transformers class of that `model_type`, which `_DEFAULTS` repeats,
and a key may have the other name that the class knows it by (`_ALIASES`); a test holds both against the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zeromesh.errors import ModelError, nearest
from zeromesh.files import parse_json, read_text
from zeromesh.model.shape import EAGER, Kernels, TransformerShape
from zeromesh.model.spec import ModelSpec
from zeromesh.model.transformer import build

Config = Mapping[str, Any]


def read_config(path: Path, *, seq_len: int | None = None, dtype: str = "bf16", kernels: Kernels = EAGER) -> ModelSpec:
    """The model that a `config.json` describes.

    Args:
        path: of the file.
        seq_len: of what a model that has no reader here is run on, which needs it.
        dtype: of compute and activations.
        kernels: as `load_model` takes them.

    Raises:
        ModelError: no such file, not JSON, a missing or invalid key, or a `model_type` that is not read here and that
            transformers cannot build.
    """
    text = read_text(path, kind="a config.json", error=ModelError)
    config = parse_json(text, where=str(path), hint="; a model is given by its config.json", error=ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{path}: a table of keys is required, got {type(config).__name__}")
    if isinstance(config.get("model_type"), str) and not _is_read_here(config):
        try:
            from zeromesh.model.from_transformers import from_architecture  # imports torch
        except ModuleNotFoundError as error:
            raise ModelError(
                f"{path}: model_type {config['model_type']!r} has no reader of its own, and is built by the "
                f'transformers library: pip install "zeromesh[hf]"'
            ) from error
        return from_architecture(config, name=_name(config, path), where=str(path), seq_len=seq_len, dtype=dtype)
    return from_config(config, name=_name(config, path), where=str(path), dtype=dtype, kernels=kernels)


def from_config(
    config: Config, *, name: str, where: str = "config", dtype: str = "bf16", kernels: Kernels = EAGER
) -> ModelSpec:
    """The model that a config, already read, describes; see `read_config`."""
    return build(shape_from_config(config, name=name, where=where), dtype=dtype, kernels=kernels)


def shape_from_config(config: Config, *, name: str, where: str = "config") -> TransformerShape:
    """The shape that a config describes."""
    model_type = config.get("model_type")
    if model_type is None:
        raise ModelError(f"{where}: key model_type is required; known: {', '.join(_READERS)}")
    if not isinstance(model_type, str) or model_type not in _READERS:
        raise ModelError(
            f"{where}: model_type {model_type!r} has no reader: {nearest(str(model_type), _READERS)} "
            "Pass package.module:function returning the nn.Module instead."
        )
    fields = _READERS[model_type](_Keys(config, where))
    return TransformerShape(name=name, source=where, **fields)


def _is_read_here(config: Config) -> bool:
    """Not where windows are some layers' alone, which a `TransformerShape` cannot say."""
    return config["model_type"] in _READERS and not config.get("use_sliding_window")


class _Keys:
    """A config's keys, checked as they are read."""

    def __init__(self, config: Config, where: str) -> None:
        aliases = _ALIASES.get(config["model_type"], {})
        given = {aliases.get(key, key): value for key, value in config.items()}
        self._config = _DEFAULTS[config["model_type"]] | given
        self._where = where

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """`default`: of null, where the class takes that."""
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ModelError(f"{self._where}: {key} must be a whole number of at least {minimum}, got {value!r}")
        return value

    def flag(self, key: str) -> bool:
        value = self._config[key]
        if not isinstance(value, bool):
            raise ModelError(f"{self._where}: {key} must be true or false, got {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self._config[key]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self._where}: {key} must be a number, got {value!r}")
        return float(value)

    def text(self, key: str) -> str:
        return str(self._config[key])

    def optional(self, key: str) -> int | None:
        return None if self._config[key] is None else self.integer(key)


def _llama(keys: _Keys) -> dict[str, Any]:
    heads = keys.integer("num_attention_heads")
    bias = keys.flag("attention_bias")
    return {
        "family": "llama",
        "hidden": keys.integer("hidden_size"),
        "layers": keys.integer("num_hidden_layers"),
        "heads": heads,
        "kv_heads": keys.optional("num_key_value_heads") or heads,
        "head_dim": keys.integer("head_dim", 0),
        "ffn": keys.integer("intermediate_size"),
        "vocab": keys.integer("vocab_size"),
        "tied": keys.flag("tie_word_embeddings"),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": keys.flag("mlp_bias"),
    }


_UNBIASED = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}


def _mistral(keys: _Keys) -> dict[str, Any]:
    return _llama(keys) | _UNBIASED | {"window": keys.optional("sliding_window")}


def _qwen2(keys: _Keys) -> dict[str, Any]:
    return _llama(keys) | _UNBIASED | {"qkv_bias": True}


def _mixtral(keys: _Keys) -> dict[str, Any]:
    return _mistral(keys) | {
        "experts": keys.integer("num_local_experts"),
        "experts_per_token": keys.integer("num_experts_per_tok"),
    }


_UNGATED = {"gated": False, "rms_norm": False}


def _gpt2(keys: _Keys) -> dict[str, Any]:
    hidden = keys.integer("n_embd")
    dropouts = 2 if keys.number("resid_pdrop") > 0 else 0
    return {
        **_UNGATED,
        "family": "gpt2",
        "hidden": hidden,
        "layers": keys.integer("n_layer"),
        "heads": keys.integer("n_head"),
        "ffn": keys.integer("n_inner", 4 * hidden),
        "vocab": keys.integer("vocab_size"),
        "max_positions": keys.integer("n_positions"),
        "tied": keys.flag("tie_word_embeddings"),
        "norm_bias": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        # the tanh approximation is written out, operation by operation; every other activation is one kernel
        "activation_saves": 4.0 if keys.text("activation_function") == "gelu_new" else 1.0,
        "dropouts_per_block": dropouts,
    }


def _mpt(keys: _Keys) -> dict[str, Any]:
    hidden = keys.integer("d_model")
    bias = not keys.flag("no_bias")
    ratio = keys.integer("expansion_ratio")
    return {
        **_UNGATED,
        "family": "mpt",
        "hidden": hidden,
        "layers": keys.integer("n_layers"),
        "heads": keys.integer("n_heads"),
        "ffn": ratio * hidden,
        "vocab": keys.integer("vocab_size"),
        "tied": keys.flag("tie_word_embeddings"),
        "fused_attention": False,  # transformers' MPT writes the scores out
        "norm_bias": bias,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
    }


_READERS: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "mpt": _mpt,
}

_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _LLAMA | {"intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936},
    "mixtral": _MISTRAL | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt2": {
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "n_positions": 1024,
        "vocab_size": 50257,
        "tie_word_embeddings": True,
        "resid_pdrop": 0.1,
        "activation_function": "gelu_new",
    },
    "mpt": {
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "vocab_size": 50368,
        "expansion_ratio": 4,
        "no_bias": True,
        "tie_word_embeddings": True,
    },
}
_ALIASES: dict[str, dict[str, str]] = {
    "mixtral": {"num_experts": "num_local_experts"},
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "mpt": {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
}


def _name(config: Config, path: Path) -> str:
    given = config.get("_name_or_path")
    return str(given) if given else (path.parent.name or path.stem)
