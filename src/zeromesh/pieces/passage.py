"""How slices of tensors come to their owners, and how what the owners make of them comes back.

[Note: Passage] A part of a tensor goes from the rank that holds it to the tensor's owner axis by axis, the outermost
first: ranks then share evenly what crosses the slow links, and nothing crosses them twice. The way back is the same
ranks in reverse. So over axis a the ranks that hold one copy of the states together send, each way, what lies at
another index on a than its owner has::

    node=3,cluster=1 on 2 x 2; chunks 0 to 3 are (node, cluster) = (0,0), (0,1), (1,0), (1,1); a tensor of chunk 0's
    owner:   cluster: 1 -> 0, 3 -> 2      node: 2 (with what 3 sent) -> 0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zeromesh.pieces.owners import Placement, significant_strides
from zeromesh.schedule import Bucket, Shipment
from zeromesh.strategy import Axis, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One message of a passage, of one part over one axis.

    Args:
        source, target: ranks among those that hold one copy of the states.
    """

    axis: str
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank holds of one tensor, on its way to the owner: [Note: Passage].

    Args:
        tensor: its index.
        start, stop: range of the flattened tensor.
        home: the rank that holds it.
        owner: of the tensor.
        hops: from home to owner.
    """

    tensor: int
    start: int
    stop: int
    home: int
    owner: int
    hops: tuple[Hop, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start


def passage(layout: Layout, tensors: Sequence[Placement], rank_of: Sequence[int]) -> tuple[Part, ...]:
    """The parts of all `tensors`, in an order that all ranks share."""
    strides = significant_strides(layout)
    found = []
    for index, (tensor, owner) in enumerate(zip(tensors, rank_of, strict=True)):
        for home, start, stop in tensor.parts(layout.degree(layout.significant)):
            hops = _hops(strides, home, owner)
            found.append(Part(tensor=index, start=start, stop=stop, home=home, owner=owner, hops=hops))
    return tuple(found)


def _hops(strides: Mapping[str, tuple[int, int]], home: int, owner: int) -> tuple[Hop, ...]:
    hops, at = [], home
    for axis, (stride, size) in strides.items():
        target = at + (owner // stride % size - at // stride % size) * stride
        if target != at:
            hops.append(Hop(axis=axis, source=at, target=target))
            at = target
    return tuple(hops)


def bucket_of(layout: Layout, parts: Sequence[Part], rank: int, dtypes: Sequence[tuple[str, str]]) -> Bucket:
    """What `rank` sends of a bucket's `parts`, as the schedule has it.

    Args:
        dtypes: by tensor, of gradient and values.
    """
    there, back = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for part in parts:
        grad, values = dtypes[part.tensor]
        for hop in part.hops:
            if rank == hop.source:
                there[hop.axis, grad] += part.numel
                there[hop.axis, values] += part.numel
            elif rank == hop.target:
                back[hop.axis, values] += part.numel
    return Bucket(there=_shipments(there, reversed(layout.axes)), back=_shipments(back, layout.axes))


def _shipments(sent: Mapping[tuple[str, str], int], order: Iterable[Axis]) -> tuple[Shipment, ...]:
    return tuple(
        Shipment(axis=axis, numel=numel, wire=wire)
        for axis in order
        for (name, wire), numel in sorted(sent.items())
        if name == axis.name
    )
