"""The end of a reduction: a finished sum is rounded once and written to its destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a sum goes, rounded once to the dtype of `out`."""

    out: Tensor  # as long as the chunk
    scale: float  # factor of the sum
    accumulate: bool  # whether to add to the values in `out`

    def add_up(self, terms: Sequence[Tensor], part: slice, total: Tensor, widened: Tensor) -> None:
        """Sums two or more `terms` in order into `out[part]`. All are equally long; one may be `out[part]` itself.

        `total` is memory in the wide dtype for the sum, at least as long; `widened` is the same for one term.
        """
        numel = terms[0].numel()
        total, widened = total[:numel], widened[:numel]
        if terms[0].dtype == total.dtype:
            torch.add(terms[0], terms[1], out=total)
            rest = terms[2:]
        else:
            total.copy_(terms[0])
            rest = terms[1:]
        for term in rest:
            _add(total, term, widened)
        self.store(total, part, widened)

    def take(self, total: Tensor, part: slice = slice(None)) -> None:
        """Scales a finished sum of any dtype, which is overwritten, and brings it to `out[part]`, where it may lie
        already."""
        out = self.out[part]
        if self.accumulate:
            out.add_(total if self.scale == 1 else total.mul_(self.scale))
        elif self.scale != 1:
            torch.mul(total, self.scale, out=out)
        elif total.data_ptr() != out.data_ptr():
            out.copy_(total)

    def store(self, total: Tensor, part: slice, widened: Tensor) -> None:
        """Scales a finished sum, which is overwritten, and writes it to `out[part]`."""
        out = self.out[part]
        if self.scale != 1:
            total.mul_(self.scale)
        if self.accumulate and out.dtype == total.dtype:
            out.add_(total)
            return
        if self.accumulate:
            _add(total, out, widened)
        out.copy_(total)


def _add(total: Tensor, term: Tensor, widened: Tensor) -> None:
    """Adds a term after widening it, which loses nothing.

    On the CPU it is widened into `widened`, which stays in cache; torch would allocate memory. A device's kernel widens
    as it loads, so each term is one launch. One `torch.sum` for all terms would not add in their order.
    """
    narrow = term.dtype != total.dtype and total.is_cpu
    total.add_(widened.copy_(term) if narrow else term)
