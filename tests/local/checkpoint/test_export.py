"""Safetensors files of one process: an export that is killed leaves the one before, or none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zeromesh as zm
from zeromesh.checkpoint.peers import Peers
from zeromesh.checkpoint.safetensors import Spec, read_headers, write_safetensors
from zeromesh.errors import CheckpointError
from zeromesh.integrations.huggingface import load_safetensors, save_safetensors
from zeromesh.pieces.piece import whole


def export(directory: Path, value: float, *, files: int) -> None:
    specs = [Spec(name=name, shape=(4,), dtype=torch.float32) for name in "abc"]
    pieces = [whole(spec.name, torch.full((4,), value)) for spec in specs]
    write_safetensors(directory, specs, pieces, Peers(), max_file_bytes=48 // files)


def values(directory: Path) -> set[float]:
    stored = read_headers(directory)
    assert sorted(stored) == ["a", "b", "c"]
    return {float(load_file(place.path)[name][0]) for name, place in stored.items()}


@pytest.mark.parametrize("renames", range(4))
@pytest.mark.parametrize("before", [1, 3])
def test_no_index_is_of_two_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, renames: int) -> None:
    export(tmp_path, 1.0, files=before)
    done: list[Any] = []
    replace = os.replace

    def killed(*paths: Any) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        replace(*paths)
        done.append(paths)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", killed)
        export(tmp_path, 2.0, files=3)
    if before == 1:
        assert values(tmp_path) == {1.0}
    else:
        with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
            values(tmp_path)
    export(tmp_path, 2.0, files=3)
    assert values(tmp_path) == {2.0}


# ---- `from_pretrained` loads a sharded model's export, tied weights included, and the way back


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
