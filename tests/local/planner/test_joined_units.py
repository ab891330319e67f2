"""The planner's units are the engine's, joined ones too: what follows from units is one schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeromesh.engine.units import Precision, find_units, join_modules
from zeromesh.model.from_module import from_module
from zeromesh.simulator import Workload
from zeromesh.simulator.units import schedule_units

transformers = pytest.importorskip("transformers")

CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=6, num_attention_heads=4, vocab_size=500
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=6, n_head=4, vocab_size=500, n_positions=128),
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("bucket_bytes", [0, 1, 100_000, 250_000, 25 << 20])
def test_the_planners_units_are_the_engines(name: str, bucket_bytes: int) -> None:
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    precision = Precision(param=torch.bfloat16)
    engine = [unit.describe(precision) for unit in join_modules(find_units(module), precision, bucket_bytes)]
    workload = Workload(seq_len=128, global_batch_tokens=128)
    assert list(schedule_units(from_module(module, seq_len=128), workload, bucket_bytes)[0]) == engine
