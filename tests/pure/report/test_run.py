"""The report of a run: metrics.jsonl, the page and its curves, and lines on the terminal."""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.disk import file_size_limit
from zeromesh.report import run as module
from zeromesh.report.curves import MOST, Series, curve_chart
from zeromesh.report.page import CurveChart
from zeromesh.report.run import RunReport, StepMetrics, comparison
from zeromesh.trace import MemoryLine, TrafficLine

MEMORY = [
    [MemoryLine(kind=kind, predicted_bytes=60, allocated_bytes=allocated) for allocated in (60, 70)]
    for kind in ("params", "total")
]


def metrics(step: int, **changes: Any) -> StepMetrics:
    fields = {"loss": 4.0 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64, "positions": 64, "tokens_per_s": 640.0}
    return StepMetrics(step=step, **(fields | {"step_s": 0.1} | changes))


def report(directory: Path, done: int = 0, steps: int = 9, memory: Sequence[Sequence[MemoryLine]] = ()) -> RunReport:
    lines = ["a model & more", "data"]
    return RunReport(directory, steps=steps, done=done, lines=lines, strategy="node=3", memory=lambda: memory)


def steps(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def labels(directory: Path) -> list[str]:
    return re.findall(r'class="spot"[^>]*title="([^"]*training[^"]*)"', (directory / "run.html").read_text())


def test_lines_of_metrics(tmp_path: Path) -> None:
    with closing(report(tmp_path)) as run:
        run.append(metrics(1, loss=float("nan")))
        run.append(metrics(2, eval_loss=1.5))
        first, second = steps(tmp_path)  # flushed before the file is closed
    assert (first["step"], first["loss"], second["eval_loss"]) == (1, None, 1.5)
    assert {"step", "loss", "lr", "tokens", "positions", "tokens_per_s", "grad_norm", "step_s"} == set(first)
    # The table shows the largest device.
    line = TrafficLine(axis="node", size=2, stage="3", predicted_bytes=5, sent_bytes=5, collectives=1)
    traffic = [[line, line]]
    table = comparison(MEMORY, traffic).splitlines()
    assert table[2].split() == ["parameters", "60", "70"]
    assert table[-3] == f"{'node: 2 ranks, stage 3':<40} {5:>14} {5:>14}"
    assert table[-1] == "predicted and measured differ; the largest of 2 devices is shown"


def test_resumed_run_drops_steps_it_will_repeat_and_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 1')
    with closing(report(tmp_path, 2)) as run:
        run.append(metrics(3))
    assert [step["step"] for step in steps(tmp_path)] == [1, 2, 3]
    report(tmp_path).close()
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "spoilt", [b"\xff\xfe\n", b'{"step": \x80}\n', b"[]\n", b"1\n", b'{"step": "2"}\n', b"\xe2\x80\xa8\n", b"\0" * 9]
)
def test_a_line_that_a_disk_has_spoilt_is_dropped(tmp_path: Path, spoilt: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + spoilt + b'{"step": 2}\n' * (spoilt[-1:] == b"\n"))
    with closing(report(tmp_path, 2)) as run:
        run.append(metrics(3))
    assert [step["step"] for step in steps(tmp_path)] in ([1, 2, 3], [1, 3])


@pytest.mark.usefixtures("capsys")  # else output goes to a file, which has the limit too
def test_a_full_disk_is_one_warning_and_loses_no_line_that_can_be_written_later(tmp_path: Path) -> None:
    with (
        pytest.warns(
            UserWarning, match=r"cannot read or write .*metrics\.jsonl: File too large; training goes on"
        ) as caught,
        closing(report(tmp_path)) as run,
    ):
        run.append(metrics(1))
        with file_size_limit((tmp_path / "metrics.jsonl").stat().st_size + 20):
            run.append(metrics(2))
            run.append(metrics(3))
        run.append(metrics(4))
    assert [step["step"] for step in steps(tmp_path)] == [1, 2, 3, 4]
    assert len(caught) == 1


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize("rewinds", [False, True])
def test_a_disk_that_stays_full_ends_nothing(tmp_path: Path, rewinds: bool) -> None:
    warned = pytest.warns(UserWarning, match="cannot read or write")
    with warned as caught, file_size_limit(20), closing(report(tmp_path)) as run:
        run.append(metrics(1))
        if rewinds:
            run.rewind(0)
    assert len(caught) == 2 - rewinds, "one a file; without steps there is no page"


