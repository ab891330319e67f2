"""The operations of `collectives` on quantised wires, in messages of a `WireFormat`.

Each quantises once, also where several axes follow each other, so k axes are k quantisations of a value and the error
is within `WireFormat.error_bound(k)` of the largest value::

    all_gather       own chunk -> message -> all ranks dequantise it, the sender too: replicas are equal to the bit
    reduce_scatter   chunk i -> message to rank i, which adds up all messages and its own chunk as it is, in fp32 and in
                     the order of the ranks; a ring would quantise n-1 times
    all_reduce       both, so two quantisations; the sum of a piece is quantised in the pass that adds it up

[Note: Rounds] Chunks travel in pieces. As messages, one piece is on the wire while the next is quantised and the one
before dequantised, each in cache. With the backend's collectives, a piece's kernels, its exchange and the next piece
run one after the other on the lane's stream, hidden only by the computation beside it. So pieces are as long as the
workspace allows, and few: at most `ROUNDS`, of up to five launches each, where that is the schedule's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from zeromesh.comm.exchange import AxisGroup, Channel, Exchange, Wait, chunks_of
from zeromesh.comm.messages import parts
from zeromesh.comm.transport import nothing
from zeromesh.errors import InputError, InternalError
from zeromesh.wires import has_triton
from zeromesh.wires.format import Codec, WireFormat
from zeromesh.wires.target import Target


def check_quantisable(dtype: torch.dtype, axis: str) -> None:
    """Raises InputError, at construction, for values that an axis cannot quantise."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"axis {axis}: a quantised wire carries fp32, bf16 or fp16 values; got {dtype}")


def noise_generator(group: AxisGroup, name: str = "") -> torch.Generator:
    """The generator for stochastic rounding over one axis. Its seed depends on the axis and on `name`, the buffer's, so
    that a sum on the next axis or of another buffer has other draws, and on this rank's index on the axis. It depends
    on nothing else: ranks that hold the same values (those that an earlier collective made equal) have the same index,
    so they round alike and stay equal."""
    generator = torch.Generator()  # on the host, where the seeds of a device's noise are drawn too
    return generator.manual_seed(zlib.crc32(f"{group.name} {group.rank} {name}".encode()))


