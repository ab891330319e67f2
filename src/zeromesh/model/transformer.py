"""Builds a `ModelSpec` from the numbers of a transformer.

Activation bytes follow the tensors that autograd keeps, operation by operation, in the Hugging Face implementation of
the family (transformers 5, eager mode, scaled-dot-product attention). `Kernels` changes operations for which fused
kernels are common. With h = hidden, q and v the sizes of query and key, f = ffn, and w the compute dtype's bytes, per
token:

- RMS norm, unfused: the input in fp32 (4h), its normalised copy (wh), the output (wh, the next product's input).
  RMS norm fused, layer norm: the input (wh) and the output (wh). Statistics: 4 bytes each.
- attention: query, key, value and output, and 4 bytes of log-sum-exp per head; unfused: the softmax in fp32 and
  in the compute dtype, for each pair of tokens and head.
- feed-forward, gated: gate, its activation, up, and their product: 4wf; with a fused activation gate, up and product:
  3wf. Not gated: wf for the product and wf for each copy that the activation function keeps.
- the residual stream itself is kept only where a norm keeps its input.
- head: its input (wh), the labels, the logits (wV, alive as the module's output) and the loss's copies (`LOSSES`).

[Note: Tensor parallel] Each of t ranks has 1/t of the heads, of f and of V (arXiv 1909.08053), which are then the sizes
above. A tensor of h elements per token is whole, or 1/t of it with sequence parallelism (arXiv 2205.05198). The inputs
of products after a norm are gathered in any case. In each half of a block and in each direction, t ranks sum h elements
per token once: by an all-reduce, or with sequence parallelism by a gather before and a reduce-scatter after, which send
as much. Embedding and head together have as many as one half.
"""

from __future__ import annotations

from dataclasses import replace

from zeromesh.model.shape import CAST_BYTES, EAGER, LOSSES, Kernels, TransformerShape
from zeromesh.model.spec import (
    DTYPE_BYTES,
    ActivationSpec,
    AttentionSpec,
    BuiltFrom,
    CollectiveSpec,
    MatmulSpec,
    ModelSpec,
    PerToken,
    TensorSpec,
    UnitKind,
    UnitSpec,
)
from zeromesh.parallel import WHOLE, Parallel

_INDEX_BYTES = 8  # token ids are int64
_FP32 = 4


def build(
    shape: TransformerShape, *, dtype: str = "bf16", kernels: Kernels = EAGER, parallel: Parallel = WHOLE
) -> ModelSpec:
    """Returns the units of a transformer that computes in `dtype`: one rank's part, with the collectives of tp and ep
    ([Note: Tensor parallel]). Their degrees must divide the shape."""
    width, whole, tp = DTYPE_BYTES[dtype], shape, parallel.tp
    shape = replace(
        shape, heads=shape.heads // tp, kv_heads=shape.kv_heads // tp, ffn=shape.ffn // tp, vocab=shape.vocab // tp
    )
    units = [_root(shape, width, kernels, parallel)]
    if not shape.tied:
        units.append(_embedding(shape, width, parallel))
    units.append(_block(shape, width, kernels, parallel))
    if not shape.tied:
        units.append(_head(shape, width, kernels, parallel))
    return ModelSpec(
        name=shape.name,
        units=tuple(units),
        hidden=shape.hidden,
        num_layers=shape.layers,
        vocab=shape.vocab,
        dtype=dtype,
        max_seq_len=shape.max_positions or None,
        source=shape.source,
        built_from=BuiltFrom(shape=whole, kernels=kernels),
    )


def _spread(parallel: Parallel) -> int:
    """The number of parts that a tensor of h elements per token is divided into."""
    return parallel.tp if parallel.sequence_parallel else 1


