"""Slices of boxes of a tensor: their place in the whole, copied from any to any; files that hold them cover it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.checkpoint.manifest import Chunk, DamagedError, Manifest, TensorEntry, check_cover
from zeromesh.errors import InternalError
from zeromesh.pieces.piece import Piece, copy_shared
from zeromesh.pieces.region import Region

SHAPE = (3, 4, 2)


@st.composite
def pieces(draw: Any) -> Piece:
    """A slice of any box of a tensor whose elements are their own places. One in nine has none."""

    def cut(size: int) -> tuple[int, int]:
        ends = st.tuples(st.integers(0, size), st.integers(0, size))
        start, stop = sorted(draw(ends.filter(lambda ends: ends[0] != ends[1])))
        return start, stop

    fold = draw(st.sampled_from([1, 2]))  # 2: some of each of two parts of the second dimension
    cuts = [cut(size) for size in (SHAPE[0], SHAPE[1] // fold, SHAPE[2])]
    sizes = [stop - start for start, stop in cuts]
    sizes[1] *= fold
    region = Region(shape=SHAPE, offsets=tuple(start for start, _ in cuts), sizes=tuple(sizes), fold=(1, fold))
    start, stop = cut(region.numel) if draw(st.integers(0, 8)) else (1, 1)
    local = whole()[region.index].reshape(-1)[start:stop].clone()
    return Piece(name="w", shape=SHAPE, start=start, local=local, within=region)


def whole() -> torch.Tensor:
    return torch.arange(24.0).view(SHAPE)


@given(pieces())
def test_boxes_and_rows_hold_its_elements(piece):
    boxes = [(box, piece.view(box)) for box in piece.boxes]
    assert all(
        values.equal(whole()[Region(shape=SHAPE, offsets=b.offsets, sizes=b.sizes).index]) for b, values in boxes
    )
    assert [float(value) for _, values in boxes for value in values.flatten()] == piece.local.tolist()
    begins, places = piece.region.begins, whole()[piece.region.index].flatten().tolist()
    if begins is not None:
        assert places == [*range(begins, begins + len(places))]
    if begins is None and piece.region.fold[1] == 1 and places:
        assert places != [*range(int(places[0]), int(places[0]) + len(places))]
    rows = list(piece.rows())
    assert torch.cat([piece.local[:0], *(row.local for row in rows)]).equal(piece.local)
    assert all(row.local.equal(whole().flatten()[row.start : row.stop]) for row in rows)


@given(pieces(), pieces())
def test_what_two_slices_share_is_copied_and_nothing_else(source, target):
    common = set(source.local.tolist()) & set(target.local.tolist())
    wanted = [value if value in common else -1.0 for value in target.local.tolist()]
    target.local.fill_(-1.0)
    assert copy_shared(source, target) == len(common)
    assert target.local.tolist() == wanted


def chunk(start: int, stop: int, columns: tuple[int, int] | None) -> Chunk:
    within = columns and Region(shape=(2, 4), offsets=(0, columns[0]), sizes=(2, columns[1] - columns[0]))
    return Chunk(start=start, stop=stop, file="__0_0.distcp", offset=64 * start, crcs=(1,), within=within)


HALVES = [chunk(0, 3, (0, 2)), chunk(3, 4, (0, 2)), chunk(0, 4, (2, 4))]


def entry(chunks: list[Chunk]) -> TensorEntry:
    return TensorEntry(dtype="float32", shape=(2, 4), chunks=tuple(chunks))


def test_regions_in_a_manifest():
    check_cover("w", entry(HALVES), "here")
    manifest = Manifest(step=1, serial=1, tensors={"w": entry(HALVES)}, files={"__0_0.distcp": 1000})
    assert Manifest.from_bytes(manifest.to_bytes(), "here").tensors == {"w": entry(HALVES)}
    # A region lies within its tensor.
    row = Chunk(start=0, stop=4, file="__0_0.distcp", offset=0, crcs=(1,), within=HALVES[2].within)
    broken = TensorEntry(dtype="float32", shape=(2, 3), chunks=(row,))
    moved = Manifest(step=1, serial=1, tensors={"w": broken}, files={"__0_0.distcp": 1000})
    with pytest.raises(DamagedError, match=r"does not have the structure of a manifest"):
        Manifest.from_bytes(moved.to_bytes(), "here")
    with pytest.raises(InternalError, match=r"does not lie within the tensor"):
        Region(shape=(4,), offsets=(3,), sizes=(2,))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (HALVES[:2], r"w has 8 elements; the files hold 4"),
        (HALVES[1:], r"w must be covered from element 0; got 3\.\.4"),
        ([HALVES[0], HALVES[2]], r"w has 4 elements in the box of \(2, 2\) at \(0, 0\); the files hold the first 3"),
        ([*HALVES[:2], chunk(0, 4, (1, 3))], r"w must lie in boxes apart from each other"),
        ([*HALVES, chunk(0, 8, None)], r"w has 8 elements; the files hold 16"),
    ],
)
def test_what_does_not_cover_a_tensor_is_damaged(chunks, message):
    with pytest.raises(DamagedError, match=message):
        check_cover("w", entry(chunks), "here")