def restore_kept(keep: Tensor, region: Tensor, group: AxisGroup, form: WireFormat, *, workspace: Tensor) -> None:
    """Fills `region` from the messages that `all_gather` over `group`, with a workspace of the same length, has kept:
    the same bits, and nothing is sent."""
    chunks = chunks_of(region, group.size)
    wire = _Wire.cut(form, group, workspace, None, directions=1)
    for pieces, messages in zip(wire.cut_up(chunks), wire.cut_kept(keep, chunks), strict=True):
        wire.codec.dequantise_each(messages.unbind(), pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wire:
    """A workspace cut up for one collective."""

    group: AxisGroup
    form: WireFormat
    codec: Codec
    numel: int  # elements of a piece
    incoming: Sequence[Tensor]  # for each piece in flight, room for messages of all ranks
    outgoing: Sequence[Tensor]  # the same; a gather has none

    @classmethod
    def cut(
        cls,
        form: WireFormat,
        group: AxisGroup,
        workspace: Tensor,
        generator: torch.Generator | None,
        *,
        directions: int,
    ) -> _Wire:
        """Room for messages of all ranks, once for each of the `directions`: a gather has 1, a reduction 2."""
        unit = 8 * form.granule  # keeps every view that follows on a multiple of eight bytes
        transport = group.transport
        # A device's workspace too is cut for messages as on the host, where kept ones were: [Note: Host copies] of
        # `zeromesh.comm.messages`.
        fused = form.kernels and has_triton(workspace.device.type) and not transport.messages

        def memory_bytes(numel: int) -> int:
            return 0 if fused else form.memory_bytes(numel)

        each = memory_bytes(unit) + directions * transport.window * group.size * form.message_bytes(unit)
        numel = min(transport.longest // unit, workspace.numel() // each) * unit
        if numel == 0:
            raise InternalError(
                f"a quantised collective of {group.size} ranks needs {each} bytes; got {len(workspace)}"
            )
        shape = (directions * transport.window, group.size * form.message_bytes(numel))
        rounds = workspace[memory_bytes(numel) :][: math.prod(shape)].view(shape).unbind()
        return cls(
            group=group,
            form=form,
            codec=form.codec(numel, workspace, generator),
            numel=numel,
            incoming=rounds[: transport.window],
            outgoing=rounds[transport.window :],
        )

    @property
    def window(self) -> int:
        return len(self.incoming)

    def exchange(self, channel: Channel, operation: str, chunks: Sequence[Tensor]) -> Exchange:
        return Exchange(self.group, channel, operation, chunks[0].numel(), self.numel, str(self.form))

    def rows(self, slots: Sequence[Tensor], index: int, piece: Tensor) -> Tensor:
        """The messages of a round, (ranks, bytes), one after the other."""
        message_bytes = self.form.message_bytes(piece.numel())
        return slots[index % self.window][: self.group.size * message_bytes].view(self.group.size, -1)

    def part(self, index: int, piece: Tensor) -> slice:
        """Where a round's piece lies in its chunk."""
        return slice(index * self.numel, index * self.numel + piece.numel())

    def cut_up(self, chunks: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """The pieces of all chunks, round by round."""
        return [[chunk[part] for chunk in chunks] for part in parts(chunks[0].numel(), self.numel)]

    def cut_kept(self, keep: Tensor, chunks: Sequence[Tensor]) -> Sequence[Tensor]:
        """The messages of all pieces, round by round, as `rows` has them."""
        count, numel = len(chunks), chunks[0].numel()
        length = self.form.message_bytes(numel)
        if keep.numel() != length * count:
            raise InternalError(f"kept messages of {count} chunks of {numel} need {length} bytes each; got {len(keep)}")
        # Pieces are whole blocks but the last, so their messages are as long as the chunk's in one.
        bounds = [self.form.message_bytes(part.start) for part in parts(numel, self.numel)] + [length]
        return [keep[count * start : count * stop].view(count, -1) for start, stop in pairwise(bounds)]


def gather_coded(
    region: Tensor,
    group: AxisGroup,
    form: WireFormat,
    *,
    workspace: Tensor,
    generator: torch.Generator | None,
    keep: Tensor | None,
) -> None:
    """Fills `region` with every rank's chunk, as it came over the wire; the own chunk too."""
    chunks, rank = chunks_of(region, group.size), group.rank
    wire = _Wire.cut(form, group, workspace, generator, directions=1)
    kept = None if keep is None else wire.cut_kept(keep, chunks)
    exchange = wire.exchange(group.gather, "all_gather", chunks)
    rounds = wire.cut_up(chunks)

    def messages(index: int) -> Tensor:
        return wire.rows(wire.incoming, index, rounds[index][rank]) if kept is None else kept[index]

    def start(index: int) -> Wait:
        own, rows = rounds[index][rank], messages(index)

        def fill() -> None:
            wire.codec.quantise(own, rows[rank])
            wire.codec.dequantise(rows[rank], own)

        return group.transport.gather(exchange, rows.view(-1), fill)

    def end(index: int) -> None:
        wire.codec.dequantise_each(messages(index).unbind(), rounds[index], skipped=rank)

    _run(exchange, len(rounds), wire.window, start, end)


def reduce_coded(
    operation: str,
    region: Tensor,
    target: Target,
    group: AxisGroup,
    form: WireFormat,
    *,
    workspace: Tensor,
    generator: torch.Generator | None = None,
    residual: Tensor | None = None,
) -> None:
    """Sums this rank's chunk, which is not sent and loses nothing, into `target`. An all-reduce also sends the sums on:
    a round's leave before the next round's terms are waited for."""
    chunks, rank = chunks_of(region, group.size), group.rank
    wire = _Wire.cut(form, group, workspace, generator, directions=2)
    exchange = wire.exchange(group.reduce, operation, chunks)
    rounds = wire.cut_up(chunks)
    lost = None if residual is None else wire.cut_up(chunks_of(residual, group.size))

    def terms(index: int) -> Tensor:
        return wire.rows(wire.incoming, index, rounds[index][rank])

    def start(index: int) -> Wait:
        outgoing = wire.rows(wire.outgoing, index, rounds[index][rank])
        owed = None if lost is None else lost[index]
        quantised = partial(wire.codec.quantise_each, rounds[index], outgoing.unbind(), owed, skipped=rank)
        return group.transport.swap(exchange, terms(index), outgoing, quantised)

    def add_up(index: int) -> None:
        own = rounds[index][rank]
        wire.codec.reduce(terms(index), own, rank, target, wire.part(index, own))

    def turn(index: int) -> Wait:
        """A round's sum takes the place in which no term has arrived, and the others' those of their terms."""
        own, rows = rounds[index][rank], terms(index)
        owed = None if lost is None else lost[index][rank]
        wire.codec.requantise(rows, own, rank, target, wire.part(index, own), rows[rank], owed)
        return group.transport.gather(exchange, rows.view(-1), nothing)

    def end(index: int) -> None:
        wire.codec.dequantise_each(terms(index).unbind(), rounds[index], skipped=rank)

    if operation == "all_reduce":
        _run(exchange, len(rounds), wire.window, start, end, turn)
    else:
        _run(exchange, len(rounds), wire.window, start, add_up)


def _run(
    exchange: Exchange,
    count: int,
    window: int,
    start: Callable[[int], Wait],
    end: Callable[[int], None],
    turn: Callable[[int], Wait] | None = None,
) -> None:
    """Takes rounds through `start`, `turn` and `end`, each after the wait that the one before returned, and keeps
    `window` of them under way; a round's slots are free again when it has ended."""
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
