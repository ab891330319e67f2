"""Rates of the work that a model's micro-batch consists of, on each rank while all others of its machine do the same.

Products and attention are timed at the model's own shapes. What is left of a block's time, once theirs is taken off,
is what its elementwise kernels and their calls take: that over the bytes which the cost model counts for them is their
rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeromesh.cluster import Device, Kernel
from zeromesh.cost import ComputeModel, default_constants
from zeromesh.cost.compute import causal_share
from zeromesh.launch.ranks import Ranks
from zeromesh.measure.llama import make_block
from zeromesh.measure.machine import DTYPES, rates
from zeromesh.measure.work import Work
from zeromesh.model.spec import AttentionSpec, Recomputation
from zeromesh.model.transformer import build

MOST_HOST_FLOPS = 4e10
"""Of a block's forward on processor cores: about a second of one."""

_AT_ONCE = 1e30

LEAST_REST = 0.05
"""Of a block's time, for what is elementwise, where noise leaves less."""


def measure_kernels(ranks: Ranks, work: Work) -> list[dict[str, Any]]:
    """A task of `launch`: kernels as dictionaries, the same on all ranks."""
    if ranks.on_cpu:
        work = work.capped(MOST_HOST_FLOPS)
    found = [kernel for dtype in work.dtypes for kernel in _of_dtype(ranks, work, dtype)]
    return [asdict(kernel) for kernel in (*found, _optimizer(ranks, work.elements))]


def _of_dtype(ranks: Ranks, work: Work, dtype: str) -> Iterator[Kernel]:
    own = work.llama
    ours = {(1.0, own.hidden, own.hidden), (1.0, own.hidden, own.intermediate), (1.0, own.intermediate, own.hidden)}
    products = [_product(ranks, work, dtype, *shape) for shape in sorted({*work.products, *ours})]
    attention = _attention(ranks, work, dtype)
    yield from (*products, attention, _elementwise(ranks, work, dtype, (*products, attention)))


def _seconds(call: Callable[[], object], ranks: Ranks) -> float:
    """Of one call: the mean of all ranks on cores that they share, else the slowest's."""
    figure = statistics.mean if ranks.on_cpu else min
    return 1 / figure(rates(call, 1.0, ranks))


def _product(ranks: Ranks, work: Work, dtype: str, rows_per_token: float, inner: int, outer: int) -> Kernel:
    rows = max(1, round(rows_per_token * work.sequences * work.tokens))
    x, weight, gradient = (_random(ranks, dtype, shape) for shape in ((rows, inner), (outer, inner), (rows, outer)))
    forward = _seconds(lambda: functional.linear(x, weight), ranks)
    backward = _seconds(lambda: (gradient @ weight, gradient.t() @ x), ranks)
    flops = 2.0 * rows * inner * outer
    return Kernel(
        kind="product",
        dtype=dtype,
        shape=(rows, inner, outer),
        forward=flops / forward,
        backward=2 * flops / backward,
    )


def _attention(ranks: Ranks, work: Work, dtype: str) -> Kernel:
    shape = (work.sequences, work.heads, work.tokens, work.head_dim)
    query, key, value, gradient = (_random(ranks, dtype, shape) for _ in range(4))
    inputs = [each.requires_grad_() for each in (query, key, value)]

    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    forward = _seconds(attend, ranks)
    out = attend()
    backward = _seconds(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True), ranks)
    spec = AttentionSpec(heads=work.heads, kv_heads=work.heads, head_dim=work.head_dim)
    share = work.sequences * work.tokens * causal_share(spec, work.tokens)
    return Kernel(
        kind="attention",
        dtype=dtype,
        shape=(work.tokens, work.head_dim),
        forward=spec.forward_flops(work.tokens) * share / forward,
        backward=spec.backward_flops(work.tokens) * share / backward,
    )


def _elementwise(ranks: Ranks, work: Work, dtype: str, others: tuple[Kernel, ...]) -> Kernel:
    """What is left of a block."""
    block = make_block(work.llama).to(ranks.device, DTYPES[dtype])
    shape = (work.sequences, work.tokens, work.llama.hidden)
    x, gradient = _random(ranks, dtype, shape).requires_grad_(), _random(ranks, dtype, shape)
    wanted = [x, *block.parameters()]
    whole = _seconds(lambda: block(x), ranks)
    out = block(x)
    backward = _seconds(lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True), ranks)
    # The same block as the cost model has it, on a device whose elementwise kernels take no time.
    spec = next(unit for unit in build(work.llama.transformer, dtype=dtype).units if unit.attention is not None)
    tokens = work.sequences * work.tokens
    moved = spec.activations.elementwise.at(work.tokens) * tokens
    known = _without_rest(dtype, others).unit(
        spec, tokens=tokens, seq_len=work.tokens, recomputation=Recomputation.NONE
    )
    return Kernel(
        kind="elementwise",
        dtype=dtype,
        forward=moved / max(whole - known.forward, LEAST_REST * whole),
        backward=2 * moved / max(backward - known.backward, LEAST_REST * backward),
    )


def _without_rest(dtype: str, kernels: tuple[Kernel, ...]) -> ComputeModel:
    free = Kernel(kind="elementwise", dtype=dtype, forward=_AT_ONCE, backward=_AT_ONCE)
    device = Device(name="", memory_bytes=1.0, peak_flops={dtype: _AT_ONCE}, kernels=(*kernels, free))
    return ComputeModel(device=device, constants=default_constants(), dtype=dtype)


def _optimizer(ranks: Ranks, elements: int) -> Kernel:
    params = [nn.Parameter(torch.zeros(elements, device=ranks.device))]
    params[0].grad = torch.ones_like(params[0])
    optimizer = torch.optim.AdamW(params, fused=True)
    seconds = _seconds(optimizer.step, ranks)
    rate = default_constants().optimizer_bytes * elements / seconds
    return Kernel(kind="optimizer", dtype="fp32", forward=rate, backward=rate)


def _random(ranks: Ranks, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, device=ranks.device).to(DTYPES[dtype])
