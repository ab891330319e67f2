"""The numbers that define a decoder-only transformer, whatever file or preset they came from."""

from __future__ import annotations

from dataclasses import dataclass

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
    router: str = ""
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
    router="mlp.gate",
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
    """Which operations run as one kernel: it decides what autograd keeps.

    An unfused RMS norm is a chain of fp32 operations and keeps its input a second time in fp32; a fused one keeps its
    input and one statistic. Unfused attention keeps the scores. A fused gated activation computes again in its backward
    what the chain would keep between its two inputs and its result. A fused loss works on the logits in their place and
    dtype, where the chain keeps log-probabilities in fp32 beside them. Under sequence parallelism the inputs of the
    products after a norm are gathered; autograd keeps them whole, a kernel that gathers again only this rank's part.
    """

    fused_norm: bool
    fused_attention: bool
    fused_activation: bool = False
    fused_loss: bool = False
    gathers_again: bool = False


EAGER = Kernels(fused_norm=False, fused_attention=True)
FUSED = Kernels(fused_norm=True, fused_attention=True)
MEGATRON = Kernels(fused_norm=True, fused_attention=True, fused_activation=True, fused_loss=True, gathers_again=True)
"""Megatron-core's: fusions/fused_bias_swiglu.py saves its input alone, fusions/fused_cross_entropy.py one copy of the
logits in bf16, tensor_parallel/layers.py its part of a gathered input (arXiv 2205.05198, section 4.2.2)."""

_MOST = {
    "layers": 1_000,
    "experts": 10_000,
    **dict.fromkeys(("hidden", "heads", "ffn", "vocab", "kv_heads", "head_dim", "max_positions", "window"), 1 << 24),
}
"""Several times what any published model has. Each layer is a unit, which the simulator steps through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A decoder-only transformer.

    Args:
        max_positions: learned positions, 0 if positions are rotary or ALiBi.
        ffn: inner size of the feed-forward network (of one expert).
        gated: three feed-forward weights (SwiGLU) instead of two.
        fused_attention: False where the implementation itself writes the scores out.
        experts: 0 for a dense feed-forward network.
        activation_saves: copies of the inner activation that the activation function keeps beside its result.
        dropouts_per_block: hidden-sized dropout masks in a block.
    """

    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    max_positions: int = 0
    tied: bool = False
    gated: bool = True
    rms_norm: bool = True
    norm_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    window: int | None = None
    fused_attention: bool = True
    activation_saves: float = 1.0
    dropouts_per_block: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        self._normalise()
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

    def _normalise(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.head_dim == 0 and self.heads > 0:
            if self.hidden % self.heads:
                raise ModelError(
                    f"model {self.name}: hidden must be a multiple of heads, got {self.hidden} and {self.heads}; "
                    "give head_dim where they are independent"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

    @property
    def naming(self) -> Naming:
        return FAMILIES[self.family]

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim
