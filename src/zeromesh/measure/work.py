"""The work of a model's micro-batch, by which a device is measured, and the models that measurements train.
Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from zeromesh.errors import InputError, one_of
from zeromesh.model.shape import TransformerShape
from zeromesh.model.spec import ModelSpec, UnitKind


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


SHAPES = {  # their heads are not tied to their embeddings
    "tiny": llama_shape(64, 172, layers=3, heads=2, vocab=128),
    "1M": llama_shape(128, 344, layers=5, heads=4),
    "7M": llama_shape(256, 688, layers=8, heads=4),
    "30M": llama_shape(512, 1376, layers=10, heads=8),
    "60M": llama_shape(640, 1720, layers=12, heads=10),
}

DTYPES = ("fp32", "bf16")
"""Dtypes in which kernels can be measured."""

MEASURED = ("eager", "compiled")
"""The names in `zeromesh.model.shape.KERNELS` that torch can run without other libraries."""

MOST_ELEMENTS = 1 << 25
"""Most elements for measuring an optimizer: with more, each takes as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Shapes of one micro-batch of a model. Elementwise kernels are measured on a Llama's blocks of the same sizes."""

    name: str
    dtypes: tuple[str, ...]  # to measure
    sequences: int
    tokens: int  # per sequence
    hidden: int
    ffn: int
    heads: int
    head_dim: int
    products: tuple[tuple[float, int, int], ...]  # (rows per token, inner, outer) of each
    elements: int  # of all parameters
    kernels: str = "eager"  # kernels of that Llama's blocks; one of `MEASURED`

    @classmethod
    def of(cls, spec: ModelSpec, *, dtypes: Sequence[str], sequences: int, tokens: int, kernels: str = "eager") -> Self:
        """Returns the work of `spec`. Raises InputError for a dtype or kernels that cannot be measured, no block with
        attention, or no tokens."""
        if kernels not in MEASURED:
            raise InputError(f"--kernels of a probe must be {one_of(kernels, MEASURED)}")
        for dtype in dtypes:
            if dtype not in DTYPES:
                raise InputError(f"--dtype must be {one_of(dtype, DTYPES)}")
        if min(sequences, tokens) < 1:
            raise InputError(f"a micro-batch has at least 1 sequence of 1 token, got {sequences} of {tokens}")
        block = next((unit for unit in spec.units if unit.kind is UnitKind.BLOCK), None)
        if block is None or block.attention is None or not block.matmuls:
            raise InputError(f"kernels are measured at the shapes of a transformer's blocks; {spec.name} has none")
        products = {(m.rows_per_token, m.inner, m.outer) for unit in spec.units for m in unit.matmuls}
        return cls(
            name=spec.name,
            dtypes=tuple(dtypes),
            sequences=sequences,
            tokens=tokens,
            hidden=spec.hidden,
            ffn=max(matmul.outer for matmul in block.matmuls),
            heads=block.attention.heads,
            head_dim=block.attention.head_dim,
            products=tuple(sorted(products)),
            elements=min(MOST_ELEMENTS, sum(unit.count * unit.num_params for unit in spec.units)),
            kernels=kernels,
        )

    @property
    def llama(self) -> TransformerShape:
        """A Llama of one block of these sizes."""
        return llama_shape(self.heads * self.head_dim, self.ffn, layers=1, heads=self.heads, vocab=self.head_dim)

    @property
    def block_params(self) -> int:
        """Parameters of that block: four square and three feed-forward weights, and two norms."""
        hidden, ffn = self.llama.hidden, self.llama.ffn
        return 4 * hidden**2 + 3 * hidden * ffn + 2 * hidden

    @property
    def all_products(self) -> tuple[tuple[float, int, int], ...]:
        """The products of the model and of the block `llama`."""
        hidden, ffn = self.llama.hidden, self.llama.ffn
        own = {(1.0, hidden, hidden), (1.0, hidden, ffn), (1.0, ffn, hidden)}
        return tuple(sorted({*self.products, *own}))

    @property
    def block_flops(self) -> float:
        """FLOPs of that block's forward, without attention."""
        return 2.0 * self.sequences * self.tokens * self.block_params

    def capped(self, most_flops: float) -> Self:
        """Returns a copy with fewer tokens, so that a block's forward takes at most `most_flops`."""
        total = max(1, min(self.sequences * self.tokens, int(most_flops / (2 * self.block_params))))
        tokens = min(self.tokens, total)
        return replace(self, tokens=tokens, sequences=max(1, total // tokens))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `asdict`; JSON has made its tuples lists."""
        lists = {"dtypes": tuple(data["dtypes"]), "products": tuple(tuple(one) for one in data["products"])}
        return cls(**(dict(data) | lists))
