"""The Triton kernel of exact sums: every term is read once and every sum written once, in one launch."""

# Triton has no types, compiles its functions from their source, and need not be installed.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements a program adds up: enough loads in flight for one, and few registers."""


@triton.jit
def _sum_kernel(
    terms, out, numel, stride, TERMS: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr, BLOCK_: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK_ + tl.arange(0, BLOCK_)
    inside = at < numel
    total = tl.load(terms + at, mask=inside, other=0.0).to(WIDE)
    for rank in range(1, TERMS):
        total += tl.load(terms + rank * stride + at, mask=inside, other=0.0).to(WIDE)
    total *= tl.full(total.shape, SCALE, WIDE)  # an argument would be in fp32
    if ACCUMULATE:
        total += tl.load(out + at, mask=inside, other=0.0).to(WIDE)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def sum_in_order(terms: Tensor, out: Tensor, *, scale: float, accumulate: bool) -> None:
    """Adds up the rows of `terms`, in their order and in fp32 (fp64 for fp64), times `scale`, into `out`.

    Args:
        terms: (ranks, numel), each row contiguous.
        out: of numel elements, contiguous; rounded to once.
        scale: factor of the sum.
        accumulate: add to `out`.
    """
    ranks, numel = terms.shape
    wide = tl.float64 if torch.float64 in (terms.dtype, out.dtype) else tl.float32
    _sum_kernel[(triton.cdiv(numel, BLOCK),)](
        terms, out, numel, terms.stride(0), TERMS=ranks, SCALE=scale, WIDE=wide, ACCUMULATE=accumulate, BLOCK_=BLOCK
    )
