"""A flat slice is covered exactly by at most 2N - 1 boxes, and boxes become slices again."""

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.errors import InternalError
from zeromesh.pieces.boxes import boxes_of, runs_of

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def elements(shape, offsets, sizes):
    """Flat indices of a box, counted one by one."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in product(*ranges)]


@given(shapes, st.data())
def test_boxes_cover_a_slice_exactly_and_in_order(shape, data):
    stop = data.draw(st.integers(0, prod(shape)))
    start = data.draw(st.integers(0, stop))
    boxes = boxes_of(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    covered = [index for box in boxes for index in elements(shape, box.offsets, box.sizes)]
    assert covered == list(range(start, stop))
    for box in boxes:
        assert elements(shape, box.offsets, box.sizes) == list(range(box.start, box.stop))
        assert list(runs_of(shape, box.offsets, box.sizes)) == [(box.start, box.numel, 0)]


@given(shapes, st.data())
def test_any_box_is_its_runs(shape, data):
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    runs = list(runs_of(shape, offsets, sizes))
    assert [i for start, length, _ in runs for i in range(start, start + length)] == elements(shape, offsets, sizes)
    assert [at for _, _, at in runs] == [sum(length for _, length, _ in runs[:i]) for i in range(len(runs))]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_slice_outside_the_tensor_is_refused(start, stop):
    with pytest.raises(InternalError, match="not within a tensor of shape"):
        boxes_of((2, 3), start, stop)
