"""Tokens as a model takes them: rows of one length, cut from a stream or made of whole documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zeromesh.train.packing import pack

NOT_LEARNED = -100
"""The target of a position that counts nothing; torch's own default."""


class Batch(NamedTuple):
    """Some rows, int64, each of shape [rows, seq_len].

    Args:
        inputs: tokens.
        targets: the token after each; `NOT_LEARNED` where none is learned.
        positions: from 0 in each document of a row; None where a row is all one text.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None


class Rows(Protocol):
    """What a run draws its samples from."""

    @property
    def seq_len(self) -> int:
        """Inputs a row."""
        ...

    @property
    def tokens(self) -> Tensor:
        """Of all documents, one after another, int32."""
        ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch: ...

    def targets(self, indices: Iterable[int]) -> int:
        """How many tokens are learned in these rows."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """A stream of tokens cut into sequences: the last target of one is the first input of the next.

    Args:
        tokens: int32, shape [tokens].
        seq_len: inputs a sequence.
        learned: uint8, of the same shape; None for all.
    """

    tokens: Tensor
    seq_len: int
    learned: Tensor | None = None

    def __len__(self) -> int:
        return max(0, (self.tokens.numel() - 1) // self.seq_len)

    def batch(self, indices: Sequence[int]) -> Batch:
        places = torch.tensor(indices).unsqueeze(1) * self.seq_len + torch.arange(self.seq_len + 1)
        rows = self.tokens[places].long()
        targets = rows[:, 1:]
        if self.learned is not None:
            targets = targets.masked_fill(self.learned[places[:, 1:]] == 0, NOT_LEARNED)
        return Batch(rows[:, :-1], targets)

    def targets(self, indices: Iterable[int]) -> int:
        if self.learned is None:
            return self.seq_len * sum(1 for _ in indices)
        starts = (index * self.seq_len + 1 for index in indices)
        return sum(int(self.learned[start : start + self.seq_len].count_nonzero()) for start in starts)


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Whole documents side by side, and the first `seq_len` + 1 tokens of longer ones.

    Args:
        tokens: int32, shape [tokens].
        seq_len: inputs a row.
        starts: where each document begins, and where the last ends; shape [documents + 1].
        learned: as `Sequences` has it.
    """

    tokens: Tensor
    seq_len: int
    starts: npt.NDArray[np.int64]
    learned: Tensor | None = None

    @cached_property
    def _lengths(self) -> npt.NDArray[np.int64]:
        """Inputs of each document; each but its last token is one."""
        lengths: npt.NDArray[np.int64] = np.minimum(np.diff(self.starts) - 1, self.seq_len)
        return lengths

    @cached_property
    def _targets(self) -> npt.NDArray[np.int64]:
        """Learned tokens of each document."""
        if self.learned is None:
            return np.maximum(self._lengths, 0)
        marks = self.learned.numpy()
        spans = zip(self.starts[:-1].tolist(), self._lengths.tolist(), strict=True)
        return np.array([np.count_nonzero(marks[first + 1 : first + 1 + n]) for first, n in spans], dtype=np.int64)

    @cached_property
    def _rows(self) -> list[list[int]]:
        kept = np.flatnonzero(self._targets)
        return [[int(kept[i]) for i in row] for row in pack(self._lengths[kept].tolist(), self.seq_len)]

    @property
    def left_out(self) -> int:
        """Documents in whose first `seq_len` tokens nothing is learned."""
        return int(np.count_nonzero(self._targets == 0))

    @property
    def cut_off(self) -> int:
        """Documents that are longer."""
        return int(np.count_nonzero(np.diff(self.starts) - 1 > self.seq_len))

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int]) -> Batch:
        shape = (len(indices), self.seq_len)
        inputs, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        targets = torch.full(shape, NOT_LEARNED, dtype=torch.int64)
        for row, index in enumerate(indices):
            place = 0
            for document in self._rows[index]:
                first, count = int(self.starts[document]), int(self._lengths[document])
                here, ids = slice(place, place + count), self.tokens[first : first + count + 1].long()
                inputs[row, here], targets[row, here] = ids[:-1], ids[1:]
                positions[row, here] = torch.arange(count)
                if self.learned is not None:
                    targets[row, here].masked_fill_(self.learned[first + 1 : first + count + 1] == 0, NOT_LEARNED)
                place += count
            positions[row, place:] = torch.arange(self.seq_len - place)  # what fills the row is a document too
        return Batch(inputs, targets, positions)

    def targets(self, indices: Iterable[int]) -> int:
        return sum(int(self._targets[document]) for index in indices for document in self._rows[index])
