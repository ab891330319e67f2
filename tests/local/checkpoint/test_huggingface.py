"""`from_pretrained` loads a sharded model's export, tied weights included, and the way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zeromesh as zm
from zeromesh.checkpoint.huggingface import load_safetensors, save_safetensors

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_and_back(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=31, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    expected = model(tokens).logits.detach()
    zm.shard(model, None, "node=3")
    save_safetensors(model, tmp_path, max_file_bytes=4000)
    assert (tmp_path / "model.safetensors.index.json").is_file()

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens).logits, expected)

    with torch.no_grad():
        loaded.model.norm.weight.mul_(2.0)
    loaded.save_pretrained(tmp_path / "back")
    load_safetensors(model, tmp_path / "back")
    assert torch.equal(model(tokens).logits, loaded(tokens).logits)
    assert not torch.equal(model(tokens).logits, expected)
