"""Gradient norms over sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.errors import InputError

if TYPE_CHECKING:
    from zeromesh.engine.engine import Engine


def slice_norms(engine: Engine, slices: Sequence[Tensor], order: float) -> list[Tensor]:
    """Norms of the tensors that `slices` are this rank's parts of, one 0-d tensor each; the same on every rank.

    Every state shard is held by as many ranks as stage-0 axes have together, all bit-equal, so a sum over all ranks
    counts each element that often.

    Args:
        engine: of the model they belong to.
        slices: 1-D, in the same order on every rank.
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
    if math.isinf(order):
        # A maximum over ranks drops nan or keeps it by their order.
        unknown = powers.isnan()
        words = torch.cat([powers.masked_fill(unknown, 0.0), unknown.double()])
        largest, unknowns = engine.control.reduce(words, dist.ReduceOp.MAX).chunk(2)
        return list(largest.masked_fill(unknowns > 0, math.nan).to(dtype))
    replicas = engine.schedule.layout.degree(engine.schedule.layout.replica_axes)
    total = engine.control.reduce(powers) / replicas
    return list(total.pow(1 / order).to(dtype))


def _powers(slices: Sequence[Tensor], order: float) -> Tensor:
    """Sums of p-th powers of magnitudes (infinity: the largest), in fp64: squares of fp32 neither overflow nor round. A
    few kernels for all slices, which are as many as a model has parameters."""
    nothing = torch.zeros((), dtype=torch.float64, device=slices[0].device)
    filled = [tensor for tensor in slices if tensor.numel()]
    found = iter(torch._foreach_norm(filled, order, torch.float64) if filled else ())
    norms = torch.stack([next(found) if tensor.numel() else nothing for tensor in slices])
    return norms if math.isinf(order) else norms.pow(order)
