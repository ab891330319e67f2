"""The few words that the ranks of a mesh exchange beside the data.

[Note: Beyond] A model may be spread over more ranks than the mesh that it is sharded over: those of tensor parallelism,
of pipeline stages. They are further axes, and each rank of the mesh has a group along each of them. An exchange goes
over the mesh first and then over each of these groups in turn, so it reaches all ranks. Along such an axis a parameter
is either divided, and sums over its elements include the axis, or the same on all ranks, and it counts once: a
parameter's `Span`s.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.comm.groups import group_of
from zeromesh.errors import CommunicationError, MeshError, MismatchError

ResultT = TypeVar("ResultT")

_HOST = torch.device("cpu")

HOST_WORLD = 64
"""Most ranks whose words go over the host's network. Gloo's reduction is a ring of 2 (n - 1) messages one after the
other, of some 30 us each: 4 ms."""

_models: dict[tuple[int, ...], int] = {}
"""How many models were sharded over these ranks; alike on all of them, since they do it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Ranks that a parameter's elements are divided among: [Note: Beyond]."""

    group: dist.ProcessGroup | None  # None for this rank alone
    copies: int = 1  # how many of the ranks hold the same elements, each of them as many


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The ranks of the mesh, for the few words that they exchange beside the data."""

    group: dist.ProcessGroup | None  # of all ranks of the mesh; None on a single rank
    size: int
    rank: int  # of this one in the mesh, innermost axis fastest
    source: int  # global rank of the mesh's first
    device: torch.device
    beyond: tuple[dist.ProcessGroup, ...] = ()  # along further axes, in an order that all ranks share: [Note: Beyond]
    ranks: tuple[int, ...] = ()  # the global ranks of all; empty before `met`
    # The ranks write under it to the store of the process group how far they are in their meetings; "" where that
    # keeps nothing, as torch's fake group's.
    key: str = field(default="", compare=False, repr=False)

    def met(self) -> Control:
        """A copy that knows all ranks and has a key for one more model on them; all ranks call this together."""
        ranks = tuple(sorted(self.gather(dist.get_rank() if dist.is_initialized() else 0)))
        if self.world == 1:
            return replace(self, ranks=ranks)
        _models[ranks] = _models.get(ranks, 0) + 1
        key = f"zeromesh/meetings/{hashlib.sha256(repr((ranks, _models[ranks])).encode()).hexdigest()[:16]}"
        try:
            store = dist.distributed_c10d._get_default_store()  # torch has no public way to it
            store.set(f"{key}/{self.number}", "0 the start")
        except RuntimeError:
            key = ""
        return replace(self, ranks=ranks, key=key)

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def number(self) -> int:
        number = self.rank
        for group in self.beyond:
            number = number * group.size() + group.rank()
        return number

    @property
    def world(self) -> int:
        return self.size * math.prod(group.size() for group in self.beyond)

    def everyone(self) -> dist.ProcessGroup | None:
        """All ranks, which call this at the same point, as one group; None on a single rank."""
        return self.group if not self.beyond else group_of(sorted(self.gather(dist.get_rank())), self.device.type)

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """`values` reduced over all ranks of the mesh, in place."""
        return reduce_over(self.group, values, operation)

    def reduce_all(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """`values` reduced over all ranks that the model is spread over, in place."""
        for group in (self.group, *self.beyond):
            reduce_over(group, values, operation)
        return values

    def words(self, values: Sequence[float], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """`values` as a tensor on the ranks' device, or another; they may still be on their way there."""
        device = device or self.device
        pinned = device.type != "cpu"  # a copy from other memory waits for all that the device has to do
        held = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned)
        return held.to(device, non_blocking=pinned)

    def agree(self, values: Sequence[int], *, further: Sequence[dist.ProcessGroup] = ()) -> list[int]:
        """The maximum of each of `values` over the ranks of the mesh, and over `further` groups."""
        if self.group is None and not further:
            return list(values)
        return self._exchange(values, torch.int32, dist.ReduceOp.MAX, further)

    def total(self, value: float) -> float:
        return value if self.group is None else self._exchange([value], torch.float64, dist.ReduceOp.SUM)[0]

    def _exchange(
        self,
        values: Sequence[float],
        dtype: torch.dtype,
        operation: dist.ReduceOp.RedOpType,
        further: Sequence[dist.ProcessGroup] = (),
    ) -> list[Any]:
        """The host waits for the other ranks' hosts, and not for work of the devices: the words go over the host's
        network if the groups have a backend for it, or have a stream of their own."""
        groups, device = [group for group in (self.group, *further) if group is not None], self.device
        near = device.type != "cpu" and self.world <= HOST_WORLD
        if near and all(_HOST in group._device_types for group in groups):
            device = _HOST
            groups = [group_of(dist.get_process_group_ranks(group), "cpu") for group in groups]
        with nullcontext() if device.type == "cpu" else _stream(device):
            words = self.words(values, dtype, device)
            for group in groups:
                reduce_over(group, words, operation)
            found: list[Any] = words.tolist()
        return found

    def broadcast(self, values: Tensor) -> None:
        """Sends the values of the mesh's first rank, of any dtype and strides, to all of its ranks."""
        broadcast_bytes(values, self.group, self.source)

    def say(self, value: ResultT) -> ResultT:
        """The first rank's value, on every rank."""
        # The length in a word, then the bytes. Torch's own takes a length from the first rank alone, and in a group
        # that only counts nobody hears from it: here each rank says its own.
        for group in filter(None, (self.group, *self.beyond)):
            data = pickle.dumps(value)
            length = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
            dist.broadcast(length, group_src=0, group=group)
            count = int(length)
            sent = torch.frombuffer(bytearray(data[:count].ljust(count, b"\0")), dtype=torch.uint8).to(self.device)
            dist.broadcast(sent, group_src=0, group=group)
            value = pickle.loads(sent.cpu().numpy().tobytes())
        return value

    def together(
        self, attempt: Callable[[], ResultT], *, call: str = "zm.shard", left: str = "Nothing was sharded"
    ) -> ResultT:
        """Runs `attempt`, a part of `call`, and returns its result if no rank raises. `left` describes the model's
        state otherwise, for the message.

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
                    f"{call} must succeed on all ranks; on rank {rank} it did not: {reason}. {left}: "
                    f"start every rank again, with the same model and arguments"
                )
        return result

    def require_aligned(self) -> None:
        """Raises MeshError, on every rank, unless ranks along each axis beyond have the same place in their meshes."""
        own, off = torch.tensor([self.rank, -self.rank], device=self.device), False
        for group in self.beyond:
            highest, lowest = reduce_over(group, own.clone(), dist.ReduceOp.MAX).tolist()
            off = off or highest != -lowest
        if self.beyond and self.reduce_all(torch.tensor([int(off)], device=self.device), dist.ReduceOp.MAX).item():
            raise MeshError(
                "the mesh of zm.shard and those of the model's DTensors must be dimensions of one mesh, such as "
                "mesh['cluster', 'node'] and mesh['tp']: ranks that share a parameter have another place each in the "
                "meshes that they are sharded over"
            )

    def gather(self, value: ResultT) -> list[ResultT]:
        """The value of every rank: those of the mesh first, then those of the meshes beyond."""
        values = gather_over(self.group, value)
        for group in self.beyond:
            values = [each for line in gather_over(group, values) for each in line]
        return values

    def require_same(self, what: str, text: str) -> None:
        """Raises MismatchError on every rank if `text` differs between ranks."""
        if self.same(text):
            return
        texts = self.gather(text)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise MismatchError(
                    f"all ranks must have the same {what}; rank 0 has {_differing(texts[0], other)}, "
                    f"rank {rank} has {_differing(other, texts[0])}: start every rank with the same arguments"
                )

    def same(self, text: str) -> bool:
        """Whether all ranks call this with the same text."""
        # Thousands of ranks compare a word each; texts are exchanged only to name the difference.
        word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        highest, lowest = self._exchange([word, -word], torch.int64, dist.ReduceOp.MAX, self.beyond)
        return bool(highest == -lowest)

    def meeting(self, call: str, tensors: str) -> AbstractContextManager[None]:
        """Inside, all ranks exchange values for one call of a function that users call. Its arguments, `tensors`, are
        the same on all ranks.

        Raises:
            MismatchError: on all ranks, within the time of two exchanges, if some make another call.
            CommunicationError: after the group's timeout, if some make none; names them.
        """
        if self.world == 1:
            return nullcontext()
        from zeromesh.engine.meetings import meeting, progress_of  # of numbers of whole tensors

        return meeting(f"{call} of {tensors}", progress_of(self.key, self.number, self.world), self.same, self.gather)


def gather_over(group: dist.ProcessGroup | None, value: ResultT) -> list[ResultT]:
    """The values of all ranks of `group`, by rank; for None, this rank's only."""
    if group is None:
        return [value]
    values = [value] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def reduce_over(
    group: dist.ProcessGroup | None, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """`values` reduced over the ranks of `group`, in place; of None, this rank's."""
    if group is not None:
        try:
            dist.all_reduce(values, op=operation, group=group)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {group.rank()} could not agree with the other {group.size() - 1} of its group: one has died, "
                f"has stalled or has raised an error of its own, which then says why. [{error}]"
            ) from error
    return values


def broadcast_bytes(values: Tensor, group: dist.ProcessGroup | None, source: int | None = None) -> None:
    """Sends the values of one rank, of any dtype and strides, to all ranks of a group. The group None is this rank
    alone; `source` is a global rank, None the group's first."""
    if group is not None and values.numel():
        sent = values.contiguous()
        first = dist.get_global_rank(group, 0) if source is None else source
        # As bytes: gloo knows fewer dtypes than torch.
        dist.broadcast(sent.view(-1).view(torch.uint8), src=first, group=group)
        if sent is not values:
            values.copy_(sent)


@cache
def _stream(device: torch.device) -> torch.Stream:
    """One stream for the words of all steps: memory that is freed on a stream is used again by that stream only. A
    device hands out 32 streams in turn, so a lane of another model may get the same one, and words then wait for it."""
    return torch.Stream(device, priority=-1)  # as lanes: hosts wait for it


def _differing(text: str, other: str) -> str:
    lines, others = text.splitlines(), other.splitlines()
    missing = "; ".join(line for line in lines if line not in set(others))[:200]
    return repr(missing or ("another order" if sorted(lines) == sorted(others) else "fewer entries"))
