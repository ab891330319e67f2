"""Sizes of the models that measurements train; their heads are not tied to their embeddings. Torch-free."""

from __future__ import annotations

from zeromesh.model.shape import TransformerShape


def llama_shape(hidden: int, ffn: int, layers: int, heads: int, vocab: int = 512) -> TransformerShape:
    return TransformerShape(
        name=f"Llama of {layers} layers of {hidden}",
        family="llama",
        hidden=hidden,
        layers=layers,
        heads=heads,
        ffn=ffn,
        vocab=vocab,
    )


SHAPES = {
    "tiny": llama_shape(64, 172, layers=3, heads=2, vocab=128),
    "1M": llama_shape(128, 344, layers=5, heads=4),
    "7M": llama_shape(256, 688, layers=8, heads=4),
    "30M": llama_shape(512, 1376, layers=10, heads=8),
    "60M": llama_shape(640, 1720, layers=12, heads=10),
}
