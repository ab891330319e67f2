"""Exchanges by messages: this rank's own threads send, receive and add up the terms. For gloo, and for tests.

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

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.comm.exchange import AxisGroup, Exchange, Message, Transport, Wait, Written, chunks_of, wait_for_all
from zeromesh.errors import InternalError
from zeromesh.schedule.memory import ALIGN, part_numel
from zeromesh.wires.target import Target

PIECE_BYTES = 1 << 20
"""[Note: Messages]."""

WINDOW = 4
"""Pieces in flight from each peer: some on the wire while one is summed. 2 were 10 % slower, 8 no faster."""

WHOLE_BYTES = 1 << 17
"""Longest chunk that is exchanged in one native all-to-all: [Note: Messages]."""


class Messages(Transport):
    """[Note: Messages]. One coded piece is on the wire while the next is quantised. It is at most a MiB of fp32 long:
    that stays in the second-level cache, and its message is long enough to fill a link."""

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
        post(exchange, _in_pieces(arriving), _in_pieces(leaving))()


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


def pieces(tensor: Tensor, numel: int) -> Sequence[Tensor]:
    """Cuts a flat tensor into pieces of at most `numel` elements; none if it is empty."""
    return [tensor[part] for part in parts(tensor.numel(), numel)]


def send_all(exchange: Exchange, sources: Sequence[Tensor], numel: int) -> list[Wait]:
    """Begins to send `sources[i]` to every other rank i, in pieces of `numel` elements, to all ranks in turn."""
    outgoing = [[(peer, piece) for piece in pieces(sources[peer], numel)] for peer in exchange.peers]
    turns = itertools.zip_longest(*outgoing)
    return [exchange.post_send(piece, peer) for turn in turns for peer, piece in filter(None, turn)]


def post(exchange: Exchange, arriving: Sequence[Message], leaving: Sequence[Message]) -> Wait:
    """Begins to receive from and send to several ranks, which post the matching messages in the same order. The
    returned function waits for the arriving ones; leaving tensors must not change before the exchange's `finish`."""
    waits = [exchange.post_recv(tensor, source) for tensor, source in arriving]
    for tensor, target in leaving:
        exchange.before_finish(exchange.post_send(tensor, target))
    return partial(wait_for_all, waits)


def bring_back(tensors: Sequence[Tensor], copies: Mapping[int, Tensor]) -> None:
    """Copies back to the device, from the copies by id. The host does not wait, as after any collective."""
    for tensor in tensors:
        tensor.copy_(copies[id(tensor)], non_blocking=True)


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
    """A workspace cut up."""

    numel: int  # elements of one part
    received: Tensor  # for received terms, in the dtype of the wire
    terms: Sequence[Tensor]  # `received`, term by term
    total: Tensor  # for sums, wide, of one part
    widened: Tensor  # for one term, wide

    @classmethod
    def cut(cls, workspace: Tensor, wire: torch.dtype, wide: torch.dtype, *, terms: int, longest: int) -> SumScratch:
        """For terms in parts, as long as the workspace allows and at most `longest` bytes; raises InternalError if it
        has no room."""
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


def sum_messages(region: Tensor, target: Target, group: AxisGroup, workspace: Tensor, operation: str) -> None:
    chunks, wire, wide = chunks_of(region, group.size), region.dtype, sum_dtype(region.dtype, target.out.dtype)
    exchange = Exchange(group, group.reduce, operation, region.numel(), workspace.numel())
    numel, room = chunks[0].numel(), workspace.numel()
    if numel <= part_numel(room, wire.itemsize, wide.itemsize, terms=group.size, longest_bytes=WHOLE_BYTES):
        scratch, pg = SumScratch.of(workspace, wire, wide, terms=group.size, numel=numel), exchange.process_group
        sent = region.nbytes - chunks[0].nbytes
        exchange.native(lambda: dist.all_to_all_single(scratch.received, region, group=pg), sent)
        arrivals: Arrivals = iter([(slice(0, numel), scratch.terms)])
    else:
        terms = WINDOW * (group.size - 1)
        scratch = SumScratch.cut(workspace, wire, wide, terms=terms, longest=PIECE_BYTES)
        arrivals = _arrivals_in_pieces(exchange, chunks, scratch)
    for part, terms_of_part in arrivals:
        target.add_up(terms_of_part, part, scratch.total, scratch.widened)
    exchange.finish()


Arrivals = Iterator[tuple[slice, Sequence[Tensor]]]
"""Every part of the own chunk with its terms from all ranks, in the order of the ranks."""


def _arrivals_in_pieces(exchange: Exchange, chunks: Sequence[Tensor], scratch: SumScratch) -> Arrivals:
    rank, peers = exchange.group.rank, exchange.peers
    own = chunks[rank]
    todo = deque(enumerate(parts(own.numel(), scratch.numel)))
    posted: deque[tuple[slice, Sequence[Tensor], Sequence[Callable[[], None]]]] = deque()

    def post() -> None:
        if not todo:
            return
        index, part = todo.popleft()
        slots = scratch.terms[index % WINDOW * len(peers) :]
        arriving = {peer: slot[: part.stop - part.start] for peer, slot in zip(peers, slots, strict=False)}
        waits = [exchange.post_recv(arriving[peer], peer) for peer in reversed(peers)]
        posted.append((part, [arriving.get(peer, own[part]) for peer in range(len(chunks))], waits))

    for _ in range(WINDOW):
        post()
    exchange.before_finish(partial(wait_for_all, send_all(exchange, chunks, scratch.numel)))
    while posted:
        part, terms, waits = posted.popleft()
        for wait in waits:
            wait()
        yield part, terms
        post()  # into the slots whose terms have been summed by now
