"""Rates of the work in a training step, on each rank while all others on its machine do the same.

Products and attention are timed at the model's own shapes. So are the engine's passes over memory, for copies of
gradients and the optimizer's step. The rest of a block's time in the engine is that of its elementwise kernels, all
calls and the engine's hooks. Their rate is the bytes that the cost model counts for them, divided by that time.

[Note: Far memory] Between two uses of a weight, a step uses all others, with their gradients and states. So a weight
comes from where a model of that size leaves it. Except for the smallest models, this is beyond the caches, and so are
the activations for the backward. Calls here take their operands in turn from as much memory as a model's state fills.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import zeromesh as zm
from zeromesh.cluster.device import Device, Kernel
from zeromesh.cost.compute import ComputeModel, causal_share
from zeromesh.cost.constants import default_constants
from zeromesh.launch.ranks import Ranks
from zeromesh.measure.llama import Blocks
from zeromesh.measure.machine import rates
from zeromesh.measure.work import Work
from zeromesh.model.shape import KERNELS
from zeromesh.model.spec import AttentionSpec, Recomputation
from zeromesh.model.transformer import build
from zeromesh.modules import DTYPES

MOST_HOST_FLOPS = 4e10
"""Limit on the FLOPs of a block's forward on processor cores: about a second of one core."""

_AT_ONCE = 1e30

_FP32_BYTES = 4

_PATTERN = 1 << 16
"""Elements that are drawn and repeated: drawing all would take seconds."""

_ALIGNED = 64
"""Elements to which tensors are aligned: a cache line."""

LEAST_REST = 0.05
"""Least share of a block's time that counts as elementwise, if noise leaves less."""


MOST_BLOCKS = 16

STATE_BYTES = 16
"""Bytes of state per element: parameter, gradient and two moments."""


def measure_kernels(ranks: Ranks, work: Work) -> list[dict[str, Any]]:
    """A task of `launch`. Returns kernels as dictionaries, the same on all ranks."""
    if ranks.on_cpu:
        work = work.capped(MOST_HOST_FLOPS)
    return [asdict(kernel) for dtype in work.dtypes for kernel in _of_dtype(ranks, work, dtype)]


