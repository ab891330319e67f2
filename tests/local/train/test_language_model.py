"""A table or a file describes a Hugging Face model; a misspelt key does not pass unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zeromesh.errors import ConfigError
from zeromesh.train.config import ModelConfig
from zeromesh.train.language_model import build_language_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def build(**changes: Any) -> torch.nn.Module:
    return build_language_model(ModelConfig(config=LLAMA | changes), 257)


def test_vocabulary_is_the_tokenizers_and_weights_follow_the_seed() -> None:
    torch.manual_seed(3)
    first = build()
    torch.manual_seed(3)
    second = build()
    assert type(first).__name__ == "LlamaForCausalLM"
    assert first.get_parameter("model.embed_tokens.weight").shape == (257, 16)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)


def test_file_and_table_give_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"], "auto_map": {}}))
    from_file = build_language_model(ModelConfig(config=path), 257)
    shapes = [parameter.shape for parameter in from_file.parameters()]
    assert shapes == [parameter.shape for parameter in build().parameters()]


def test_activation_checkpointing_is_turned_on() -> None:
    model = build_language_model(ModelConfig(config=LLAMA, activation_checkpointing=True), 257)
    assert model.is_activation_checkpointing


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "got 'lama'; did you mean .*llama"),
        ({"model_type": None}, "model_type must be one that transformers knows; got None"),
        ({"hiden_size": 8}, "unknown key model.config.hiden_size for llama; did you mean hidden_size"),
        ({"vocab_size": 100}, "vocab_size must be at least the tokenizer's 257; got 100"),
        ({"hidden_act": "nope"}, "transformers cannot build this model"),
    ],
)
def test_wrong_description_is_one_message(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**changes)


def test_unreadable_file_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content in (None, "not json"):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=r"config.json: .*(model.config|not JSON)"):
            build_language_model(ModelConfig(config=path), 257)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object; got list"):
        build_language_model(ModelConfig(config=path), 257)
