"""Moves tensors between the ranks of an axis: point to point on gloo, native collectives elsewhere.

[Note: Gloo] Measured (benchmarks/results/collectives.md, "How a gather is sent"): gathers and long reductions are send
and recv in pieces of 1 MiB: no collective's staging copies, both directions at once, and least CPU time, which on
loopback is the time. All receives are posted before the first send, since gloo sends nothing before the receiver is
ready.

A message costs some 30 us, and more where the cores are oversubscribed: gloo's event thread spins while the calling
thread, perhaps preempted, holds the lock of a connection. So reductions of chunks up to 128 KiB are one native
all-to-all, which is as fast or faster there; it is half-duplex from 256 KiB on (chunks of 1 MiB over 2 ranks behind
200 Mbit/s: 79 ms, in pieces 43; behind 1 Gbit/s 17 and 10; on loopback alike). Gathers gain nothing: gloo's all-gather
is a ring of dependent steps. An fp32 all-reduce is gloo's own, a pipelined ring at line rate.

[Note: Tags] A message's tag hashes its channel's running number, the operation and the lengths. Where ranks disagree
about what comes next, point-to-point messages do not match and the collective ends in its timeout. Native collectives
have no tags: there, as everywhere in torch, ranks must agree on the order, which the schedule sees to.

[Note: Host copies] Device tensors go over gloo through pinned host memory. This serves tests of the CUDA engine with
several processes on one device, where NCCL cannot be used. It allocates, and it blocks the host until all ranks have
exchanged; nobody should train like this.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.comm.groups import AxisGroup, Channel, Sent
from zeromesh.errors import CommunicationError

PIECE_BYTES = 1 << 20
"""[Note: Gloo]."""

Wait = Callable[[], None]

Message = tuple[Tensor, int]
"""A tensor, and the index on the axis of the rank that it comes from or goes to."""


class Exchange:
    """One collective on one channel of a group: its messages, its observer, its errors.

    Args:
        group, channel: whose.
        operation: for tags, messages and the observer.
        shape: lengths, and formats, that all ranks must agree on.
    """

    def __init__(self, group: AxisGroup, channel: Channel, operation: str, *shape: int | str) -> None:
        self.group = group
        self.operation = operation
        self.process_group = channel.process_group
        self._channel = channel
        self._tag = zlib.crc32(repr((channel.started, operation, shape)).encode()) & 0x7FFFFFFF
        channel.used(channel.started + 1)
        self._sends: list[Wait] = []
        self._sent_bytes = self._messages = 0

    @property
    def peers(self) -> list[int]:
        """The other indices on the axis, each rank beginning with its next one, so that not all send to the same."""
        return [(self.group.rank + step) % self.group.size for step in range(1, self.group.size)]

    def post_recv(self, tensor: Tensor, source: int) -> Wait:
        """Begins to receive `tensor`; the returned function waits for it."""
        return self._waiter(self._guard(lambda: self.process_group.recv([tensor], source, self._tag), source), source)

    def post_send(self, tensor: Tensor, target: int) -> Wait:
        """Begins to send `tensor`, which must not change before the returned function has waited for it."""
        work = self._guard(lambda: self.process_group.send([tensor], target, self._tag), target)
        self.count(tensor.nbytes)
        return self._waiter(work, target)

    def post(self, arriving: Sequence[Message], leaving: Sequence[Message]) -> Wait:
        """Begins to receive and to send to several ranks, which post what answers it in the same order.

        Args:
            arriving, leaving: each a tensor and the rank that it comes from or goes to. What leaves must not change
                before `finish`.

        Returns:
            What waits for what arrives.
        """
        waits = [self.post_recv(tensor, source) for tensor, source in arriving]
        for tensor, target in leaving:
            self.before_finish(self.post_send(tensor, target))
        return lambda: wait_for_all(waits)

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

    def _waiter(self, work: Any, peer: int | None) -> Wait:
        return lambda: self._guard(work.wait, peer)

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


def wait_for_all(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()


def pieces(tensor: Tensor, numel: int) -> Sequence[Tensor]:
    """Cuts a flat tensor into pieces of at most `numel` elements; none if it is empty."""
    return [tensor[start : start + numel] for start in range(0, tensor.numel(), numel)]


def send_all(exchange: Exchange, sources: Sequence[Tensor], numel: int) -> None:
    """Begins to send `sources[i]` to every other rank i, in pieces of `numel` elements, to all ranks in turn."""
    outgoing = [[(peer, piece) for piece in pieces(sources[peer], numel)] for peer in exchange.peers]
    for turn in itertools.zip_longest(*outgoing):
        for peer, piece in filter(None, turn):
            exchange.before_finish(exchange.post_send(piece, peer))


def swap(exchange: Exchange, sources: Sequence[Tensor], targets: Sequence[Tensor], piece_bytes: int) -> None:
    """Sends `sources[i]` to rank i and receives `targets[i]` from it, for every other rank i, and waits for all.

    Args:
        sources, targets: flat, of one dtype; `sources[i]` on rank j is as long as `targets[j]` on rank i.
    """
    numel = max(1, piece_bytes // sources[0].element_size())
    waits = [
        exchange.post_recv(piece, peer) for peer in reversed(exchange.peers) for piece in pieces(targets[peer], numel)
    ]
    send_all(exchange, sources, numel)
    wait_for_all(waits)


def pass_on(arriving: Sequence[Message], leaving: Sequence[Message], group: AxisGroup, *, reduced: bool) -> None:
    """An all-to-all of any number of tensors of any lengths and dtypes. On gloo they go from where they lie to where
    they are to be; elsewhere it is the backend's own, of bytes that are laid together.

    Args:
        arriving, leaving: flat tensors and the ranks that they come from or go to; of any two ranks, what one sends is
            in its order what the other expects.
        group: all of whose ranks call this, also those without messages.
        reduced: whether it takes its turn among the reductions, else among the gathers.
    """
    host = group.backend == "gloo" and group.device_type != "cpu"  # for tests, [Note: Host copies]
    landing = [(tensor.cpu() if host else tensor, peer) for tensor, peer in arriving]
    sending = [(tensor.cpu() if host else tensor, peer) for tensor, peer in leaving]
    exchange = Exchange(group, group.reduce if reduced else group.gather, "all_to_all")
    if group.backend == "gloo":
        exchange.post(_in_pieces(landing), _in_pieces(sending))()
    else:
        _pass_on_natively(exchange, landing, sending)
    exchange.finish()
    if host:
        for (tensor, _), (landed, _) in zip(arriving, landing, strict=True):
            tensor.copy_(landed)


def _pass_on_natively(exchange: Exchange, arriving: Sequence[Message], leaving: Sequence[Message]) -> None:
    incoming, outgoing = _by_peer(exchange, arriving), _by_peer(exchange, leaving)
    to_come, to_go = ([sum(part.numel() for part in parts) for parts in each] for each in (incoming, outgoing))
    device = torch.device("cpu") if exchange.group.device_type == "cpu" else torch.accelerator.current_accelerator()
    sent, received = (torch.empty(sum(own), dtype=torch.uint8, device=device) for own in (to_go, to_come))
    _lay(sent, [part for parts in outgoing for part in parts], out=False)
    group = exchange.process_group
    exchange.native(lambda: dist.all_to_all_single(received, sent, to_come, to_go, group=group), sent.numel())
    _lay(received, [part for parts in incoming for part in parts], out=True)


def _by_peer(exchange: Exchange, messages: Sequence[Message]) -> list[list[Tensor]]:
    """Bytes of the messages from or to each rank of the axis."""
    found: list[list[Tensor]] = [[] for _ in range(exchange.group.size)]
    for tensor, peer in messages:
        found[peer].append(tensor.view(torch.uint8))
    return found


def _lay(whole: Tensor, parts: Sequence[Tensor], *, out: bool) -> None:
    """Copies `parts` into `whole`, end to end, or `out` of it."""
    start = 0
    for part in parts:
        place = whole[start : start + part.numel()]
        (part if out else place).copy_(place if out else part)
        start += part.numel()


def _in_pieces(messages: Sequence[Message]) -> Sequence[Message]:
    return [(piece, peer) for tensor, peer in messages for piece in pieces(tensor, PIECE_BYTES // tensor.itemsize)]


# Under these names from torch 2.13 on, which warns under those of before.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


P = ParamSpec("P")


def hosted(collective: Callable[P, None]) -> Callable[P, None]:
    """`collective`, and where the group is gloo and the tensors are not on the host, on copies there."""

    @functools.wraps(collective)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        values = (*args, *kwargs.values())
        on_device = any(isinstance(value, Tensor) and not value.is_cpu for value in values)
        if on_device and any(isinstance(value, AxisGroup) and value.backend == "gloo" for value in values):
            _on_host(collective, args, kwargs)
        else:
            collective(*args, **kwargs)

    return run


def _on_host(collective: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Copies tensors to the host, keeping those apart that alias: the first argument comes back before the others."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    copies = {id(tensor): torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors}
    for tensor in tensors:
        copies[id(tensor)].copy_(tensor)
    collective(
        *(copies.get(id(value), value) for value in args),
        **{name: copies.get(id(value), value) for name, value in kwargs.items()},
    )
    bring_back(tensors, copies)


def bring_back(tensors: Sequence[Tensor], copies: Mapping[int, Tensor]) -> None:
    """Back to the device, from the copies by id. The host does not wait: what follows must, as after any collective."""
    for tensor in tensors:
        tensor.copy_(copies[id(tensor)], non_blocking=True)