class _Far:
    """Hands out operands from far memory: [Note: Far memory]."""

    def __init__(self, ranks: Ranks, work: Work, dtype: str) -> None:
        rows = work.sequences * work.tokens
        largest = max(max(m * rows * inner, inner * outer) for m, inner, outer in work.all_products)
        numel = max(STATE_BYTES * work.elements // DTYPES[dtype].itemsize, round(largest))
        pattern = _random(ranks, dtype, (_PATTERN,))
        self._memory = pattern.repeat(-(-numel // _PATTERN))
        self._at = 0

    def take(self, *shape: int) -> Tensor:
        """The next tensor of this shape."""
        start = self._at if self._at + prod(shape) <= self._memory.numel() else 0
        self._at = start + -(-prod(shape) // _ALIGNED) * _ALIGNED
        return self._memory[start : start + prod(shape)].view(shape)


def _of_dtype(ranks: Ranks, work: Work, dtype: str) -> Iterator[Kernel]:
    far = _Far(ranks, work, dtype)
    products = [_product(ranks, work, dtype, far, *shape) for shape in work.all_products]
    known = (*products, _attention(ranks, work, dtype), _gradients(ranks, work, dtype))
    yield from (*known, _elementwise(ranks, work, dtype, known), _optimizer(ranks, work.elements, dtype))


def _seconds(call: Callable[[], object], ranks: Ranks) -> float:
    """Seconds of one call: the mean over ranks if they share cores, else the slowest rank's."""
    figure = statistics.mean if ranks.on_cpu else min
    return 1 / figure(rates(call, 1.0, ranks))


def _product(ranks: Ranks, work: Work, dtype: str, far: _Far, rows_per_token: float, inner: int, outer: int) -> Kernel:
    rows = max(1, round(rows_per_token * work.sequences * work.tokens))
    x, gradient = (_random(ranks, dtype, (rows, size)) for size in (inner, outer))
    made = deque[Tensor](maxlen=max(1, work.block_params // (inner * outer)))

    def backward() -> None:
        made.append(gradient.t() @ far.take(rows, inner))  # each in memory of its own, until its unit's are collected
        gradient @ far.take(outer, inner)

    forward_s = _seconds(lambda: functional.linear(x, far.take(outer, inner)), ranks)
    backward_s = _seconds(backward, ranks)
    flops = 2.0 * rows * inner * outer
    return Kernel(
        kind="product",
        dtype=dtype,
        shape=(rows, inner, outer),
        forward=flops / forward_s,
        backward=2 * flops / backward_s,
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
    """Measures the rest of a block, over several blocks that the engine runs on each rank separately."""
    count = _blocks(ranks, work, dtype)
    blocks = Blocks(work.llama, count).to(ranks.device)
    if work.kernels == "compiled":
        for block in blocks.layers:
            block.compile()
    param_dtype = None if dtype == "fp32" else DTYPES[dtype]
    # The mesh is this rank only: it trains separately, on its share of the machine.
    mesh = DeviceMesh(ranks.device.type, torch.tensor([ranks.rank]), mesh_dim_names=("node",), _init_backend=False)
    model = zm.shard(blocks, mesh, "node=0", param_dtype=param_dtype, bucket_bytes=0)
    shape = (work.sequences, work.tokens, work.llama.hidden)
    x, gradient = _random(ranks, dtype, shape).requires_grad_(), _random(ranks, dtype, shape)

    def step() -> None:
        model(x).backward(gradient)
        zm.zero_grad(model)
        x.grad = None

    step()  # the engine learns the order of units in it
    forward_s, step_s = _seconds(lambda: model(x), ranks) / count, _seconds(step, ranks) / count
    backward_s = max(step_s - forward_s, LEAST_REST * step_s)
    # Describes the same block by the cost model, on a device whose elementwise kernels take no time.
    units = build(work.llama, dtype=dtype, kernels=KERNELS[work.kernels]).units
    spec = next(unit for unit in units if unit.attention is not None)
    tokens = work.sequences * work.tokens
    moved = spec.activations.elementwise.at(work.tokens) * tokens
    known = _without_rest(dtype, others).unit(
        spec, tokens=tokens, seq_len=work.tokens, recomputation=Recomputation.NONE
    )
    copied = next(kernel for kernel in others if kernel.kind == "gradients").forward
    backward_rest_s = backward_s - known.backward - _gradient_bytes(work.block_params, dtype) / copied
    return Kernel(
        kind="elementwise",
        dtype=dtype,
        forward=moved / max(forward_s - known.forward, LEAST_REST * forward_s),
        backward=2 * moved / max(backward_rest_s, LEAST_REST * backward_s),
    )


def _blocks(ranks: Ranks, work: Work, dtype: str) -> int:
    """As many blocks as fill the state's memory, if their time is bearable."""
    filling = STATE_BYTES * work.elements // _gradient_bytes(work.block_params, dtype)
    bearable = MOST_HOST_FLOPS / work.block_flops if ranks.on_cpu else MOST_BLOCKS
    return max(1, min(MOST_BLOCKS, filling, int(bearable)))


def _without_rest(dtype: str, kernels: tuple[Kernel, ...]) -> ComputeModel:
    free = Kernel(kind="elementwise", dtype=dtype, forward=_AT_ONCE, backward=_AT_ONCE)
    device = Device(name="", memory_bytes=1.0, peak_flops={dtype: _AT_ONCE}, kernels=(*kernels, free))
    return ComputeModel(device=device, constants=default_constants(), dtype=dtype)


def _gradients(ranks: Ranks, work: Work, dtype: str) -> Kernel:
    """Measures a block's gradients on the way from autograd to a buffer in fp32: copied, and added to its contents."""
    shapes = [parameter.shape for parameter in Blocks(work.llama, 1).parameters()]
    left, far = [_random(ranks, dtype, shape) for shape in shapes], _Far(ranks, work, "fp32")
    copied = _seconds(lambda: torch._foreach_copy_([far.take(*shape) for shape in shapes], left), ranks)
    added = _seconds(lambda: torch._foreach_add_([far.take(*shape) for shape in shapes], left), ranks)
    numel = work.block_params
    return Kernel(
        kind="gradients",
        dtype=dtype,
        forward=_gradient_bytes(numel, dtype) / copied,
        backward=(_gradient_bytes(numel, dtype) + numel * _FP32_BYTES) / added,
    )


def _gradient_bytes(numel: int, dtype: str) -> int:
    """Bytes read and written by a copy of gradients."""
    return numel * (DTYPES[dtype].itemsize + _FP32_BYTES)


def _optimizer(ranks: Ranks, elements: int, dtype: str) -> Kernel:
    """Includes the cast of the changed parameters, if the model does not compute in fp32."""
    params = [nn.Parameter(torch.zeros(elements, device=ranks.device))]
    params[0].grad = torch.ones_like(params[0])
    optimizer = torch.optim.AdamW(params, fused=True)
    copy = torch.empty(elements, device=ranks.device, dtype=DTYPES[dtype])

    def step() -> None:
        optimizer.step()
        if dtype != "fp32":
            copy.copy_(params[0].detach())

    rate = default_constants().optimizer_bytes * elements / _seconds(step, ranks)
    return Kernel(kind="optimizer", dtype=dtype, forward=rate, backward=rate)


def _random(ranks: Ranks, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, device=ranks.device).to(DTYPES[dtype])
