"""Gathers and reductions over two axes at once, slice by slice.

[Note: Two levels] The region is m * g equal shards, with m the size of the `major` axis and g that of the `minor` one.
Shard i * g + t belongs to the rank with index i on major and t on minor: so two axes of a layout lie in a flat buffer.
A gather goes over minor first, a reduction over major first. If minor is the slow axis, it carries (g-1)/g of a chunk
instead of (mg-1)/(mg) of the region::

    m = g = 2             gather                              reduce-scatter
    rank (major, minor)   minor: (0,0)-(0,1), (1,0)-(1,1)     major: (0,0)-(1,0), (0,1)-(1,1)
    shards a b | c d      then major: (0,0)-(1,0), ...        then minor

In a gather, each slice that minor delivers is sent on to all ranks of major at once. In a reduction, each slice is sent
over minor as soon as it is summed over major. The bits are those of two collectives, one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from zeromesh.collectives.ho_ring.cost import WINDOW, slice_bytes, sum_terms
from zeromesh.comm.exchange import AxisGroup, Channel, Exchange, Wait, chunks_of
from zeromesh.comm.messages import SumScratch, parts, pieces, post, sum_dtype
from zeromesh.comm.transport import carried
from zeromesh.wires.target import Target

LAG = 2
"""Rounds by which sums over minor follow those over major, so that their messages have time to arrive."""


@carried
def ho_ring_all_gather(region: Tensor, major: AxisGroup, minor: AxisGroup) -> None:
    """Gathers every rank's shard into `region` ([Note: Two levels]); this rank's shard is already there. Raises
    CommunicationError if a peer died, stalled, or issued another collective."""
    grid = _Grid.of(region, major, minor, "all_gather", (major.gather, minor.gather))
    numel = slice_bytes(grid.shards[0][0].nbytes) // region.element_size()
    _gather_along_ring(grid, numel)
    grid.finish()


def _gather_along_ring(grid: _Grid, numel: int) -> None:
    """Sends each piece along the ring over minor. Every rank that has it sends it to all of major."""
    major, minor = grid.major.group, grid.minor.group
    size, own = minor.size, minor.rank
    # Shards come along the ring to this rank in this order, its own first. All ranks of its major axis have the same
    # order.
    order = [grid.shards[major.rank][(own - step) % size] for step in range(size)]
    ring = [(piece, grid.minor.post_recv(piece, (own - 1) % size)) for t in order[1:] for piece in pieces(t, numel)]
    spread = [grid.major.post_recv(piece, peer) for peer, piece in _from_major(grid, numel)]
    last = len(ring) - len(pieces(order[0], numel))

    def pass_on(piece: Tensor, *, along_ring: bool) -> None:
        if along_ring:
            grid.minor.before_finish(grid.minor.post_send(piece, (own + 1) % size))
        for peer in grid.major.peers:
            grid.major.before_finish(grid.major.post_send(piece, peer))

    for piece in pieces(order[0], numel):
        pass_on(piece, along_ring=True)
    for index, (piece, wait) in enumerate(ring):
        wait()
        pass_on(piece, along_ring=index < last)
    for wait in spread:
        wait()


def _from_major(grid: _Grid, numel: int) -> Iterator[tuple[int, Tensor]]:
    size, own = len(grid.shards[0]), grid.minor.group.rank
    for step in range(size):
        columns = [pieces(row[(own - step) % size], numel) for row in grid.shards]
        for index in range(len(columns[0])):
            yield from ((peer, columns[peer][index]) for peer in grid.major.peers)


@carried
def ho_ring_reduce_scatter(
    region: Tensor,
    out: Tensor,
    major: AxisGroup,
    minor: AxisGroup,
    *,
    workspace: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
    accumulate: bool = False,
) -> None:
    """Sums this rank's shard of every rank's `region`, times both `scales`. Writes the sum to `out`, or adds it there.
    Raises CommunicationError if a peer died, stalled, or issued another collective."""
    grid = _Grid.of(region, major, minor, "reduce_scatter", (major.reduce, minor.reduce))
    terms = sum_terms(major.size, minor.size)
    wide = sum_dtype(region.dtype, out.dtype)
    scratch = SumScratch.cut(workspace, region.dtype, wide, terms=terms, longest=slice_bytes(grid.shards[0][0].nbytes))
    rounds = _Rounds(grid=grid, scratch=scratch, scale=scales[0], sums=list(grid.shards[major.rank]))
    target = Target(out=out, scale=scales[1], accumulate=accumulate)
    rounds.start()
    for index in range(len(rounds.parts) + LAG):
        if index < len(rounds.parts):
            rounds.sum_over_major(index)
        if index >= LAG:
            rounds.sum_over_minor(index - LAG, target)
    grid.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """A region's shards by (index on major, index on minor), and one exchange for each axis."""

    shards: Sequence[Sequence[Tensor]]
    major: Exchange
    minor: Exchange

    @classmethod
    def of(
        cls, region: Tensor, major: AxisGroup, minor: AxisGroup, operation: str, channels: tuple[Channel, Channel]
    ) -> _Grid:
        def exchange(group: AxisGroup, channel: Channel) -> Exchange:
            return Exchange(group, channel, operation, region.numel(), region.element_size(), major.size, minor.size)

        flat = chunks_of(region, major.size * minor.size)
        rows = [flat[row * minor.size : (row + 1) * minor.size] for row in range(major.size)]
        return cls(shards=rows, major=exchange(major, channels[0]), minor=exchange(minor, channels[1]))

    def finish(self) -> None:
        self.major.finish()
        self.minor.finish()


