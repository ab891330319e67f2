"""Collectives over one axis on quantised wires: the shapes of `collectives`, with messages of a `WireFormat`.

Each quantises once, also where several axes follow each other, so k axes are k quantisations of a value and the error
is within `WireFormat.error_bound(k)` of the largest value::

    all_gather       own chunk -> message -> all ranks dequantise it, the sender too: replicas are equal to the bit
    reduce_scatter   chunk i -> message to rank i, which adds up what it got in fp32, in the order of the ranks, and its
                     own chunk as it is; a ring would quantise n-1 times
    all_reduce       both, so two quantisations; the sum of a piece is quantised in the pass that adds it up

Chunks travel in pieces. On gloo one is on the wire while the next is quantised and the one before dequantised, each in
cache. On a device a piece's kernels and its exchange follow one another on the lane's stream, and the next piece them:
what hides them is the computation beside the lane. So pieces are as long as the workspace allows, and few.

Beside what [Note: Arguments] says, they take

    form        of the wire, the same on all ranks
    residual    error feedback, as long as the region: what earlier calls lost, added to what is sent
    generator   of stochastic rounding: `noise_generator(group)`, kept from call to call
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from zeromesh.comm.collectives import chunks_of
from zeromesh.comm.groups import AxisGroup, Channel
from zeromesh.comm.host import hosted
from zeromesh.comm.summing import Target, parts
from zeromesh.comm.transport import Exchange, Wait, wait_for_all
from zeromesh.errors import InputError, InternalError
from zeromesh.wires import WireFormat
from zeromesh.wires.codec import Codec

WINDOW = 2
"""Pieces in flight on gloo: one on the wire while the next is quantised."""

PIECE_NUMEL = 1 << 18
"""Longest piece on gloo, a MiB of fp32: stays in the second-level cache, and its message is long enough to fill a
link."""


def check_quantisable(form: WireFormat, dtype: torch.dtype, axis: str, device_type: str = "cpu") -> None:
    """Says at construction what an axis cannot do.

    Raises:
        InputError: values of this dtype cannot go over a quantised wire, or the device's kernels are not there.
    """
    missing = form.missing_on(device_type)
    if missing:
        raise InputError(f"axis {axis}: {missing}, or drop the @")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"axis {axis}: a quantised wire carries fp32, bf16 or fp16 values; got {dtype}")


def noise_generator(group: AxisGroup, name: str = "") -> torch.Generator:
    """The generator for stochastic rounding over one axis.

    It is seeded by the axis, by the name of what is rounded, so that neither a sum on the next axis nor another buffer
    is rounded by the same draws, and by this rank's index on the axis. By nothing else: ranks that hold the same values
    (those that an earlier collective made equal) have the same index, so they round alike and stay equal.
    """
    generator = torch.Generator()  # on the host, where the kernels' seeds are drawn too
    return generator.manual_seed(zlib.crc32(f"{group.name} {group.rank} {name}".encode()))


@hosted
def quantised_all_gather(
    region: Tensor,
    group: AxisGroup,
    form: WireFormat,
    *,
    workspace: Tensor,
    generator: torch.Generator | None = None,
    keep: Tensor | None = None,
) -> None:
    """Fills `region` with every rank's chunk, as it came over the wire; the own chunk too.

    Args:
        keep: room for all messages, `group.size * form.message_bytes(chunk)` bytes, which `restore_kept` reads.
    """
    chunks = chunks_of(region, group.size)
    wire = _Wire.cut(form, group, workspace, generator)
    kept = None if keep is None else wire.cut_kept(keep, chunks)
    _all_gather(chunks, wire, group.gather, "all_gather", kept=kept)


def restore_kept(keep: Tensor, region: Tensor, group: AxisGroup, form: WireFormat, *, workspace: Tensor) -> None:
    """Fills `region` from the messages that a gather over `group` kept: the same bits, and nothing is sent.

    Args:
        keep: what `quantised_all_gather` filled, with a workspace of the same length.
        region: of n equal chunks.
    """
    chunks = chunks_of(region, group.size)
    wire = _Wire.cut(form, group, workspace, None)
    for pieces, messages in zip(wire.cut_up(chunks), wire.cut_kept(keep, chunks), strict=True):
        wire.codec.dequantise_each(messages, pieces)


@hosted
def quantised_reduce_scatter(
    region: Tensor,
    out: Tensor,
    group: AxisGroup,
    form: WireFormat,
    *,
    workspace: Tensor,
    scale: float = 1.0,
    accumulate: bool = False,
    residual: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Sums this rank's chunk of every rank's `region` into `out`: as long as one chunk, in any floating dtype; may be
    this rank's chunk of `region`. That is not sent, and loses nothing."""
    chunks = chunks_of(region, group.size)
    residuals = None if residual is None else chunks_of(residual, group.size)
    target = Target(out=out, scale=scale, accumulate=accumulate)
    _reduce(chunks, residuals, target, _Wire.cut(form, group, workspace, generator), "reduce_scatter")


