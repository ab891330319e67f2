"""Sizes of the models that measurements train. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.model.shape import TransformerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama; its head is not tied to its embedding."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int = 512

    @property
    def block_params(self) -> int:
        """Four square and three feed-forward weights and two norms."""
        return 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def num_params(self) -> int:
        """Embedding and head; the blocks; the last norm."""
        return 2 * self.vocab * self.hidden + self.layers * self.block_params + self.hidden

    @property
    def transformer(self) -> TransformerShape:
        """For the planner."""
        return TransformerShape(
            name=f"Llama of {self.num_params} parameters",
            family="llama",
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            ffn=self.intermediate,
            vocab=self.vocab,
        )


SHAPES = {
    "tiny": LlamaShape(hidden=64, intermediate=172, layers=3, heads=2, vocab=128),
    "1M": LlamaShape(hidden=128, intermediate=344, layers=5, heads=4),
    "7M": LlamaShape(hidden=256, intermediate=688, layers=8, heads=4),
    "30M": LlamaShape(hidden=512, intermediate=1376, layers=10, heads=8),
    "60M": LlamaShape(hidden=640, intermediate=1720, layers=12, heads=10),
}
