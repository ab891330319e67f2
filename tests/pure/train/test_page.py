"""The page that a run leaves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from zeromesh.train import page as page_module
from zeromesh.train.metrics import StepMetrics
from zeromesh.train.page import About, RunPage

ABOUT = About(name="run", steps=9, lines=["a model & more", "data"], strategy="node=3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    kind: str
    predicted_bytes: int
    allocated_bytes: int


MEMORY = [
    [
        Line(kind="params", predicted_bytes=60, allocated_bytes=60),
        Line(kind="params", predicted_bytes=60, allocated_bytes=70),
    ],
    [
        Line(kind="total", predicted_bytes=60, allocated_bytes=60),
        Line(kind="total", predicted_bytes=60, allocated_bytes=70),
    ],
]


def step(number: int, **others: float) -> StepMetrics:
    return StepMetrics(
        step=number, loss=4.0 / number, grad_norm=1.0, lr=1e-3, tokens=100, tokens_per_s=50.0, step_s=2.0, **others
    )


def labels(html: str) -> list[str]:
    return re.findall(r'class="spot"[^>]*title="([^"]*training[^"]*)"', html)


def made(path: Path, before: Sequence[dict[str, float]] = (), memory: Sequence[Sequence[Line]] = ()) -> RunPage:
    return RunPage(path, before, ABOUT, lambda: memory)


def test_the_page_has_earlier_starts_this_one_and_no_step_that_was_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    before = [{"step": 1, "loss": 9.0, "eval_loss": 8.0, "tokens": 100, "tokens_per_s": 50.0, "step_s": 2.0}]
    with made(path, before, MEMORY) as page:
        for number in (2, 3, 4):
            page.append(step(number))
        page.rewind(2)
        page.append(step(3, eval_loss=1.5, rollbacks=1))
        assert not path.exists()
    html = path.read_text()
    assert labels(html) == [
        "step 1: training 9, held out 8",
        "step 2: training 2",
        "step 3: training 1.333, held out 1.5",
    ]
    assert "<b>3 of 9</b>" in html and "<b>1.5</b><span>best held-out loss, step 3" in html
    assert "a model &amp; more" in html and "Rollbacks: 1" in html
    assert re.findall(r'data-total-bytes="(\d+)"', html) == ["60", "70"]
    assert "Rank 1, which holds most of 2" in html and "Predicted and allocated differ." in html
    assert not re.search(r"https?://|<script|<link|@import|url\(", html)


def test_a_run_that_goes_on_has_one_and_a_start_without_steps_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "EVERY_S", -1.0)
    path = tmp_path / "run.html"
    page = made(path)
    page.append(step(1))
    assert labels(path.read_text()) == ["step 1: training 4"]
    path.write_text("as it was")
    with made(path, [{"step": 1, "loss": 4.0}]):
        pass
    assert path.read_text() == "as it was"


def test_training_goes_on_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run.html").mkdir()
    with (
        pytest.warns(UserWarning, match=r"cannot write .*run.html: .*; training goes on"),
        made(tmp_path / "run.html") as page,
    ):
        page.append(step(1))