@pytest.mark.usefixtures("capsys")
def test_a_disk_that_cannot_be_read_ends_nothing_and_what_it_holds_stays(tmp_path: Path) -> None:
    with closing(report(tmp_path)) as run:
        run.append(metrics(1))
        failing = mock.patch.object(Path, "read_bytes", side_effect=OSError(errno.EIO, "Input/output error"))
        with failing, pytest.warns(UserWarning, match=r"metrics\.jsonl: Input/output error; training goes on"):
            run.rewind(1)
        run.append(metrics(2))
    assert [step["step"] for step in steps(tmp_path)] == [1, 2]


def test_the_page_has_earlier_starts_this_one_and_no_step_that_was_taken_back(tmp_path: Path) -> None:
    before = {"step": 1, "loss": 9.0, "eval_loss": 8.0, "tokens": 100, "tokens_per_s": 50.0, "step_s": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(before) + "\n")
    with closing(report(tmp_path, 1, memory=MEMORY)) as run:
        for number in (2, 3, 4):
            run.append(metrics(number))
        run.rewind(2)
        run.append(metrics(3, eval_loss=1.5, rollbacks=1))
        assert not (tmp_path / "run.html").exists()
    shown = ["step 1: training 9, held out 8", "step 2: training 2", "step 3: training 1.333, held out 1.5"]
    assert labels(tmp_path) == shown
    html = (tmp_path / "run.html").read_text()
    assert "<b>3 of 9</b>" in html and "<b>1.5</b><span>best held-out loss, step 3" in html
    assert "a model &amp; more" in html and "Rollbacks: 1" in html
    assert re.findall(r'data-total-bytes="(\d+)"', html) == ["60", "70"]
    assert "Rank 1, which holds most of 2" in html and "Predicted and allocated differ." in html
    assert not re.search(r"https?://|<script|<link|@import|url\(", html)


def test_a_run_that_goes_on_has_a_page_and_a_start_without_steps_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY_S", -1.0)
    with closing(report(tmp_path)) as run:
        run.append(metrics(1))
        assert labels(tmp_path) == ["step 1: training 4"]
    (tmp_path / "run.html").write_text("as it was")
    report(tmp_path, 1).close()
    assert (tmp_path / "run.html").read_text() == "as it was"


def chart(places: list[int], *values: list[float], from_zero: bool = True) -> CurveChart | None:
    series = [Series(name=f"s{i}", colour="compute", values=some) for i, some in enumerate(values)]
    return curve_chart("key", "title", places, series, "{:.3g}".format, from_zero=from_zero)


def test_long_runs_and_no_finite_numbers() -> None:
    count = 7 * MOST + 3
    found = chart(list(range(1, count + 1)), [float(i % 7) for i in range(count)], from_zero=False)
    assert found is not None
    (curve,) = found.curves
    assert len(curve.line) <= MOST and len(found.spans) == len(curve.line) and len(curve.band) == 2 * len(curve.line)
    assert found.caption.startswith("Each point is the mean of 8 steps")
    assert found.spans[0].label == "steps 1 to 8: s0 2.62 (0 to 6)"
    # Numbers that are not finite are left out.
    assert chart([1, 2], [math.nan, math.inf]) is None
    found = chart([1], [math.inf], [5.0])
    assert found is not None and [curve.name for curve in found.curves] == ["s1"]
    assert found.curves[0].line[0][0] == 0.0
