"""A table or a file describes a Hugging Face model; a misspelt key does not pass unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zeromesh as zm
from zeromesh.errors import ConfigError
from zeromesh.modules import lacks_values
from zeromesh.train.config import ModelConfig
from zeromesh.train.loop import build_language_model

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


def test_a_pretrained_model_has_its_own_values_once_it_is_sharded(tmp_path: Path) -> None:
    saved: Any = build()
    saved.to(torch.bfloat16).save_pretrained(tmp_path)
    config = ModelConfig(pretrained=tmp_path)
    loaded = build_language_model(config, 257)
    with torch.device("meta"):
        elsewhere = build_language_model(config, 257, values=False)
    for (name, one), (other_name, other) in zip(loaded.named_parameters(), elsewhere.named_parameters(), strict=True):
        assert lacks_values(one) and lacks_values(other)
        assert (name, one.shape, one.dtype) == (other_name, other.shape, other.dtype)
    found = zm.full_state_dict(zm.shard(loaded, None, "node=3"))
    assert all(torch.equal(found[name], value.float()) for name, value in saved.state_dict().items())
    with pytest.raises(ConfigError, match="must be at least the tokenizer's 258; got 257"):
        build_language_model(config, 258)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="has no safetensors file"):
        build_language_model(config, 257)


def test_patterns_and_adapters_say_what_trains() -> None:
    pytest.importorskip("peft")
    some = build_language_model(ModelConfig(config=LLAMA, trainable=("*.mlp.*", "model.norm.weight")), 257)
    assert {name for name, p in some.named_parameters() if p.requires_grad} == {
        *(f"model.layers.{block}.mlp.{part}_proj.weight" for block in range(2) for part in ("gate", "up", "down")),
        "model.norm.weight",
    }
    with pytest.raises(
        ConfigError, match=r"no parameter is called 'mlp'; known: .*, model.layers.\*.mlp.up_proj.weight, "
    ):
        build_language_model(ModelConfig(config=LLAMA, trainable=("mlp",)), 257)
    adapted = build_language_model(ModelConfig(config=LLAMA, trainable="lora:3"), 257)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 7 and all(3 in p.shape and "lora_" in name for name, p in trained.items())


def test_selective_checkpointing_keeps_attention_and_every_second_product() -> None:
    """Matrix products that the backward of one block runs again: of 7 the second, fourth and sixth, and never the last,
    after which nothing is missing."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(str(func))
            return func(*args, **(kwargs or {}))

    def count(kind: Any) -> tuple[int, int]:
        torch.manual_seed(0)
        config = ModelConfig(config=LLAMA | {"num_hidden_layers": 1}, activation_checkpointing=kind)
        model: Any = build_language_model(config, 257).train()
        loss = model(input_ids=torch.arange(8)[None], use_cache=False).logits.sum()
        with Counter() as counter:
            loss.backward()
        mm = sum("mm.default" in call for call in counter.calls)
        attention = sum("attention" in call and "backward" not in call for call in counter.calls)
        return mm, attention

    (none, _), (full, attention), (selective, kept) = (count(kind) for kind in ("none", "full", "selective"))
    assert (full - none, attention) == (6, 1)
    assert (selective - none, kept) == (3, 0)
