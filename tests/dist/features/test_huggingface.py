"""Models that this project did not write, as Hugging Face builds them, at toy size."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.hugging import SMALL, VOCABULARY
from tests.dist.parity import check, tokens
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of

SIZES = SMALL | {"num_hidden_layers": 3, "num_key_value_heads": 1}


def build(kind: str) -> nn.Module:
    import transformers as hf  # several seconds, once per worker

    torch.manual_seed(0)
    match kind:
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).double()
        case "qwen2":
            return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, tie_word_embeddings=True)).double()
        case "mixtral":
            experts = {"num_local_experts": 6, "num_experts_per_tok": 1, "output_router_logits": True}
            config = hf.MixtralConfig(**SIZES, **experts)
            config._experts_implementation = "eager"  # torch's grouped product has no fp64
            return hf.MixtralForCausalLM(config).double()
        case "gpt2":
            sizes: dict[str, Any] = {"n_positions": 32, "n_embd": 8, "n_layer": 3, "n_head": 2}
            drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            ends = {"bos_token_id": 0, "eos_token_id": 1}
            return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **sizes, **drops, **ends)).double()
        case "t5":
            sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
            starts = {"decoder_start_token_id": 0}
            return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, **sizes, **starts)).double()
        case "vit":
            sizes = {k: SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")}
            image = {"image_size": 8, "patch_size": 4, "num_labels": 3, "num_attention_heads": 2}
            return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **image)).double()
    raise AssertionError(kind)


def data_of(kind: str, step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    if kind == "vit":
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        pixels = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.tensor([rank % 3, step % 3])}
    batch = tokens(step, micro, rank, VOCABULARY, (2, 6))
    return {"input_ids": batch, "labels": batch}


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def layers(of: str, number: int = 3) -> list[str]:
    return [f"{of}.{index}" for index in range(number)]


ENDS = ["lm_head", "model.embed_tokens"]
KINDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "llama": ([*ENDS, *layers("model.layers")], ("node=3d",)),
    "qwen2": (layers("model.layers"), ("node=3k",)),
    "mixtral": ([*ENDS, *layers("model.layers")], ("node=0",)),
    "gpt2": (layers("transformer.h"), ("node=2",)),
    "t5": ([*layers("decoder.block", 2), *layers("encoder.block", 2)], ("node=3",)),
    "vit": (["vit.embeddings", *layers("vit.layers")], ("node=1",)),
}
"""Names of the units besides the root, and strategies."""


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_trains_as_plain(kind):
    names, strategies = KINDS[kind]
    of_kind: dict[str, Any] = {"loss_of": loss_of, "data_of": partial(data_of, kind), "clip": 0.5}
    for pair in check(build(kind), *strategies, options={"bucket_bytes": 0}, **of_kind):
        assert sorted(unit.name for unit in engine_of(pair.model).units) == ["", *names]
        if kind == "llama":
            options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            with torch.inference_mode():
                found = [each.generate(tokens(0, 0, 0, shape=(2, 3)), **options) for each in (pair.model, pair.plain)]
            assert found[0].shape == (2, 8) and torch.equal(*found)
