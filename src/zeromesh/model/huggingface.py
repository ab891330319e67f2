"""Reads a Hugging Face `config.json` without transformers, for Llama-like and Mixtral-like models. For others,
`zeromesh.model.from_transformers` builds the module.

A missing key has the default of the transformers class for that `model_type`, repeated in `_DEFAULTS`. A key may have
another name that the class accepts (`_ALIASES`). A test compares both with the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeromesh.errors import ModelError, nearest
from zeromesh.files.users import parse_json, read_text
from zeromesh.model.shape import TransformerShape
from zeromesh.model.spec import ModelSpec, UnitKind
from zeromesh.model.transformer import build, in_codes

Config = Mapping[str, Any]


def read_config(path: Path, *, seq_len: int | None = None, dtype: str = "bf16") -> ModelSpec:
    """Describes the model of a `config.json`. A type without a reader here is run on an input of `seq_len` tokens,
    which is then required. Raises ModelError if there is no such file, it is not JSON, a key is missing or invalid, or
    its `model_type` is neither read here nor built by transformers."""
    text = read_text(path, kind="a config.json", error=ModelError)
    config = parse_json(text, where=str(path), hint="; a model is given by its config.json", error=ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{path}: a table of keys is required, got {type(config).__name__}")
    bits = _code_bits(config, str(path))
    if isinstance(config.get("model_type"), str) and not _is_read_here(config):
        try:
            from zeromesh.model.from_transformers import from_architecture  # imports torch
        except ModuleNotFoundError as error:
            raise ModelError(
                f"{path}: model_type {config['model_type']!r} has no reader of its own, and is built by the "
                f'transformers library: pip install "zeromesh[hf]"'
            ) from error
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        model = from_architecture(plain, name=_name(config, path), where=str(path), seq_len=seq_len, dtype=dtype)
        blocks = (in_codes(unit, bits) if unit.kind is UnitKind.BLOCK else unit for unit in model.units)
        return replace(model, units=tuple(blocks))
    return from_config(config, name=_name(config, path), where=str(path), dtype=dtype)


def from_config(config: Config, *, name: str, where: str = "config", dtype: str = "bf16") -> ModelSpec:
    """Describes the model of a config that has been read; see `read_config`."""
    model_type = config.get("model_type")
    if model_type is None:
        raise ModelError(f"{where}: key model_type is required; known: {', '.join(_FIELDS)}")
    if not isinstance(model_type, str) or model_type not in _FIELDS:
        raise ModelError(
            f"{where}: model_type {model_type!r} has no reader: {nearest(str(model_type), _FIELDS)} "
            "Pass package.module:function returning the nn.Module instead."
        )
    keys = _checked(config, model_type, where)
    fields = {field: keys[key] for field, key in _FIELDS[model_type].items() if keys[key] is not None}
    bits = _code_bits(config, where)
    biased = model_type == "qwen2" or fields.pop("qkv_bias", False)
    shape = TransformerShape(name=name, family="llama", source=where, code_bits=bits, qkv_bias=biased, **fields)
    return build(shape, dtype=dtype)


def _code_bits(config: Config, where: str) -> int:
    """Bits of a quantised model's weights; 0 if the config has no `quantization_config`."""
    found = config.get("quantization_config")
    if not found:
        return 0
    quantised: Config = found if isinstance(found, Mapping) else {}
    method = quantised.get("quant_method", "bitsandbytes" if "load_in_4bit" in quantised else None)
    bits: int = _BITS.get(str(method), 0) or (quantised.get("bits", 0) if method in ("gptq", "awq") else 0)
    if method == "bitsandbytes":
        bits = 4 if quantised.get("load_in_4bit") or quantised.get("_load_in_4bit") else 8
    if bits not in (4, 8):
        raise ModelError(
            f"{where}: quantization_config must be of bitsandbytes, gptq or awq with 4 or 8 bits, fp8 or mxfp4, got "
            f"{found!r}: give the config.json of the model that it was made of"
        )
    return bits


_BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}


def _is_read_here(config: Config) -> bool:
    """Whether this module reads the config: not if only some layers have windows, as no `TransformerShape` can."""
    return config["model_type"] in _FIELDS and not config.get("use_sliding_window")


def _checked(config: Config, model_type: str, where: str) -> dict[str, Any]:
    """Returns the keys of a type, each of the kind of its default, or null if the class accepts it."""
    aliases = _ALIASES.get(model_type, {})
    given = {aliases.get(key, key): value for key, value in config.items()}
    found = {}
    for key, default in _DEFAULTS[model_type].items():
        found[key] = value = given.get(key, default)
        if isinstance(default, bool):
            good, wanted = isinstance(value, bool), "true or false"
        else:
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            good = whole or (value is None and (default is None or key in _NULLABLE))
            wanted = "a whole number of at least 1"
        if not good:
            raise ModelError(f"{where}: {key} must be {wanted}, got {value!r}")
    return found


_DECODER = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "tied": "tie_word_embeddings",
}
_WINDOWED = _DECODER | {"window": "sliding_window"}
_FIELDS: dict[str, dict[str, str]] = {
    "llama": _DECODER | {"qkv_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    "mistral": _WINDOWED,
    "qwen2": _DECODER,
    "mixtral": _WINDOWED | {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
}
"""Fields of `TransformerShape` by type, with the keys that give them."""


_NULLABLE = ("num_key_value_heads", "sliding_window")
"""Keys that may be null, besides those whose default is null."""

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
}
_ALIASES = {"mixtral": {"num_experts": "num_local_experts"}}


def _name(config: Config, path: Path) -> str:
    given = config.get("_name_or_path")
    return str(given) if given else (path.parent.name or path.stem)