def _root(shape: TransformerShape, width: float, kernels: Kernels, parallel: Parallel) -> UnitSpec:
    naming, spread = shape.naming, _spread(parallel)
    tensors = _norm_tensors(shape, naming.final_norm)
    if shape.max_positions:
        tensors = (_lookup(naming.positions, shape.max_positions, shape.hidden), *tensors)
    matmuls: tuple[MatmulSpec, ...] = ()
    saved = PerToken(constant=_norm_kept(shape, width, kernels, parallel))  # its output is part of the head's
    working = PerToken(constant=2 * width * shape.hidden / spread)
    traffic = _norm_traffic(shape, width, kernels) / spread
    collectives: tuple[CollectiveSpec, ...] = ()
    if shape.tied:
        tensors = (TensorSpec(name=f"{naming.embedding}.weight", shape=(shape.vocab, shape.hidden)), *tensors)
        matmuls = (_head_matmul(shape),)
        saved += PerToken(constant=2 * _INDEX_BYTES + _head_saved(shape, width, kernels, parallel))
        collectives = (*_embedding_collectives(shape, parallel), *_head_collectives(shape, parallel, kernels))
        saved += PerToken(constant=shape.hidden if shape.dropouts_per_block else 0)  # the embeddings' dropout mask
        _, made, moved = _logits(shape, width, kernels)
        working = PerToken(constant=made)
        traffic += moved
    return UnitSpec(
        name="",
        kind=UnitKind.ROOT,
        tensors=tensors,
        matmuls=matmuls,
        activations=_same_saved(width * shape.hidden / spread, saved, working, traffic),
        collectives=collectives,
    )


def _embedding(shape: TransformerShape, width: float, parallel: Parallel) -> UnitSpec:
    output = width * shape.hidden / _spread(parallel)
    return UnitSpec(
        name=shape.naming.embedding,
        kind=UnitKind.EMBEDDING,
        tensors=(_lookup("", shape.vocab, shape.hidden),),
        activations=_same_saved(output, PerToken(constant=_INDEX_BYTES), PerToken(), 2 * output),
        collectives=_embedding_collectives(shape, parallel),
    )


def _head(shape: TransformerShape, width: float, kernels: Kernels, parallel: Parallel) -> UnitSpec:
    saved = PerToken(constant=_INDEX_BYTES + _head_saved(shape, width, kernels, parallel))
    _, made, moved = _logits(shape, width, kernels)
    return UnitSpec(
        name=shape.naming.head,
        kind=UnitKind.HEAD,
        tensors=(TensorSpec(name="weight", shape=(shape.vocab, shape.hidden)),),
        matmuls=(_head_matmul(shape),),
        activations=_same_saved(width * shape.vocab, saved, PerToken(constant=made), moved),
        collectives=_head_collectives(shape, parallel, kernels),
    )


def _block(shape: TransformerShape, width: float, kernels: Kernels, parallel: Parallel) -> UnitSpec:
    naming = shape.naming
    matmuls = (*_attention_matmuls(shape), *_mlp_matmuls(shape, parallel.ep))
    unit = UnitSpec(
        name=f"{naming.blocks}.0",
        kind=UnitKind.BLOCK,
        tensors=(
            *(tensor for layer in matmuls for tensor in _layer_tensors(shape, layer, parallel.ep)),
            *_norm_tensors(shape, naming.norm_1),
            *_norm_tensors(shape, naming.norm_2),
        ),
        matmuls=matmuls,
        attention=AttentionSpec(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            fused=_fused(shape, kernels),
        ),
        activations=_block_activations(shape, width, kernels, parallel, matmuls),
        count=shape.layers,
        collectives=_block_collectives(shape, parallel, kernels),
    )
    return in_codes(in_products(unit, kernels.products), shape.code_bits)


