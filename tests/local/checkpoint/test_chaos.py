"""A few kills of the soak run in benchmarks/chaos.py, and that it would notice a loss."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos import ChaosError, Outcome, _Job, soak


def test_kills_lose_nothing_that_was_announced(tmp_path: Path) -> None:
    reports: list[Outcome] = []
    outcome = soak(
        2, tmp_path, steps=12, seed=1, kills_a_job=2, report=lambda outcome: reports.append(replace(outcome))
    )
    assert outcome.kills == sum(outcome.kills_by_rank) == 2 and outcome.failed == ""
    assert len(outcome.restarts_from) >= outcome.jobs
    assert [report.kills for report in reports][:2] == [1, 2]  # each kill counts as soon as it has been checked


def test_a_loss_is_noticed(tmp_path: Path) -> None:
    job = _Job(directory=tmp_path, steps=9, generator=random.Random(0), delay_s=0.0, outcome=Outcome(asked=1))
    (tmp_path / "announced").write_text("3\n4\n")
    with pytest.raises(ChaosError, match=r"step 4 had been announced; the newest in .* is 0"):
        job._check_directory()
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    with pytest.raises(ChaosError, match=r"visible, but not complete: .*manifest\.json cannot be read"):
        job._check_directory()
    (tmp_path / "resumed-1").write_text("2\n")
    with pytest.raises(ChaosError, match="step 4 had been announced, and the job went on from step 2"):
        job._check_resumed(1, announced=4)
