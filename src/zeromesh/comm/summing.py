"""Sums of what several ranks sent, in a wide dtype, in a fixed order, a cache-sized part at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeromesh.errors import InternalError
from zeromesh.schedule.memory import ALIGN, part_numel


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which values of these are added up."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def parts(length: int, numel: int) -> Sequence[slice]:
    """Consecutive ranges of at most `numel` that cover `length`."""
    return [slice(start, min(start + numel, length)) for start in range(0, length, numel)]


def fits(workspace: Tensor, term: Tensor, wide: torch.dtype, *, terms: int) -> bool:
    """Whether `SumScratch.whole` finds room for terms as long as this one."""
    return _padded(term.numel()) * (2 * wide.itemsize + terms * term.element_size()) <= workspace.numel()


def _padded(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True, kw_only=True)
class SumScratch:
    """A workspace cut up.

    Args:
        numel: elements of one part.
        received: for received terms, in the dtype of the wire.
        terms: `received`, term by term.
        total: for sums, wide, of one part.
        widened: for one term, wide.
    """

    numel: int
    received: Tensor
    terms: Sequence[Tensor]
    total: Tensor
    widened: Tensor

    @classmethod
    def cut(cls, workspace: Tensor, wire: torch.dtype, wide: torch.dtype, *, terms: int, longest: int) -> SumScratch:
        """For terms in parts, as long as the workspace allows and at most `longest` bytes.

        Raises:
            InternalError: it has no room.
        """
        numel = part_numel(workspace.numel(), wire.itemsize, wide.itemsize, terms=terms, longest_bytes=longest)
        if numel == 0:
            raise InternalError(f"a workspace of {workspace.numel()} bytes has no room for sums of {terms} terms")
        return cls._carve(workspace, wire, wide, terms, numel)

    @classmethod
    def whole(cls, workspace: Tensor, term: Tensor, wide: torch.dtype, *, terms: int) -> SumScratch:
        """For terms in one part each, received as one tensor."""
        return cls._carve(workspace, term.dtype, wide, terms, term.numel())

    @classmethod
    def _carve(cls, workspace: Tensor, wire: torch.dtype, wide: torch.dtype, terms: int, numel: int) -> SumScratch:
        apart = _padded(numel) * wide.itemsize
        total, widened = (workspace[i * apart :][: numel * wide.itemsize].view(wide) for i in range(2))
        received = workspace[2 * apart :][: terms * numel * wire.itemsize].view(wire)
        each = [received[i * numel : (i + 1) * numel] for i in range(terms)]
        return cls(numel=numel, received=received, terms=each, total=total, widened=widened)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a sum goes: rounded once to the dtype of `out`.

    Args:
        out: of the chunk's length.
        scale: factor of the sum.
        accumulate: add to what is there.
    """

    out: Tensor
    scale: float
    accumulate: bool

    def add_up(self, terms: Sequence[Tensor], part: slice, scratch: SumScratch) -> None:
        """Sums two or more `terms` in order into `out[part]`; one of them may be `out[part]` itself."""
        numel = terms[0].numel()
        total, widened = scratch.total[:numel], scratch.widened[:numel]
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
        """Scales a finished sum, of any dtype, which is overwritten, and brings it to `out[part]`, which it may be."""
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
    """Adds a term, widened first, which loses nothing.

    On the CPU through `widened`, which stays in cache, since torch would allocate its own. A device's kernel widens
    what it loads, so a term is one launch. Not one for all terms: `torch.sum` over a dimension is not in their order.
    """
    narrow = term.dtype != total.dtype and total.is_cpu
    total.add_(widened.copy_(term) if narrow else term)