def in_codes(unit: UnitSpec, bits: int) -> UnitSpec:
    """Returns a unit whose matrices are frozen codes of `bits` bits, packed into bytes. 0 changes nothing."""

    def coded(tensor: TensorSpec) -> TensorSpec:
        if not bits or len(tensor.shape) < 2 or tensor.lookup:
            return tensor
        *rows, columns = tensor.shape
        return replace(tensor, shape=(*rows, -(-columns * bits // 8)), dtype="code u8", packed=8 // bits)

    return replace(unit, tensors=tuple(map(coded, unit.tensors)))


def in_products(unit: UnitSpec, dtype: str) -> UnitSpec:
    """Returns a block whose products are in another dtype than its activations, so that their inputs are cast."""
    if not dtype:
        return unit
    moved = CAST_BYTES[dtype] * sum(m.inner * m.rows_per_token * m.count for m in unit.matmuls)
    acts = unit.activations
    acts = replace(acts, elementwise=acts.elementwise + PerToken(constant=moved))
    return replace(unit, matmuls=tuple(replace(m, dtype=dtype) for m in unit.matmuls), activations=acts)


# Parameters ---------------------------------------------------------------------------------------------------------


def _lookup(name: str, rows: int, hidden: int) -> TensorSpec:
    return TensorSpec(name=f"{name}.weight" if name else "weight", shape=(rows, hidden), lookup=True)


def _norm_tensors(shape: TransformerShape, name: str) -> tuple[TensorSpec, ...]:
    weight = TensorSpec(name=f"{name}.weight", shape=(shape.hidden,))
    bias = TensorSpec(name=f"{name}.bias", shape=(shape.hidden,))
    return (weight, bias) if shape.norm_bias else (weight,)


def _layer_tensors(shape: TransformerShape, layer: MatmulSpec, ep: int) -> tuple[TensorSpec, ...]:
    """The parameters of a product in a block."""
    naming = shape.naming
    if layer.name in _EXPERTS:
        share, sizes = shape.experts_per_token / shape.experts, (layer.count, layer.outer, layer.inner)
        return (TensorSpec(name=layer.name, shape=sizes, active_share=share, ep=ep),)
    biased = {naming.output: shape.output_bias}
    biased |= dict.fromkeys((naming.query, naming.key, naming.value), shape.qkv_bias)
    biased |= dict.fromkeys((naming.gate, naming.up, naming.down), shape.mlp_bias)
    across = (layer.inner, layer.outer) if naming.transposed else (layer.outer, layer.inner)
    weight = TensorSpec(name=f"{layer.name}.weight", shape=across)
    bias = TensorSpec(name=f"{layer.name}.bias", shape=(layer.outer,))
    return (weight, bias) if biased.get(layer.name) else (weight,)


# Matrix products ----------------------------------------------------------------------------------------------------


_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""One tensor for the gate and up weights of all experts, and one for their down weights, as in transformers 5."""


def _attention_matmuls(shape: TransformerShape) -> tuple[MatmulSpec, ...]:
    naming, query, kv = shape.naming, shape.query_size, shape.kv_size
    sizes = {naming.query: query, naming.key: kv, naming.value: kv} if naming.key else {naming.query: query + 2 * kv}
    heads = (MatmulSpec(name=name, inner=shape.hidden, outer=size) for name, size in sizes.items())
    return (*heads, MatmulSpec(name=naming.output, inner=query, outer=shape.hidden))


def _mlp_matmuls(shape: TransformerShape, ep: int) -> tuple[MatmulSpec, ...]:
    naming, hidden, ffn = shape.naming, shape.hidden, shape.ffn
    if not shape.experts:
        into = (naming.gate, naming.up) if shape.gated else (naming.up,)
        layers = (MatmulSpec(name=name, inner=hidden, outer=ffn) for name in into)
        return (*layers, MatmulSpec(name=naming.down, inner=ffn, outer=hidden))
    # Tokens of all ranks that share the experts come to each: as many rows in total, for fewer experts.
    rows, experts = ep * shape.experts_per_token / shape.experts, shape.experts // ep
    stacks = (
        MatmulSpec(name=name, inner=inner, outer=outer, rows_per_token=rows, count=experts)
        for name, (inner, outer) in zip(_EXPERTS, ((hidden, 2 * ffn), (ffn, hidden)), strict=True)
    )
    return (MatmulSpec(name="mlp.gate", inner=hidden, outer=shape.experts), *stacks)


def _head_matmul(shape: TransformerShape) -> MatmulSpec:
    return MatmulSpec(name=shape.naming.head, inner=shape.hidden, outer=shape.vocab)


# Activations --------------------------------------------------------------------------------------------------------


def _same_saved(output: float, saved: PerToken, working: PerToken, traffic: float) -> ActivationSpec:
    """The activations of a unit that is never recomputed."""
    return ActivationSpec(
        output=output,
        saved_none=saved,
        saved_selective=saved,
        saved_full=saved,
        working=working,
        elementwise=PerToken(constant=traffic),
    )


def _block_activations(
    shape: TransformerShape, width: float, kernels: Kernels, parallel: Parallel, matmuls: tuple[MatmulSpec, ...]
) -> ActivationSpec:
    spread = _spread(parallel)
    boundary = width * shape.hidden / spread
    norms = _norm_kept(shape, width, kernels, parallel) + _product_input(shape, width, kernels, parallel)
    saved = PerToken(constant=2 * norms + _mlp_saved(shape, width, kernels)) + _attention_saved(shape, width, kernels)
    saved += PerToken(constant=shape.dropouts_per_block * shape.hidden / spread)
    kept_products = sum(
        width * m.outer * m.rows_per_token * m.count for m in matmuls[0 : -1 if kernels.graph else None : 2]
    )
    if spread > 1:  # the policy also keeps the results of the two reduce-scatters
        kept_products += 2 * boundary
    kept_attention = width * shape.query_size + _FP32 * shape.heads if _fused(shape, kernels) else 0.0
    active_ffn = shape.ffn * max(1, shape.experts_per_token)
    return ActivationSpec(
        output=boundary,
        saved_none=saved,
        saved_selective=PerToken(constant=boundary + kept_products + kept_attention),
        saved_full=PerToken(constant=boundary),
        working=PerToken(
            # the gradient that arrives, and two of inner size during the activation function's backward
            constant=width * (shape.hidden + min(2.0, 1.0 + shape.activation_saves) * active_ffn),
            per_context=0.0 if _fused(shape, kernels) else (_FP32 + width) * shape.heads,
        ),
        elementwise=_block_traffic(shape, width, kernels, spread),
    )


def _fused(shape: TransformerShape, kernels: Kernels) -> bool:
    return shape.fused_attention and kernels.fused_attention


def _norm_kept(shape: TransformerShape, width: float, kernels: Kernels, parallel: Parallel) -> float:
    """Bytes that a norm keeps besides its output."""
    if shape.rms_norm and not kernels.fused_norm:
        kept = _FP32 * shape.hidden + width * shape.hidden + _FP32
    else:
        kept = width * shape.hidden + (1 if shape.rms_norm else 2) * _FP32
    return kept / _spread(parallel)


def _product_input(shape: TransformerShape, width: float, kernels: Kernels, parallel: Parallel) -> float:
    """Bytes of a norm's output, as the products after it keep it."""
    return width * shape.hidden / (_spread(parallel) if kernels.gathers_again else 1)


def _attention_saved(shape: TransformerShape, width: float, kernels: Kernels) -> PerToken:
    constant = width * 2 * (shape.query_size + shape.kv_size)
    if _fused(shape, kernels):
        return PerToken(constant=constant + _FP32 * shape.heads)
    return PerToken(constant=constant, per_context=(_FP32 + width) * shape.heads)


def _mlp_saved(shape: TransformerShape, width: float, kernels: Kernels) -> float:
    gated = 3.0 if kernels.fused_activation else 4.0
    inner = gated if shape.gated else 1.0 + shape.activation_saves
    if not shape.experts:
        return width * inner * shape.ffn
    active = shape.experts_per_token
    # Every active expert gets a copy of the token and returns one. The router's probabilities are fp32.
    return width * active * (inner * shape.ffn + 2 * shape.hidden) + 2 * _FP32 * shape.experts


def _head_saved(shape: TransformerShape, width: float, kernels: Kernels, parallel: Parallel) -> float:
    kept, _, _ = _logits(shape, width, kernels)
    return _product_input(shape, width, kernels, parallel) + kept


def _logits(shape: TransformerShape, width: float, kernels: Kernels) -> tuple[float, ...]:
    """Bytes per token of the logits' copies: kept, made by the loss's backward, moved in the forward."""
    return tuple(shape.vocab * (width * own + _FP32 * full) for own, full in LOSSES[kernels.loss])


# Elementwise traffic, forward ---------------------------------------------------------------------------------------


def _norm_traffic(shape: TransformerShape, width: float, kernels: Kernels) -> float:
    if shape.rms_norm and not kernels.fused_norm:
        # to fp32; square; mean; multiply; to compute dtype; multiply by the weight
        return shape.hidden * ((width + 4) + (4 + 4) + 4 + (4 + 4) + (4 + width) + 2 * width)
    return 2 * width * shape.hidden


def _block_traffic(shape: TransformerShape, width: float, kernels: Kernels, spread: int) -> PerToken:
    active_ffn = shape.ffn * max(1, shape.experts_per_token)
    norms = 2 * _norm_traffic(shape, width, kernels)
    residuals = 2 * 3 * width * shape.hidden
    rotary = 0.0 if shape.max_positions else 8 * width * (shape.query_size + shape.kv_size)
    gated = 3 if kernels.fused_activation else 5
    mlp = width * active_ffn * (gated if shape.gated else 2 * shape.activation_saves)
    constant = (norms + residuals) / spread + rotary + mlp
    if _fused(shape, kernels):
        return PerToken(constant=constant)
    # A score is written; scaled; the mask added; softmax to fp32; to compute dtype; read by the next product
    # (transformers before 4.36, models/llama/modeling_llama.py, LlamaAttention.forward).
    score = width + 2 * width + 2 * width + (width + _FP32) + (_FP32 + width) + width
    return PerToken(constant=constant, per_context=score * shape.heads)


# Collectives --------------------------------------------------------------------------------------------------------


def _block_collectives(shape: TransformerShape, parallel: Parallel, kernels: Kernels) -> tuple[CollectiveSpec, ...]:
    found: list[CollectiveSpec] = []
    if parallel.tp > 1 and parallel.sequence_parallel:
        found += _summed(shape.hidden, forward=("all_gather", "reduce_scatter"), times=2)
        found += _summed(shape.hidden, backward=("all_gather", "reduce_scatter"), times=2)
        if kernels.gathers_again:
            found += _summed(shape.hidden, backward=("all_gather",), times=2)
    elif parallel.tp > 1:
        found += _summed(shape.hidden, forward=("all_reduce",), backward=("all_reduce",), times=2)
    if parallel.ep > 1:
        # Every token goes to its experts and comes back, and so do gradients.
        routed = float(shape.experts_per_token * shape.hidden)
        found += [
            CollectiveSpec(axis="ep", operation="all_to_all", elements=routed, backward=backward, times=2)
            for backward in (False, True)
        ]
    return tuple(found)


def _embedding_collectives(shape: TransformerShape, parallel: Parallel) -> tuple[CollectiveSpec, ...]:
    if parallel.tp == 1:
        return ()
    if parallel.sequence_parallel:
        return _summed(shape.hidden, forward=("reduce_scatter",), backward=("all_gather",))
    return _summed(shape.hidden, forward=("all_reduce",))


def _head_collectives(shape: TransformerShape, parallel: Parallel, kernels: Kernels) -> tuple[CollectiveSpec, ...]:
    if parallel.tp == 1:
        return ()
    if parallel.sequence_parallel:
        again = ("all_gather",) if kernels.gathers_again else ()
        return _summed(shape.hidden, forward=("all_gather",), backward=("reduce_scatter", *again))
    return _summed(shape.hidden, backward=("all_reduce",))


def _summed(
    elements: int, *, forward: tuple[str, ...] = (), backward: tuple[str, ...] = (), times: int = 1
) -> tuple[CollectiveSpec, ...]:
    return tuple(
        CollectiveSpec(
            axis="tp",
            operation=operation,
            elements=float(elements),
            backward=late,
            kept=operation == "reduce_scatter",
            times=times,
        )
        for late, operations in ((False, forward), (True, backward))
        for operation in operations
    )
