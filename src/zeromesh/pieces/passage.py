"""Routes of tensors' slices to their owners, and of the owners' results back.

[Note: Passage] A part of a tensor goes from the rank that holds it to the tensor's owner axis by axis, the outermost
first. So ranks share the bytes on the slow links evenly, and nothing crosses these twice. The way back visits the same
ranks in reverse. Over axis a, each way, the ranks that hold one copy of the states together send the elements whose
index on a differs from their owner's::

    node=3,cluster=1 on 2 x 2; chunks 0 to 3 are (node, cluster) = (0,0), (0,1), (1,0), (1,1); a tensor of chunk 0's
    owner:   cluster: 1 -> 0, 3 -> 2      node: 2 (with 3's part) -> 0

[Note: Kept values] An owner keeps the values of its tensors from step to step, so gradients come to it and values go
back. If something else has changed a tensor since (a load, another optimizer, a user), its values come as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zeromesh.pieces.owners import Placement, significant_strides
from zeromesh.pieces.region import Region
from zeromesh.schedule.bucket import Bucket, Shipment
from zeromesh.schedule.unit import ITEM_BYTES
from zeromesh.strategy import Axis, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One message with a part over one axis, between ranks that hold one copy of the states."""

    axis: str
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of one tensor that one rank holds, and its way to the owner: [Note: Passage]."""

    tensor: int
    region: Region | None  # `start` and `stop` count in it, flattened; None for the whole tensor
    start: int
    stop: int
    home: int  # the rank that holds it
    owner: int
    hops: tuple[Hop, ...]  # from home to owner

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def passed_by(self) -> tuple[int, ...]:
        """Ranks that have separate memory for the part for a while: those on its way, and its owner if the part is not
        a range of the tensor."""
        return tuple(hop.target for hop in (self.hops if self.region is not None else self.hops[:-1]))


def passage(layout: Layout, tensors: Sequence[Placement], rank_of: Sequence[int]) -> tuple[Part, ...]:
    """Returns the parts of all `tensors`, in the same order on all ranks."""
    strides, ranks = significant_strides(layout), layout.degree(layout.significant)
    found = []
    for index, (tensor, owner) in enumerate(zip(tensors, rank_of, strict=True)):
        owners = tensor.mirrors(owner, ranks)
        for copy, home, region, start, stop in tensor.shares(ranks):
            goal = owners[copy]
            hops = _hops(strides, home, goal)
            part = Part(tensor=index, region=region, start=start, stop=stop, home=home, owner=goal, hops=hops)
            found.append(part)
    return tuple(found)


def _hops(strides: Mapping[str, tuple[int, int]], home: int, owner: int) -> tuple[Hop, ...]:
    hops, at = [], home
    for axis, (stride, size) in strides.items():
        target = at + (owner // stride % size - at // stride % size) * stride
        if target != at:
            hops.append(Hop(axis=axis, source=at, target=target))
            at = target
    return tuple(hops)


def bucket_of(
    layout: Layout, tensors: Sequence[Placement], parts: Sequence[Part], rank: int, dtypes: Sequence[tuple[str, str]]
) -> Bucket:
    """Describes a bucket for the schedule: the messages that `rank` sends, and its temporary memory.

    `dtypes` has those of gradient and values, by tensor.
    """
    there, back, anew = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for part in parts:
        grad, values = dtypes[part.tensor]
        for hop in part.hops:
            if rank == hop.source:
                there[hop.axis, grad] += part.numel
                anew[hop.axis, values] += part.numel
            elif rank == hop.target:
                back[hop.axis, values] += part.numel
    inwards, outwards = [*reversed(layout.axes)], layout.axes
    return Bucket(
        there=_shipments(there, inwards),
        back=_shipments(back, outwards),
        anew=_shipments(anew, inwards),
        room_bytes=rooms_of(tensors, parts, dtypes)[rank],
    )


def rooms_of(tensors: Sequence[Placement], parts: Sequence[Part], dtypes: Sequence[tuple[str, str]]) -> Counter[int]:
    """Returns, by rank, the bytes of temporary memory for a bucket's `parts`: gradients at their tensors' owners,
    unless a whole tensor lies there already, and pieces that pass through."""
    rooms: Counter[int] = Counter()
    for part in parts:
        grad, values = (ITEM_BYTES[dtype] for dtype in dtypes[part.tensor])
        if part.hops or part.numel < tensors[part.tensor].numel:
            rooms[part.owner] += part.numel * grad
        for rank in part.passed_by:
            rooms[rank] += part.numel * (grad + values)
    return rooms


def _shipments(sent: Mapping[tuple[str, str], int], order: Iterable[Axis]) -> tuple[Shipment, ...]:
    return tuple(
        Shipment(axis=axis, numel=numel, wire=wire)
        for axis in order
        for (name, wire), numel in sorted(sent.items())
        if name == axis.name
    )
