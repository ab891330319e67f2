"""The numbers that define a decoder-only transformer, from a file or a preset."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeromesh.errors import ModelError, one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How a family names its modules; `fused_qkv` and `gated` say which weights exist.

    `transposed` weights are stored [in, out] (GPT-2's Conv1D) instead of [out, in].
    """

    embedding: str
    blocks: str
    final_norm: str
    head: str
    query: str
    output: str
    up: str
    down: str
    norm_1: str
    norm_2: str
    positions: str = ""
    key: str = ""
    value: str = ""
    gate: str = ""
    transposed: bool = False


LLAMA = Naming(
    embedding="model.embed_tokens",
    blocks="model.layers",
    final_norm="model.norm",
    head="lm_head",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    norm_1="input_layernorm",
    norm_2="post_attention_layernorm",
)
GPT2 = Naming(
    embedding="transformer.wte",
    positions="transformer.wpe",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    head="lm_head",
    query="attn.c_attn",
    output="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    norm_1="ln_1",
    norm_2="ln_2",
    transposed=True,
)
MPT = Naming(
    embedding="transformer.wte",
    positions="transformer.wpe",
    blocks="transformer.blocks",
    final_norm="transformer.norm_f",
    head="lm_head",
    query="attn.Wqkv",
    output="attn.out_proj",
    up="ffn.up_proj",
    down="ffn.down_proj",
    norm_1="norm_1",
    norm_2="norm_2",
)
FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "mpt": MPT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which operations run as one kernel. This decides which tensors autograd keeps.

    An unfused RMS norm is a chain of fp32 operations, and keeps its input a second time in fp32; a fused one keeps its
    input and one statistic. Unfused attention keeps the scores. A fused gated activation recomputes in its backward the
    values between its two inputs and its result. Under sequence parallelism, the inputs of products after a norm are
    gathered. Autograd keeps them whole; a kernel that `gathers_again` keeps only this rank's part. Under selective
    recomputation, eager blocks keep every second product. A `graph` does not keep the last, which no backward reads.
    `loss` is one of `LOSSES`. `products` is the dtype of the blocks' products, if it differs from the activations'.
    """

    fused_norm: bool
    fused_attention: bool
    fused_activation: bool = False
    loss: str = "chain"
    gathers_again: bool = False
    graph: bool = False
    products: str = ""


LOSSES = {
    "chain": ((1, 1), (0, 2), (1, 3)),
    "fused": ((1, 0), (1, 0), (5, 0)),
    "chunked": ((0, 0), (0, 0), (5, 0)),
}
"""Copies of the logits, as pairs (in the compute dtype, in fp32): kept for the backward, made by it, moved in the
forward.

A chain keeps log-probabilities in fp32 in addition to the logits, and its backward makes the gradients of both. A fused
loss works on the logits in place: maximum, exponentials, and division by their sum. A chunked loss runs head, loss and
their backward on one chunk of tokens at a time.
"""

EAGER = Kernels(fused_norm=False, fused_attention=True)
FUSED = Kernels(fused_norm=True, fused_attention=True)
COMPILED = replace(FUSED, graph=True)
MEGATRON = replace(FUSED, fused_activation=True, loss="fused", gathers_again=True)
"""Megatron-core's kernels: fusions/fused_bias_swiglu.py saves only its input, fusions/fused_cross_entropy.py one copy
of the logits in bf16, tensor_parallel/layers.py its part of a gathered input (arXiv 2205.05198, section 4.2.2)."""
LIGER = replace(FUSED, fused_activation=True, loss="chunked")
"""Liger-Kernel's kernels (arXiv 2410.10989): RMSNorm and SwiGLU recompute, FusedLinearCrossEntropy never makes all
logits."""

KERNELS = {"eager": EAGER, "compiled": COMPILED, "liger": LIGER, "megatron": MEGATRON}
"""Kernels by the name in `--kernels`. "compiled" compiles the blocks, not the loss, as torchtitan did in 2024. Its
published pairs of rows agree (validation): 1.157 times as fast on 8 GPUs as measured, 1.154 as predicted."""

CAST_BYTES = {"fp8": 3.6, "mxfp8": 2.4}
"""Bytes moved in the forward for each input element of a product in this dtype.

With one scale for a tensor, one read finds the largest value and one casts, and codes are written as rows and as
columns: 6 bytes for an element of bf16, or 4 with a scale for 32 elements (torchao/float8/float8_linear.py). Counting
the input of each product three times is 5/3 of the casts in a block of Llama 3 8B, where query, key and value share an
input.
"""

_MOST = {
    "layers": 1_000,
    "experts": 10_000,
    **dict.fromkeys(("hidden", "heads", "ffn", "vocab", "kv_heads", "head_dim", "max_positions", "window"), 1 << 24),
}
"""Limits, several times the sizes of any published model. Each layer is a unit that the simulator steps through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    ffn: int  # inner size of the feed-forward network (of one expert)
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    max_positions: int = 0  # learned positions, 0 if positions are rotary or ALiBi
    tied: bool = False
    gated: bool = True  # three feed-forward weights (SwiGLU) instead of two
    rms_norm: bool = True
    norm_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: int = 0  # 0 for a dense feed-forward network
    experts_per_token: int = 0
    window: int | None = None
    fused_attention: bool = True  # False if the implementation itself writes the scores out
    activation_saves: float = 1.0  # copies of the inner activation that its function keeps besides its result
    dropouts_per_block: int = 0  # hidden-sized dropout masks in a block
    code_bits: int = 0  # of the blocks' matrices if these are frozen codes, else 0
    source: str = ""

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim == 0 and self.heads > 0:
            if self.hidden % self.heads:
                raise ModelError(
                    f"model {self.name}: hidden must be a multiple of heads, got {self.hidden} and {self.heads}; "
                    "give head_dim where they are independent"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        for field in ("hidden", "layers", "heads", "ffn", "vocab", "kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ModelError(f"model {self.name}: {field} must be at least 1, got {getattr(self, field)}")
        for field, most in _MOST.items():
            if (getattr(self, field) or 0) > most:
                raise ModelError(f"model {self.name}: {field} must be at most {most}, got {getattr(self, field)}")
        if self.family not in FAMILIES:
            raise ModelError(f"model {self.name}: family must be {one_of(self.family, FAMILIES)}")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"model {self.name}: heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        if bool(self.experts) != bool(self.experts_per_token) or self.experts_per_token > self.experts:
            raise ModelError(
                f"model {self.name}: of {self.experts} experts between 1 and all must be active per token, "
                f"got {self.experts_per_token}"
            )

    @property
    def naming(self) -> Naming:
        return FAMILIES[self.family]

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim
