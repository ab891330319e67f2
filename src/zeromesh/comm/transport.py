"""How tensors move between the ranks of an axis: one class for each kind of backend, chosen by `transport_of`.

    Native       collectives of the backend, in place, beside the host; sums in the dtype of the wire
    Messages     sends and receives by this rank's own threads; this rank sums the received terms
    HostCopies   messages of copies on the host

[Note: Messages] Gathers and long reductions are send and recv in pieces of 1 MiB: docs/decisions/0015. All receives are
posted before the first send, since gloo sends nothing before the receiver is ready.

A message costs some 30 us, and more where the cores are oversubscribed: gloo's event thread spins while the calling
thread, perhaps preempted, holds the lock of a connection. So reductions of chunks up to 128 KiB are one native
all-to-all, which is as fast or faster there; it is half-duplex from 256 KiB on (chunks of 1 MiB over 2 ranks behind
200 Mbit/s: 79 ms, in pieces 43; behind 1 Gbit/s 17 and 10; on loopback alike). Gathers gain nothing: gloo's all-gather
is a ring of dependent steps. An fp32 all-reduce is gloo's own, a pipelined ring at line rate.

[Note: Host copies] Messages of a device's tensors go through pinned host memory. This serves tests with several
processes on one device. It allocates, and blocks the host until all ranks have exchanged: not for training.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _make_nccl_premul_sum

from zeromesh.comm.exchange import (
    AxisGroup,
    Exchange,
    Message,
    ReduceOp,
    Transport,
    Wait,
    Written,
    chunks_of,
    own_chunk,
    wait_for_all,
)
from zeromesh.errors import InternalError
from zeromesh.schedule.memory import ALIGN, part_numel

PIECE_BYTES = 1 << 20
"""[Note: Messages]."""

P = ParamSpec("P")

# Under these names from torch 2.13 on, which warns under those of before.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Native(Transport):
    """Collectives of the backend, on the current stream where the tensors are a device's."""

    messages, window, longest = False, 1, sys.maxsize
    nccl: bool = False  # which multiplies each value by any factor before it adds

    def scaled_sum(self, size: int, dtype: torch.dtype, scale: float) -> tuple[ReduceOp, float]:
        # The factor of a mean is held in the dtype of the wire: in bf16 a third would be .2 % off, on every step alike.
        exact = dtype in (torch.float32, torch.float64) or math.frexp(scale)[0] == 0.5
        if scale != 1 and self.device_type != "cpu" and exact:
            # Backends other than NCCL may divide after the sum, which fp16 cannot always hold.
            if scale == 1 / size and (self.nccl or dtype != torch.float16):
                return dist.ReduceOp.AVG, 1.0
            if self.nccl:
                return _make_nccl_premul_sum(scale), 1.0
        return dist.ReduceOp.SUM, scale

    def connect(self, group: dist.ProcessGroup) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device_type), group=group)

    def sums(self, operation: str, dtype: torch.dtype) -> bool:
        return True

    def gather(self, exchange: Exchange, region: Tensor, fill: Callable[[], object]) -> Wait:
        fill()
        own, group = own_chunk(region, exchange.group), exchange.process_group
        exchange.native(lambda: gather_single(region, own, group=group), region.nbytes - own.nbytes)
        return nothing

    def swap(self, exchange: Exchange, incoming: Tensor, outgoing: Tensor, written: Written) -> Wait:
        for _ in written():
            pass
        group, sent = exchange.process_group, outgoing.nbytes - outgoing[exchange.group.rank].nbytes
        exchange.native(lambda: dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=group), sent)
        return nothing

    def pass_on(self, exchange: Exchange, arriving: Sequence[Message], leaving: Sequence[Message]) -> None:
        incoming, outgoing = _by_peer(exchange, arriving), _by_peer(exchange, leaving)
        to_come, to_go = ([sum(part.numel() for part in parts) for parts in each] for each in (incoming, outgoing))
        received = torch.empty(sum(to_come), dtype=torch.uint8, device=self._device)
        sent = torch.cat([received[:0], *itertools.chain.from_iterable(outgoing)])
        group = exchange.process_group
        exchange.native(lambda: dist.all_to_all_single(received, sent, to_come, to_go, group=group), sent.numel())
        targets = [*itertools.chain.from_iterable(incoming)]
        for target, landed in zip(targets, torch.split(received, [each.numel() for each in targets]), strict=True):
            target.copy_(landed)

    @property
    def _device(self) -> torch.device | None:
        """This rank's device, even if it has no message that would tell."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.accelerator.current_accelerator()


class Messages(Transport):
    """[Note: Messages]. One coded piece is on the wire while the next is quantised. It is at most a MiB of fp32 long:
    that stays in the second-level cache, and its message is long enough to fill a link."""

    backend: ClassVar[str] = "gloo"
    messages, window, longest = True, 2, 1 << 18

    def connect(self, group: dist.ProcessGroup) -> None:
        """Its ranks connect as it is made."""

    def sums(self, operation: str, dtype: torch.dtype) -> bool:
        return operation == "all_reduce" and dtype == sum_dtype(dtype)

    def gather(self, exchange: Exchange, region: Tensor, fill: Callable[[], object]) -> Wait:
        chunks, numel = chunks_of(region, exchange.group.size), max(1, PIECE_BYTES // region.element_size())
        waits = [
            exchange.post_recv(piece, peer)
            for peer in reversed(exchange.peers)
            for piece in pieces(chunks[peer], numel)
        ]
        fill()
        waits += send_all(exchange, [chunks[exchange.group.rank]] * len(chunks), numel)
        return partial(wait_for_all, waits)

    def swap(self, exchange: Exchange, incoming: Tensor, outgoing: Tensor, written: Written) -> Wait:
        own = exchange.group.rank
        waits = [exchange.post_recv(row, peer) for peer, row in enumerate(incoming) if peer != own]
        waits += [exchange.post_send(message, peer) for peer, message in enumerate(written()) if peer != own]
        return partial(wait_for_all, waits)

    def pass_on(self, exchange: Exchange, arriving: Sequence[Message], leaving: Sequence[Message]) -> None:
        exchange.post(_in_pieces(arriving), _in_pieces(leaving))()


class HostCopies(Messages):
    """[Note: Host copies]."""

    def run(self, collective: Callable[..., None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """On copies, keeping those apart that alias: the first argument comes back before the others."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        copies = {id(tensor): torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors}
        for tensor in tensors:
            copies[id(tensor)].copy_(tensor)
        collective(
            *(copies.get(id(value), value) for value in args),
            **{name: copies.get(id(value), value) for name, value in kwargs.items()},
        )
        bring_back(tensors, copies)

    def pass_on(self, exchange: Exchange, arriving: Sequence[Message], leaving: Sequence[Message]) -> None:
        landing = [(tensor.cpu(), peer) for tensor, peer in arriving]
        super().pass_on(exchange, landing, [(tensor.cpu(), peer) for tensor, peer in leaving])
        for (tensor, _), (landed, _) in zip(arriving, landing, strict=True):
            tensor.copy_(landed)


def transport_of(backend: str, device_type: str) -> Transport:
    """The transport of groups of torch's `backend` for tensors on this type of device."""
    if backend != Messages.backend:
        return Native(device_type, nccl=backend == "nccl")
    return Messages(device_type) if device_type == "cpu" else HostCopies(device_type)


def carried(collective: Callable[P, None]) -> Callable[P, None]:
    """`collective`, as the transport of the group among its arguments runs it."""

    @functools.wraps(collective)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        next(value for value in args if isinstance(value, AxisGroup)).transport.run(collective, args, kwargs)

    return run


def pass_on(arriving: Sequence[Message], leaving: Sequence[Message], group: AxisGroup, *, reduced: bool) -> None:
    """An all-to-all of any number of tensors of any lengths and dtypes.

    Args:
        arriving, leaving: flat tensors and the ranks that they come from or go to; between any two ranks, one sends
            them in the order in which the other expects them.
        group: all of its ranks call this, also those without messages.
        reduced: whether it takes its turn among the reductions, else among the gathers.
    """
    exchange = Exchange(group, group.reduce if reduced else group.gather, "all_to_all")
    group.transport.pass_on(exchange, arriving, leaving)
    exchange.finish()


def nothing() -> None:
    """Waits for nothing."""


def pieces(tensor: Tensor, numel: int) -> Sequence[Tensor]:
    """Cuts a flat tensor into pieces of at most `numel` elements; none if it is empty."""
    return [tensor[part] for part in parts(tensor.numel(), numel)]


def send_all(exchange: Exchange, sources: Sequence[Tensor], numel: int) -> list[Wait]:
    """Begins to send `sources[i]` to every other rank i, in pieces of `numel` elements, to all ranks in turn."""
    outgoing = [[(peer, piece) for piece in pieces(sources[peer], numel)] for peer in exchange.peers]
    turns = itertools.zip_longest(*outgoing)
    return [exchange.post_send(piece, peer) for turn in turns for peer, piece in filter(None, turn)]


def bring_back(tensors: Sequence[Tensor], copies: Mapping[int, Tensor]) -> None:
    """Copies back to the device, from the copies by id. The host does not wait, as after any collective."""
    for tensor in tensors:
        tensor.copy_(copies[id(tensor)], non_blocking=True)


def _by_peer(exchange: Exchange, messages: Sequence[Message]) -> list[list[Tensor]]:
    """Bytes of the messages from or to each rank of the axis."""
    found: list[list[Tensor]] = [[] for _ in range(exchange.group.size)]
    for tensor, peer in messages:
        found[peer].append(tensor.view(torch.uint8))
    return found


def _in_pieces(messages: Sequence[Message]) -> Sequence[Message]:
    return [(piece, peer) for tensor, peer in messages for piece in pieces(tensor, PIECE_BYTES // tensor.itemsize)]


# ---- sums of the messages of several ranks, in a wide dtype, in a fixed order, a cache-sized part at a time


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
