"""A few kills of the soak run in benchmarks/chaos.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import soak


@pytest.mark.timeout(180)  # three jobs of two processes, each with a rendezvous: seconds, on a machine that is not busy
def test_kills_lose_nothing_that_was_announced(tmp_path: Path) -> None:
    outcome = soak(2, tmp_path, steps=12, seed=1, kills_a_job=2)
    assert outcome.kills == 2
    assert len(outcome.restarts_from) >= outcome.jobs
