"""The ranks along one axis, their communicators, how they exchange (`Transport`), and one exchange: its messages,
observer and errors; and a collective that is bound to its tensors (`Step`).

[Note: Tags] A message's tag hashes its channel's running number, the operation and the lengths. Where ranks disagree
about the next collective, point-to-point messages do not match, and it ends in its timeout. Native collectives
have no tags: there, as everywhere in torch, ranks must agree on the order, which the schedule sees to.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.errors import CommunicationError, InternalError

Wait = Callable[[], None]

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType

Written = Callable[[], Iterable[Tensor]]
"""Writes messages, and yields each once it is written."""

Message = tuple[Tensor, int]
"""A tensor, and the index on the axis of the rank that it comes from or goes to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One collective as a rank handed it to the transport."""

    operation: str  # `all_gather`, `reduce_scatter`, `all_reduce` or `all_to_all`
    axis: str
    sent_bytes: int  # payload to other ranks
    messages: int  # number of sends, or of native collectives


@dataclass(slots=True, kw_only=True, eq=False)
class Channel:
    """One communicator of an axis."""

    process_group: dist.ProcessGroup
    serial: int  # counts the channels between these ranks; the same on each of them
    started: int = 0  # counts its collectives, so that messages of different ones cannot be taken for each other
    failed: bool = False

    def used(self, started: int, *, failed: bool = False) -> None:
        """So many of its collectives have begun by now, and one may have failed."""
        self.started, self.failed = started, self.failed or failed


@dataclass(frozen=True)
class Transport(ABC):
    """Moves tensors between the ranks of an axis."""

    device_type: str
    messages: ClassVar[bool]  # this rank's threads send, receive and sum; otherwise the backend does
    window: ClassVar[int]  # pieces of a coded region in flight at once
    longest: ClassVar[int]  # most elements of such a piece

    def run(self, collective: Callable[..., None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Runs a whole collective with these arguments."""
        collective(*args, **kwargs)

    @abstractmethod
    def connect(self, group: dist.ProcessGroup) -> None:
        """Connects the ranks of a new communicator, which all call this: [Note: Warm] of `zeromesh.comm.groups`."""

    @abstractmethod
    def sums(self, operation: str, dtype: torch.dtype) -> bool:
        """Whether a reduction of this dtype is the backend's own."""

    def scaled_sum(self, size: int, dtype: torch.dtype, scale: float) -> tuple[ReduceOp, float]:
        """The backend's own sum over `size` ranks of values that it multiplies by `scale`, as far as it can without
        rounding that; and the factor that is left, which is a pass over the memory of its own."""
        return dist.ReduceOp.SUM, scale

    @abstractmethod
    def gather(self, exchange: Exchange, region: Tensor, fill: Callable[[], object]) -> Wait:
        """Begins to fill a flat `region` with every rank's chunk, once `fill` has written this rank's. The
        returned function waits for the others' chunks, and until this rank's has left."""

    @abstractmethod
    def swap(self, exchange: Exchange, incoming: Tensor, outgoing: Tensor, written: Written) -> Wait:
        """Begins to send each other rank its row of `outgoing`, which are `written` one after the other, and to
        receive into the rows of `incoming`."""

    @abstractmethod
    def pass_on(self, exchange: Exchange, arriving: Sequence[Message], leaving: Sequence[Message]) -> None:
        """An all-to-all of any number of tensors of any lengths and dtypes; waits for the arriving ones."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class AxisGroup:
    """The ranks along one axis that this rank exchanges with."""

    name: str
    ranks: tuple[int, ...]  # global ones, in the order of their index on the axis
    rank: int  # this rank's index
    transport: Transport
    gather: Channel
    reduce: Channel  # between the same ranks, in the same order, as `gather`
    timeout_s: float
    record: Callable[[Sent], None] = lambda sent: None  # is told of every collective; for tests and byte counters
    lender: AxisGroup | None = None  # to which the communicators belong, where they are another axis's

    @property
    def size(self) -> int:
        return len(self.ranks)

    def recorded(self, record: Callable[[Sent], None]) -> Callable[[Sent], None]:
        """From now on reports collectives to `record`; returns the observer before it."""
        before, self.record = self.record, record
        return before

    def lent(self, name: str) -> AxisGroup:
        """The same ranks and communicators for another axis; this group stays alive as long."""
        return replace(self, name=name, lender=self)


class Exchange:
    """One collective on one channel of a group: its messages, its observer, its errors. All ranks must agree on its
    `shape`, the lengths and formats."""

    def __init__(self, group: AxisGroup, channel: Channel, operation: str, *shape: int | str) -> None:
        self.group = group
        self.operation = operation
        self.process_group = channel.process_group
        self._channel = channel
        self._agreed = channel.started, operation, shape
        channel.used(channel.started + 1)
        self._sends: list[Wait] = []
        self._sent_bytes = self._messages = 0

    @cached_property
    def _tag(self) -> int:
        """The number that its messages carry; a backend's own collectives have none."""
        return zlib.crc32(repr(self._agreed).encode()) & 0x7FFFFFFF

    @property
    def peers(self) -> list[int]:
        """The other indices on the axis, each rank beginning with its next one, so that not all send to the same."""
        return [(self.group.rank + step) % self.group.size for step in range(1, self.group.size)]

    def post_recv(self, tensor: Tensor, source: int) -> Wait:
        """Begins to receive `tensor`; the returned function waits for it."""
        work = self._guard(lambda: self.process_group.recv([tensor], source, self._tag), source)
        return partial(self._guard, work.wait, source)

    def post_send(self, tensor: Tensor, target: int) -> Wait:
        """Begins to send `tensor`, which must not change before the returned function has waited for it."""
        work = self._guard(lambda: self.process_group.send([tensor], target, self._tag), target)
        self.count(tensor.nbytes)
        return partial(self._guard, work.wait, target)

    def before_finish(self, wait: Wait) -> None:
        """Leaves a wait to `finish`."""
        self._sends.append(wait)

    def native(self, call: Callable[[], Any], sent_bytes: int) -> None:
        """Runs a collective of the backend; on a device's stream without blocking the host."""
        self._guard(call, None)
        self.count(sent_bytes)

    def count(self, sent_bytes: int) -> None:
        self._sent_bytes += sent_bytes
        self._messages += 1

    def finish(self) -> None:
        """Waits until all that was sent has left, and tells the observer."""
        sends, self._sends = self._sends, []  # which refer to this
        wait_for_all(sends)
        self.group.record(
            Sent(operation=self.operation, axis=self.group.name, sent_bytes=self._sent_bytes, messages=self._messages)
        )

    def _guard(self, call: Callable[[], Any], peer: int | None) -> Any:
        try:
            return call()
        except BaseException as error:
            self._channel.used(self._channel.started, failed=True)
            if not isinstance(error, RuntimeError):
                raise
            raise CommunicationError(self._message(error, peer)) from error

    def _message(self, error: RuntimeError, peer: int | None) -> str:
        group = self.group
        towards = "" if peer is None else f" with rank {group.ranks[peer]}"
        return (
            f"{self.operation} over axis {group.name} failed on rank {group.ranks[group.rank]}{towards} "
            f"(ranks {', '.join(map(str, group.ranks))}, timeout {group.timeout_s:g} s): "
            f"a rank has died or stalled, or ranks issued different collectives. {error}"
        )


