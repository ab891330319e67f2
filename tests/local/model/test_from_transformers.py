"""The config of any architecture that transformers has is a model to plan for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeromesh.errors import ModelError
from zeromesh.model import ModelSpec, UnitKind, load_model

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


def load(directory: Path, **config: Any) -> ModelSpec:
    path = directory / "config.json"
    path.write_text(json.dumps(SMALL | config))
    return load_model(str(path), seq_len=32)


def test_architectures_without_a_reader_are_built_and_read(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    for auto, model_type, more in (
        (AutoModelForMaskedLM, "bert", {}),
        (AutoModelForCausalLM, "qwen3_moe", experts),
    ):
        found = load(tmp_path, model_type=model_type, **more)
        built = auto.from_config(AutoConfig.for_model(model_type, **SMALL, **more))
        assert found.num_params == sum(parameter.numel() for parameter in built.parameters()), model_type
        blocks = [unit for unit in found.units if unit.kind is UnitKind.BLOCK and ".layer" in unit.name]
        assert sum(unit.count for unit in blocks) == 2 and all(unit.matmuls for unit in blocks), model_type


def test_what_cannot_be_built_or_run_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="one that transformers knows, got 'lama'; did you mean"):
        load(tmp_path, model_type="lama")
    with pytest.raises(ModelError, match=r"ViTModel has been built, but not read: .*Give package.module:function"):
        load(tmp_path, model_type="vit")
