"""The few words that the ranks of a mesh exchange beside the data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.errors import CommunicationError, MismatchError

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The ranks of the mesh, for the few words that they exchange beside the data.

    Args:
        group: of all ranks of the mesh; None on a single rank.
        size: number of ranks.
        rank: of this one in the mesh, innermost axis fastest.
        source: global rank of the mesh's first.
        device: of what is exchanged.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int
    source: int
    device: torch.device

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """`values` reduced over all ranks of the mesh, in place."""
        if self.group is not None:
            with self._naming():
                dist.all_reduce(values, op=operation, group=self.group)
        return values

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank} could not agree with the other {self.size - 1} of the mesh: one has died, has "
                f"stalled or has raised an error of its own, which then says why. [{error}]"
            ) from error

    def words(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """`values` on the ranks' device, which need not have come to them for this to return."""
        pinned = self.device.type != "cpu"  # a copy from other memory waits for all that the device has to do
        held = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned)
        return held.to(self.device, non_blocking=pinned)

    def agree(self, values: Sequence[int]) -> list[int]:
        """The highest of each of `values` on any rank."""
        return list(values) if self.group is None else self._exchange(values, torch.int32, dist.ReduceOp.MAX)

    def total(self, value: float) -> float:
        """The sum of all ranks' values."""
        return value if self.group is None else self._exchange([value], torch.float64, dist.ReduceOp.SUM)[0]

    def _exchange(self, values: Sequence[float], dtype: torch.dtype, operation: dist.ReduceOp.RedOpType) -> list[Any]:
        """The host waits for the other ranks' hosts, and not for what the devices have to do: the words have a stream
        of their own."""
        with nullcontext() if self.device.type == "cpu" else _stream(self.device):
            found: list[Any] = self.reduce(self.words(values, dtype), operation).tolist()
        return found

    def broadcast(self, values: Tensor) -> None:
        """The first rank's values, to all; of any dtype and strides."""
        if self.group is not None and values.numel():
            sent = values.contiguous()
            # As bytes: gloo knows fewer dtypes than torch.
            dist.broadcast(sent.view(-1).view(torch.uint8), src=self.source, group=self.group)
            if sent is not values:
                values.copy_(sent)

    def say(self, value: ResultT) -> ResultT:
        """What the first rank says, on every rank."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, src=self.source, group=self.group)
        return values[0]

    def together(self, attempt: Callable[[], ResultT], *, left: str = "Nothing was sharded") -> ResultT:
        """What `attempt` returns, if it raises nothing on any rank. `left` says what has become of the model else.

        Raises:
            Exception: that of this rank's attempt.
            MismatchError: on all other ranks, with the reason; they would wait for this one else.
        """
        try:
            result = attempt()
        except Exception as error:
            with suppress(RuntimeError):  # this rank's own error says more than that the others are gone
                self.gather(f"{type(error).__name__}: {error}")
            raise
        for rank, reason in enumerate(self.gather("")):
            if reason:
                raise MismatchError(
                    f"zm.shard must succeed on all ranks; on rank {rank} it did not: {reason}. {left}: "
                    f"start every rank with the same model and arguments"
                )
        return result

    def gather(self, value: ResultT) -> list[ResultT]:
        """Every rank's."""
        values = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def require_same(self, what: str, text: str) -> None:
        """Raises MismatchError on every rank if `text` differs between ranks."""
        # Thousands of ranks compare a word each; texts are exchanged only to say what differs.
        word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        words = torch.tensor([word, -word], dtype=torch.int64, device=self.device)
        highest, lowest = self.reduce(words, dist.ReduceOp.MAX).tolist()
        if highest == -lowest:
            return
        texts = self.gather(text)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise MismatchError(
                    f"all ranks must have the same {what}; rank 0 has {_differing(texts[0], other)}, "
                    f"rank {rank} has {_differing(other, texts[0])}: start every rank with the same arguments"
                )


@cache
def _stream(device: torch.device) -> torch.Stream:
    """One for all steps: memory that is freed on a stream is used again by that stream alone."""
    return torch.Stream(device)


def _differing(text: str, other: str) -> str:
    lines, others = text.splitlines(), other.splitlines()
    missing = "; ".join(line for line in lines if line not in set(others))[:200]
    return repr(missing or ("another order" if sorted(lines) == sorted(others) else "fewer entries"))
