"""Counting and deciding; what the loop does about it is tested with ranks."""

from __future__ import annotations

import pytest

from zeromesh.errors import NonFiniteError
from zeromesh.integrations.elastic import NonFinite


def test_stop_says_what_and_how_to_go_on() -> None:
    with pytest.raises(NonFiniteError, match=r"step 3: x\. The optimizer has not stepped.*nonfinite = \"skip\""):
        NonFinite().judge("step 3: x")


def test_so_many_in_a_row_and_no_more() -> None:
    counts = NonFinite(remedy="skip", most_in_a_row=2)
    for _ in range(3):
        assert [counts.judge(""), counts.judge("")] == ["skip", "skip"]
        counts.finite()
    counts.judge("")
    counts.judge("")
    with pytest.raises(NonFiniteError, match=r"step 9: x: number 3 in a row, and nonfinite_in_a_row = 2"):
        counts.judge("step 9: x")


def test_so_many_in_all() -> None:
    counts = NonFinite(remedy="rollback", most_in_all=2)
    for step in (4, 9):
        assert counts.judge("") == "rollback"
        counts.rolled_back(step, to=step - 1)
        counts.finite()
    with pytest.raises(NonFiniteError, match=r"number 3 of this run, and nonfinite_in_all = 2"):
        counts.judge("")


def test_a_roll_back_leaves_out_what_was_trained_on_since_the_checkpoint() -> None:
    counts = NonFinite()
    assert [counts.batch(step) for step in (0, 7)] == [0, 7]
    counts.rolled_back(7, to=5)  # batches 5, 6 and 7
    assert counts.batch(5) == 8
    counts.rolled_back(6, to=5)  # of what followed, 8 and 9
    assert counts.batch(5) == 10


def test_counts_come_back_from_a_checkpoint() -> None:
    counts, other = NonFinite(skipped=1, rollbacks=2, in_a_row=3, left_out=4), NonFinite(skipped=9)
    other.restore(counts.state())
    assert other == counts
    other.restore({})
    assert other == NonFinite()
