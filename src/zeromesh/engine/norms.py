"""Gradient norms over sharded parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.engine.control import Span, reduce_over
from zeromesh.errors import InputError


def slice_norms(slices: Sequence[Tensor], spans: Sequence[tuple[Span, ...]], order: float) -> list[Tensor]:
    """Norms of the tensors that `slices` are this rank's parts of, one 0-d tensor each; the same on every rank.

    A sum over a span's ranks counts each element as often as there are copies of it, which are bit-equal.

    Args:
        slices: 1-D, in the same order on every rank.
        spans: of each, what its tensor is divided over.
        order: p of the p-norm, above 0; infinity for the maximum.

    Raises:
        InputError: the order is not above 0.
    """
    if not order > 0:
        raise InputError(f"the order of a norm over sharded parameters must be above 0, or inf; got {order}")
    if not slices:  # alike on every rank
        return []
    dtype = torch.promote_types(slices[0].dtype, torch.float32)
    powers = _powers(slices, order)
    members: dict[Span, list[int]] = defaultdict(list)
    for index, own in enumerate(spans):
        for span in own:
            members[span].append(index)
    for span, indices in members.items():
        if span.group is not None:
            reduce = _largest if math.isinf(order) else _total
            every = len(indices) == len(slices)
            found = reduce(powers if every else powers[indices], span)
            powers = found if every else powers.index_copy(0, torch.tensor(indices, device=powers.device), found)
    return list((powers if math.isinf(order) else powers.pow(1 / order)).to(dtype))


def _total(powers: Tensor, span: Span) -> Tensor:
    return reduce_over(span.group, powers) / span.copies


def _largest(values: Tensor, span: Span) -> Tensor:
    """A maximum over ranks drops nan or keeps it by their order."""
    unknown = values.isnan()
    words = torch.cat([values.masked_fill(unknown, 0.0), unknown.double()])
    largest, unknowns = reduce_over(span.group, words, dist.ReduceOp.MAX).chunk(2)
    return largest.masked_fill(unknowns > 0, math.nan)


def _powers(slices: Sequence[Tensor], order: float) -> Tensor:
    """Sums of p-th powers of magnitudes (infinity: the largest), in fp64: squares of fp32 neither overflow nor round. A
    few kernels for all slices, which are as many as a model has parameters."""
    nothing = torch.zeros((), dtype=torch.float64, device=slices[0].device)
    filled = [tensor for tensor in slices if tensor.numel()]
    found = iter(torch._foreach_norm(filled, order, torch.float64) if filled else ())
    norms = torch.stack([next(found) if tensor.numel() else nothing for tensor in slices])
    return norms if math.isinf(order) else norms.pow(order)
