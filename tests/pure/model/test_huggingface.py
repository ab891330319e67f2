"""The reader of config.json: what it reads, and what it says of a file that it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeromesh.errors import ModelError
from zeromesh.model import UnitKind, load_model, preset

LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


def write(tmp_path: Path, config: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


def test_a_config_equals_its_preset(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, LLAMA_7B))
    assert model.units == preset("llama-7b").units


@pytest.mark.parametrize(
    ("kind", "given", "kv_heads", "window"),
    [
        ("mistral", {}, 8, 4096),
        ("mistral", {"num_key_value_heads": None, "sliding_window": None}, 32, None),
        ("mistral", {"num_key_value_heads": 4, "sliding_window": 1024}, 4, 1024),
        ("mixtral", {"num_local_experts": 4}, 8, None),
        ("qwen2", {}, 32, None),
        ("llama", {}, 32, None),
        ("mixtral", {"num_experts": 4}, 8, None),
    ],
)
def test_a_key_that_is_missing_has_its_classs_default(
    tmp_path: Path, kind: str, given: dict[str, object], kv_heads: int, window: int | None
) -> None:
    model = load_model(write(tmp_path, LLAMA_7B | {"model_type": kind} | given))
    (block,) = (unit for unit in model.units if unit.kind is UnitKind.BLOCK)
    key = next(tensor for tensor in block.tensors if "k_proj.weight" in tensor.name)
    assert key.num_elements == kv_heads * 128 * 4096
    assert block.attention is not None and block.attention.window == window


def test_a_directory_with_a_config_is_read(tmp_path: Path) -> None:
    write(tmp_path, LLAMA_7B)
    assert load_model(str(tmp_path)).num_params == 6738415616


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a table of keys is required, got list"),
        ({}, "model_type is required"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] has no reader"),
        (LLAMA_7B | {"hidden_size": None}, "hidden_size must be a whole number of at least 1, got None"),
        (LLAMA_7B | {"hidden_size": "4096"}, "hidden_size must be a whole number of at least 1, got '4096'"),
        (LLAMA_7B | {"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, got 0"),
        (LLAMA_7B | {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        (LLAMA_7B | {"num_attention_heads": 33}, "hidden must be a multiple of heads, got 4096 and 33"),
        (LLAMA_7B | {"num_key_value_heads": 5}, "heads must be a multiple of kv_heads, got 32 and 5"),
        (
            LLAMA_7B | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 8},
            "of 4 experts between 1 and all must be active per token, got 8",
        ),
    ],
)
def test_wrong_configs_name_the_key(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(write(tmp_path, config))


def test_weights_are_no_config(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes([8, 0, 0, 0, 0, 0, 0, 0]) + b"{}      " + bytes([0x80, 0x3F]))
    with pytest.raises(ModelError, match=r"weights\.safetensors: cannot be read as a config\.json: not UTF-8"):
        load_model(str(path))


def test_a_missing_file_says_so() -> None:
    with pytest.raises(ModelError, match=r"cannot be read as a config\.json: No such file"):
        load_model("nowhere/config.json")