@hosted
def quantised_all_reduce(
    tensor: Tensor,
    group: AxisGroup,
    form: WireFormat,
    *,
    workspace: Tensor,
    scale: float = 1.0,
    residual: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Replaces `tensor`, flat, contiguous, of any length, by its sum over the group, the same bits on every rank. The
    own chunk's part of `residual` is what the sum lost on its way back."""
    chunks = chunks_of(tensor, group.size, even=False)
    residuals = None if residual is None else chunks_of(residual, group.size, even=False)
    target = Target(out=chunks[group.rank], scale=scale, accumulate=False)
    _reduce(chunks, residuals, target, _Wire.cut(form, group, workspace, generator), "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wire:
    """A workspace cut up for one collective.

    Args:
        numel: elements of a piece.
        incoming, outgoing: room for messages, (ranks, bytes), of each piece in flight.
    """

    group: AxisGroup
    form: WireFormat
    codec: Codec
    numel: int
    incoming: Sequence[Tensor]
    outgoing: Sequence[Tensor]

    @classmethod
    def cut(cls, form: WireFormat, group: AxisGroup, workspace: Tensor, generator: torch.Generator | None) -> _Wire:
        unit = 8 * form.granule  # keeps every view that follows on a multiple of eight bytes
        # Also of a device's workspace, if it exchanges over gloo: what it keeps has been cut on the host (`comm.host`).
        gloo = group.backend == "gloo"
        window, longest = (WINDOW, PIECE_NUMEL) if gloo else (1, workspace.numel())

        def memory_bytes(numel: int) -> int:  # kernels take none
            return form.memory_bytes(numel) if gloo or workspace.is_cpu else 0

        each = memory_bytes(unit) + 2 * window * group.size * form.message_bytes(unit)
        numel = min(longest // unit, workspace.numel() // each) * unit
        if numel == 0:
            raise InternalError(
                f"a quantised collective of {group.size} ranks needs {each} bytes; got {len(workspace)}"
            )
        shape = (2 * window, group.size, form.message_bytes(numel))
        rounds = workspace[memory_bytes(numel) :][: math.prod(shape)].view(shape).unbind()
        return cls(
            group=group,
            form=form,
            codec=form.codec(numel, workspace, generator),
            numel=numel,
            incoming=rounds[:window],
            outgoing=rounds[window:],
        )

    @property
    def window(self) -> int:
        """Pieces in flight."""
        return len(self.incoming)

    def exchange(self, channel: Channel, operation: str, chunks: Sequence[Tensor]) -> Exchange:
        lengths = (chunk.numel() for chunk in chunks)
        return Exchange(self.group, channel, operation, *lengths, self.numel, str(self.form))

    def room(self, slot: Tensor, piece: Tensor) -> Tensor:
        """The part of a slot that the message of a piece takes."""
        return slot[: self.form.message_bytes(piece.numel())]

    def part(self, index: int, piece: Tensor) -> slice:
        """Where a round's piece lies in its chunk."""
        return slice(index * self.numel, index * self.numel + piece.numel())

    def cut_up(self, chunks: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """The pieces of all chunks, round by round; a chunk that ends early has empty ones."""
        rounds = parts(max(chunk.numel() for chunk in chunks), self.numel)
        return [[chunk[part] for chunk in chunks] for part in rounds]

    def cut_kept(self, keep: Tensor, chunks: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """The messages of all pieces of equal chunks, round by round: chunk after chunk, piece after piece."""
        length, numel = self.form.message_bytes(chunks[0].numel()), chunks[0].numel()
        if keep.numel() != length * len(chunks):
            raise InternalError(
                f"kept messages of {len(chunks)} chunks of {numel} need {length} bytes each; got {len(keep)}"
            )
        # Pieces are whole blocks but the last, so their messages are as long as the chunk's in one.
        bounds = [self.form.message_bytes(part.start) for part in parts(numel, self.numel)] + [length]
        return [
            [keep[start + chunk * length : stop + chunk * length] for chunk in range(len(chunks))]
            for start, stop in pairwise(bounds)
        ]


def _all_gather(
    chunks: Sequence[Tensor],
    wire: _Wire,
    channel: Channel,
    operation: str,
    *,
    kept: Sequence[Sequence[Tensor]] | None = None,
) -> None:
    """`kept`: where messages are received and left, by round and rank."""
    rank = wire.group.rank
    exchange = wire.exchange(channel, operation, chunks)
    rounds = wire.cut_up(chunks)

    def arriving(index: int) -> Sequence[Tensor]:
        if kept is not None:
            return kept[index]
        slots = wire.incoming[index % wire.window]
        return [wire.room(slot, piece) for slot, piece in zip(slots, rounds[index], strict=True)]

    def start(index: int) -> Wait:
        own, incoming = rounds[index][rank], arriving(index)
        message = wire.room(wire.outgoing[index % wire.window][0], own) if kept is None else incoming[rank]

        def fill() -> Sequence[Tensor]:
            wire.codec.quantise(own, message)
            wire.codec.dequantise(message, own)
            return [message] * len(incoming)

        return _swap_messages(exchange, incoming, fill)

    def end(index: int) -> None:
        wire.codec.dequantise_each(arriving(index), rounds[index], skipped=rank)

    _run(exchange, len(rounds), wire.window, start, end)


def _reduce(
    chunks: Sequence[Tensor], residuals: Sequence[Tensor] | None, target: Target, wire: _Wire, operation: str
) -> None:
    """An all-reduce also sends the sums on: a round's leave before the next round's terms are waited for."""
    rank = wire.group.rank
    exchange = wire.exchange(wire.group.reduce, operation, chunks)
    rounds = wire.cut_up(chunks)
    lost = None if residuals is None else wire.cut_up(residuals)

    def start(index: int) -> Wait:
        return _swap_terms(exchange, wire, index, rounds[index], None if lost is None else lost[index])

    def add_up(index: int) -> None:
        own = rounds[index][rank]
        wire.codec.reduce(wire.incoming[index % wire.window], own, rank, target, wire.part(index, own))

    def sums(index: int) -> Sequence[Tensor]:
        """Room for those of a round, where its terms were."""
        slots = wire.incoming[index % wire.window]
        return [wire.room(slot, piece) for slot, piece in zip(slots, rounds[index], strict=True)]

    def turn(index: int) -> Wait:
        own, slots = rounds[index][rank], index % wire.window
        message = wire.room(wire.outgoing[slots][rank], own)  # which no term has left from
        residual = None if lost is None else lost[index][rank]
        part = wire.part(index, own)
        wire.codec.requantise(wire.incoming[slots], own, rank, target, part, message, residual)
        return _swap_messages(exchange, sums(index), lambda: [message] * len(chunks))

    def end(index: int) -> None:
        wire.codec.dequantise_each(sums(index), rounds[index], skipped=rank)

    if operation == "all_reduce":
        _run(exchange, len(rounds), wire.window, start, end, turn)
    else:
        _run(exchange, len(rounds), wire.window, start, add_up)


def _swap_terms(
    exchange: Exchange, wire: _Wire, index: int, pieces: Sequence[Tensor], residuals: Sequence[Tensor] | None
) -> Wait:
    """Sends a round's pieces, quantised, each to its rank, and receives the terms of the own one."""
    slots, own = index % wire.window, pieces[wire.group.rank]
    incoming = [wire.room(slot, own) for slot in wire.incoming[slots]]
    outgoing = [wire.room(slot, piece) for slot, piece in zip(wire.outgoing[slots], pieces, strict=True)]
    return _swap_messages(
        exchange, incoming, lambda: wire.codec.quantise_each(pieces, outgoing, residuals, skipped=wire.group.rank)
    )


def _run(
    exchange: Exchange,
    count: int,
    window: int,
    start: Callable[[int], Wait],
    end: Callable[[int], None],
    turn: Callable[[int], Wait] | None = None,
) -> None:
    """Takes rounds through `start`, `turn` and `end`, each after what the one before waits for, and keeps `window` of
    them under way; a round's slots are free again when it has ended."""
    waits: dict[int, Wait] = {}
    for index in range(count + window):
        oldest, turning = index - window, index - window + 1
        if oldest in waits:
            waits.pop(oldest)()
            end(oldest)
        if index < count:
            waits[index] = start(index)
        if turn is not None and turning in waits:
            waits.pop(turning)()
            waits[turning] = turn(turning)
    exchange.finish()


def _swap_messages(exchange: Exchange, incoming: Sequence[Tensor], fill: Callable[[], Iterable[Tensor]]) -> Wait:
    """Begins to receive `incoming[i]` from every other rank i and to send it the i-th message of `fill`."""
    rank = exchange.group.rank
    if exchange.group.backend != "gloo":
        nothing = incoming[rank][:0]
        messages = [nothing if peer == rank else message for peer, message in enumerate(fill())]
        arriving = [nothing if peer == rank else message for peer, message in enumerate(incoming)]
        sent = sum(message.nbytes for message in messages)
        exchange.native(lambda: dist.all_to_all(arriving, messages, group=exchange.process_group), sent)
        return lambda: None
    waits = [exchange.post_recv(room, peer) for peer, room in enumerate(incoming) if peer != rank and len(room)]
    for peer, message in enumerate(fill()):
        if peer != rank and len(message):
            waits.append(exchange.post_send(message, peer))
    return partial(wait_for_all, waits)