Copy = tuple[Tensor, Tensor]
"""Destination and source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One collective of a chain."""

    operation: str = ""  # its name; "" where nothing is sent
    groups: tuple[AxisGroup, ...] = ()  # the axes it sends over, the minor one last
    lane: str = ""  # its name; "" to stay in the lane of the chain's step before it
    call: partial[Any] | None = None  # the collective, bound to its tensors
    before: Copy | None = None
    after: Copy | None = None
    accumulates: bool = False  # its result may be added to the accumulator, instead of overwriting it

    def run(self, accumulate: bool = False) -> None:
        if self.before is not None:
            self.before[0].copy_(self.before[1])
        if self.call is not None and accumulate and self.accumulates:
            self.call(accumulate=True)
        elif self.call is not None:
            self.call()
        if self.after is not None:
            self.after[0].copy_(self.after[1])


Chain = tuple[Step, ...]


def wait_for_all(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()


def chunks_of(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """The chunks of a region; raises InternalError unless it is flat, contiguous and of `count` equal chunks."""
    length = _chunk_numel(tensor, count)
    return [tensor[index * length : (index + 1) * length] for index in range(count)]


def own_chunk(region: Tensor, group: AxisGroup) -> Tensor:
    """This rank's chunk. It makes one slice: an axis may have thousands of ranks."""
    length = _chunk_numel(region, group.size)
    return region[group.rank * length : (group.rank + 1) * length]


def _chunk_numel(region: Tensor, count: int) -> int:
    if region.dim() != 1 or not region.is_contiguous() or region.numel() % count:
        raise InternalError(
            f"a region must be flat, contiguous and of {count} equal chunks; got shape {tuple(region.shape)}, strides "
            f"{region.stride()}"
        )
    return region.numel() // count
