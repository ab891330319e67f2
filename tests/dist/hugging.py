"""Sizes of Hugging Face's models, so small that many fit into a test."""

from __future__ import annotations

from typing import Any

VOCABULARY = 23
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
}
