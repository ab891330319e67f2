"""Who owns which tensor: every one once, evenly, near its slices; and the way there and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.strategy.mixes import NAMES, mixes, notation
from zeromesh.pieces.boxes import runs_of
from zeromesh.pieces.owners import Owners, Placement, Share, across, choose_owners, cut, newton_schulz_flops
from zeromesh.pieces.passage import Part, bucket_of, passage
from zeromesh.pieces.region import Region
from zeromesh.strategy import Layout

LLAMA = {
    "7b": (32, [(4096, 4096)] * 4 + [(11008, 4096)] * 3),
    "70b": (80, [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192)] + [(28672, 8192)] * 3),
}
"""Blocks, and the matrices of each."""


def placements(layout: Layout, units: list[list[tuple[int, ...]]]) -> list[Placement]:
    found = []
    for unit, shapes in enumerate(units):
        padded, start = layout.padded(sum(map(math.prod, shapes))), 0
        for index, shape in enumerate(shapes):
            found.append(Placement(name=f"{unit}.{index}", shape=shape, start=start, padded=padded))
            start += math.prod(shape)
    return found


def llama(name: str, strategy: str, mesh: list[tuple[str, int]]) -> tuple[Owners, list[Placement], list[float]]:
    layout = Layout.of(strategy, mesh)
    blocks, shapes = LLAMA[name]
    tensors = placements(layout, [list(shapes) for _ in range(blocks)])
    costs = [newton_schulz_flops(tensor.shape) for tensor in tensors]
    return choose_owners(layout, tensors, costs), tensors, costs


@pytest.mark.parametrize(
    ("name", "nodes"), [("7b", 1), ("7b", 4), ("7b", 16), ("7b", 128), ("70b", 1), ("70b", 16), ("70b", 128)]
)
def test_llama_is_even_or_as_even_as_it_can_be(name: str, nodes: int) -> None:
    """On 8 to 1,024 ranks: within 10 % of the mean, or as docs/optimizers.md says where there are few matrices
    for many ranks. However short buckets are to be, all together take at most 10 % longer than the owner with the
    most."""
    owners, tensors, costs = llama(name, "node=3,cluster=1", [("node", 8), ("cluster", nodes)])
    ranks = 8 * nodes
    assert owners.balance == pytest.approx(max(owners.loads) / (sum(costs) / ranks))
    crowded = {("7b", 16): 1.20, ("7b", 128): 6.55, ("70b", 128): 3.41}
    assert owners.balance <= 1.1 or owners.balance == pytest.approx(crowded[name, nodes], rel=5e-3)
    if len(costs) < 3 * ranks:
        return
    held: Counter[int] = Counter()
    for tensor, rank in zip(tensors, owners.rank_of, strict=True):
        held[rank] += tensor.numel
    assert owners.balance <= 1.1 and max(held.values()) <= 1.1 * sum(held.values()) / ranks
    buckets = cut(tensors, owners, costs, 1_000_000)
    together = 0.0
    for bucket in buckets:
        loads = [0.0] * ranks
        for index in bucket:
            loads[owners.rank_of[index]] += costs[index]
        together += max(loads)
    assert len(buckets) > 1
    assert max(owners.loads) * (1 - 1e-9) <= together <= 1.1 * max(owners.loads)


def best(costs: Sequence[float], ranks: int) -> float:
    """The least that the rank with the most can have, by trying all choices."""
    found = {(0.0,) * ranks}
    for cost in costs:
        found = {
            tuple(sorted((*loads[:rank], loads[rank] + cost, *loads[rank + 1 :])))
            for loads in found
            for rank in range(ranks)
        }
    return min(map(max, found))


@given(st.lists(st.sampled_from([0.0, 1.0, 3.0, 4.0, 6.0, 12.75, 1e9 / 3]), min_size=1, max_size=8), st.integers(1, 4))
def test_no_choice_is_below_the_bound_and_ours_is_near_the_best(costs: list[float], ranks: int) -> None:
    layout = Layout.of("node=1", [("node", ranks)])
    owners = choose_owners(layout, placements(layout, [[(1,)] * len(costs)]), costs)
    least = best(costs, ranks)
    assert owners.bound <= least * (1 + 1e-9)
    # Graham's bound for longest first; up to 5 % above the mean is given up for bytes.
    assert max(owners.loads) <= max(4 / 3 * least, 1.05 * sum(costs) / ranks) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("costs", "ranks", "least"),
    [
        ([5, 5, 4, 4, 3], 4, 7),  # the two shortest of the five longest share a rank
        ([20, 1, 1], 2, 20),
        ([9, 25], 8, 25),  # more ranks than tensors
    ],
)
def test_the_bound_is_met_where_few_tensors_come_to_a_rank(costs: list[float], ranks: int, least: float) -> None:
    layout = Layout.of("node=1", [("node", ranks)])
    owners = choose_owners(layout, placements(layout, [[(1,)] * len(costs)]), costs)
    assert max(owners.loads) == owners.bound == least == best(costs, ranks)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, list[Placement], list[float]]:
    axes = draw(st.integers(1, 3))
    mix = draw(st.sampled_from(mixes(axes, kept=True)))
    mesh = [(name, draw(st.integers(1, 4))) for name in NAMES[:axes]]
    layout, counts = Layout.of(notation(mix), mesh), draw(st.lists(st.integers(1, 3), max_size=2))
    names = ("tp", "etp")[: len(counts)]
    found = []
    for unit in range(draw(st.integers(1, 3))):
        start, tensors = 0, []
        for index in range(draw(st.integers(1, 6))):
            shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
            planes, most = divided(draw, shape, counts)
            tensors.append(Placement(name=f"{unit}.{index}", shape=shape, start=start, padded=0, planes=planes))
            start += most
        found += [replace(tensor, padded=layout.padded(start)) for tensor in tensors]
    costs = [draw(st.sampled_from([0.0, 1.0, 2.5, newton_schulz_flops(tensor.shape)])) for tensor in found]
    return across(layout, list(zip(names, counts, strict=True))), found, costs


def divided(
    draw: st.DrawFn, shape: tuple[int, ...], counts: Sequence[int]
) -> tuple[tuple[tuple[int, Region], ...] | None, int]:
    """Parts of a tensor on planes along so many axes, each of which divides one dimension of it, as torch does, or
    packed parts of one, or none; and the most that one has."""
    if not counts:
        return None, math.prod(shape)
    dims = [draw(st.sampled_from([None, *range(len(shape))])) for _ in counts]
    folds = [
        dim is not None and dims.count(dim) == 1 and shape[dim] % (2 * count) == 0 and draw(st.booleans())
        for dim, count in zip(dims, counts, strict=True)
    ]
    if sum(folds) > 1:
        folds = [fold and axis == folds.index(True) for axis, fold in enumerate(folds)]
    planes = []
    for indices in product(*map(range, counts)):
        offsets, sizes, fold, copy = [0] * len(shape), list(shape), (0, 1), 0
        for dim, folded, count, index in zip(dims, folds, counts, indices, strict=True):
            if dim is None:
                copy = copy * count + index
            elif folded:
                sizes[dim], offsets[dim], fold = shape[dim] // count, shape[dim] // 2 // count * index, (dim, 2)
            else:
                chunk = -(-sizes[dim] // count)
                first = min(index * chunk, sizes[dim])
                offsets[dim], sizes[dim] = offsets[dim] + first, min(chunk, sizes[dim] - first)
        planes.append((copy, Region(shape=shape, offsets=tuple(offsets), sizes=tuple(sizes), fold=fold)))
    return tuple(planes), max(region.numel for _, region in planes)


def elements(of: Part | Share, shape: tuple[int, ...]) -> list[int]:
    """In the flattened tensor."""
    if of.region is None:
        return [*range(of.start, of.stop)]
    runs = (run for box in of.region.boxes(of.start, of.stop) for run in runs_of(shape, box.offsets, box.sizes))
    return [element for start, length, _ in runs for element in range(start, start + length)]


@given(cases(), st.integers(1, 60), st.sampled_from([1.0, 1.1, math.inf]))
def test_each_tensor_has_one_owner_and_no_rank_far_too_much(
    case: tuple[Layout, list[Placement], list[float]], most: int, waits: float
) -> None:
    layout, tensors, costs = case
    owners = choose_owners(layout, tensors, costs)
    buckets = cut(tensors, owners, costs, most, waits=waits)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(tensors)))
    ranks = layout.degree(layout.significant)
    assert len(owners.rank_of) == len(tensors) and all(0 <= rank < ranks for rank in owners.rank_of)
    loads: Counter[int] = Counter()
    for tensor, owner, cost in zip(tensors, owners.rank_of, costs, strict=True):
        mirrors = tensor.mirrors(owner, ranks)
        assert len(set(mirrors)) == tensor.copies and mirrors[0] == owner
        for rank in mirrors:
            loads[rank] += cost
    assert [loads[rank] for rank in range(ranks)] == pytest.approx(list(owners.loads))
    # Graham's bound for longest first is 4/3 of the best choice, which is not below `bound`; in any order it is 2.
    assert owners.bound <= max(owners.loads) * (1 + 1e-12)
    often = 4 / 3 if all(tensor.copies == 1 for tensor in tensors) else 2
    assert max(owners.loads) <= often * 1.5 * owners.bound + 1e-9


@given(cases())
def test_every_part_comes_to_its_owner(case: tuple[Layout, list[Placement], list[float]]) -> None:
    """Parts cover each tensor once, lie in the holders' state shards, and each hop leads along its axis."""
    layout, tensors, costs = case
    owners = choose_owners(layout, tensors, costs)
    parts = passage(layout, tensors, owners.rank_of)
    ranks = layout.degree(layout.significant)
    of_rank = {}
    for rank in range(layout.world):
        coordinates = layout.coordinates(rank)
        of_rank[layout.shard(ranks, layout.significant, coordinates).start] = coordinates
    for index, tensor in enumerate(tensors):
        own, mirrors = [part for part in parts if part.tensor == index], tensor.mirrors(owners.rank_of[index], ranks)
        for owner in mirrors:
            reached = [element for part in own if part.owner == owner for element in elements(part, tensor.shape)]
            assert sorted(reached) == list(range(tensor.numel))
        for part in own:
            plane, chunk = divmod(part.home, ranks // len(tensor.planes or (None,)))
            copy, region = tensor.planes[plane] if tensor.planes else (0, Region.whole(tensor.shape))
            length = tensor.padded * len(tensor.planes or (None,)) // ranks
            in_line = elements(
                Part(tensor=index, region=region, start=0, stop=region.numel, home=0, owner=0, hops=()), tensor.shape
            )
            held = in_line[max(0, chunk * length - tensor.start) : max(0, (chunk + 1) * length - tensor.start)]
            assert held and elements(part, tensor.shape) == held
            at = part.home
            for hop in part.hops:
                before, after = of_rank[hop.source], of_rank[hop.target]
                assert hop.source == at and hop.source != hop.target
                assert {name for name in before if before[name] != after[name]} <= {
                    hop.axis,
                    *(axis.name for axis in layout.replica_axes),
                }
                at = hop.target
            assert at == part.owner == mirrors[copy]
            assert len({hop.axis for hop in part.hops}) == len(part.hops)


@given(cases())
def test_bytes_are_what_lies_elsewhere_than_the_owner(case: tuple[Layout, list[Placement], list[float]]) -> None:
    """Over each axis all ranks of a copy send together the elements with another index on it than their owner: there
    the gradient, and anew the value; back the value."""
    layout, tensors, costs = case
    owners = choose_owners(layout, tensors, costs)
    parts = passage(layout, tensors, owners.rank_of)
    ranks = layout.degree(layout.significant)
    dtypes = [("fp32", "fp64")] * len(tensors)
    sent = {name: Counter[str]() for name in ("there", "back", "anew")}
    for rank in range(ranks):
        bucket = bucket_of(layout, tensors, parts, rank, dtypes)
        for name, total in sent.items():
            for shipment in getattr(bucket, name):
                total[shipment.axis.name] += shipment.sent_bytes
    expected: Counter[str] = Counter()
    for tensor, owner in zip(tensors, owners.rank_of, strict=True):
        for share in tensor.shares(ranks):
            home, there_is = share.rank, tensor.mirrors(owner, ranks)[share.copy]
            for axis in reversed(layout.significant):
                (home, here), (there_is, goal) = divmod(home, axis.size), divmod(there_is, axis.size)
                expected[axis.name] += (here != goal) * len(elements(share, tensor.shape))
    for name, width in (("there", 4), ("back", 8), ("anew", 8)):
        assert +sent[name] == +Counter({axis: width * count for axis, count in expected.items()})


def test_owners_are_near_their_slices() -> None:
    """Eight equal matrices of a block on eight ranks: each rank holds one whole, and nothing moves."""
    layout = Layout.of("node=3", [("node", 8)])
    tensors = placements(layout, [[(64, 64)] * 8] * 4)
    owners = choose_owners(layout, tensors, [1.0] * 32)
    assert owners.balance == 1.0
    assert not any(part.hops for part in passage(layout, tensors, owners.rank_of))
