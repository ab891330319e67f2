"""Sums of the messages of several ranks, in a wide dtype, in a fixed order, a cache-sized part at a time."""

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
        return cls.of(workspace, wire, wide, terms=terms, numel=numel)

    @classmethod
    def of(cls, workspace: Tensor, wire: torch.dtype, wide: torch.dtype, *, terms: int, numel: int) -> SumScratch:
        """For terms in parts of `numel`, for which there is room."""
        apart = -(-numel // ALIGN) * ALIGN * wide.itemsize
        total, widened = (workspace[i * apart :][: numel * wide.itemsize].view(wide) for i in range(2))
        received = workspace[2 * apart :][: terms * numel * wire.itemsize].view(wire)
        each = [received[i * numel : (i + 1) * numel] for i in range(terms)]
        return cls(numel=numel, received=received, terms=each, total=total, widened=widened)