class _Rounds:
    """The rounds of an overlapped reduction. Each takes one part of every shard over both axes."""

    def __init__(self, *, grid: _Grid, scratch: SumScratch, scale: float, sums: Sequence[Tensor]) -> None:
        self.grid = grid
        self.scratch = scratch
        self.scale = scale
        self.sums = sums
        self.parts = parts(sums[0].numel(), scratch.numel)
        own, size = grid.minor.group.rank, len(sums)
        # This rank's own shard comes last, since others wait for theirs. All ranks of its major axis have the same
        # order.
        self._order = [(own + step) % size for step in range(1, size + 1)]
        over_major = WINDOW * size * len(grid.major.peers)
        self._slots_major, self._slots_minor = scratch.terms[:over_major], scratch.terms[over_major:]
        self._from_major: deque[tuple[Mapping[tuple[int, int], Tensor], Wait]] = deque()
        self._from_minor: deque[tuple[Mapping[int, Tensor], Wait]] = deque()

    def start(self) -> None:
        """Posts the first rounds over major."""
        for index in range(min(WINDOW, len(self.parts))):
            self._post_major(index)

    def _post_major(self, index: int) -> None:
        part = self.parts[index]
        pairs = [(peer, t) for t in self._order for peer in self.grid.major.peers]
        terms = dict(zip(pairs, self._slots(self._slots_major, index, len(pairs)), strict=True))
        arriving = [(slot, peer) for (peer, _), slot in terms.items()]
        leaving = [(self.grid.shards[peer][t][part], peer) for peer, t in pairs]
        self._from_major.append((terms, post(self.grid.major, arriving, leaving)))

    def _post_minor(self, index: int) -> None:
        peers = self.grid.minor.peers
        terms = dict(zip(peers, self._slots(self._slots_minor, index, len(peers)), strict=True))
        leaving = [(self.sums[t][self.parts[index]], t) for t in peers]
        self._from_minor.append((terms, post(self.grid.minor, [(slot, t) for t, slot in terms.items()], leaving)))

    def _slots(self, slots: Sequence[Tensor], index: int, count: int) -> Sequence[Tensor]:
        part = self.parts[index]
        return [slot[: part.stop - part.start] for slot in slots[index % WINDOW * count :][:count]]

    def sum_over_major(self, index: int) -> None:
        """Sums a round over major, shard by shard, and sends the sums over minor."""
        part, own = self.parts[index], self.grid.major.group.rank
        received, wait = self._from_major.popleft()
        wait()
        for t in self._order:
            mine = self.sums[t]
            terms = [mine[part] if peer == own else received[peer, t] for peer in range(len(self.grid.shards))]
            Target(out=mine, scale=self.scale, accumulate=False).add_up(
                terms, part, self.scratch.total, self.scratch.widened
            )
        self._post_minor(index)
        if index + WINDOW < len(self.parts):
            self._post_major(index + WINDOW)  # into slots whose terms are summed by now

    def sum_over_minor(self, index: int, target: Target) -> None:
        """Sums a round over minor into its part of the result."""
        part, own = self.parts[index], self.grid.minor.group.rank
        received, wait = self._from_minor.popleft()
        wait()
        terms = [self.sums[t][part] if t == own else received[t] for t in range(len(self.sums))]
        target.add_up(terms, part, self.scratch.total, self.scratch.widened)
