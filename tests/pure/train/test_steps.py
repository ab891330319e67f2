"""Learning rate, metrics file and what progress prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.disk import file_size_limit
from zeromesh.train.config import OptimizerConfig
from zeromesh.train.learning_rate import learning_rate
from zeromesh.train.metrics import MetricsFile, StepMetrics
from zeromesh.train.progress import TimeLeft, show_progress


def metrics(step: int, **changes: float) -> StepMetrics:
    fields = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 64, "tokens_per_s": 640.0, "step_s": 0.1}
    return StepMetrics(step=step, **(fields | changes))  # type: ignore[arg-type]


def test_cosine_rises_falls_and_ends_where_asked() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, final_lr_ratio=0.1)
    rates = [learning_rate(config, step, 21) for step in range(21)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[12] == pytest.approx(0.55)
    assert rates[20] == pytest.approx(0.1)


def test_constant_stays_after_the_warm_up() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="constant")
    assert [learning_rate(config, step, 5) for step in range(5)] == [0.5, 1.0, 1.0, 1.0, 1.0]


@given(steps=st.integers(1, 60), warmup=st.integers(0, 60), ratio=st.floats(0, 1))
def test_rate_stays_within_its_bounds(steps: int, warmup: int, ratio: float) -> None:
    config = OptimizerConfig(lr=3.0, warmup_steps=min(warmup, steps), final_lr_ratio=ratio)
    rates = [learning_rate(config, step, steps) for step in range(steps)]
    assert all(0 < rate <= 3.0 or (rate == 0 and ratio == 0) for rate in rates)
    after = rates[config.warmup_steps :]
    assert after == sorted(after, reverse=True)


def test_metrics_are_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, steps_done=0) as file:
        file.append(metrics(1))
        file.append(metrics(2, eval_loss=1.5))
        lines = [json.loads(line) for line in path.read_text().splitlines()]  # flushed before the file is closed
    assert [line["step"] for line in lines] == [1, 2]
    assert {"step", "loss", "tokens_per_s", "grad_norm", "step_s"} <= set(lines[0])
    assert "eval_loss" not in lines[0]
    assert lines[1]["eval_loss"] == 1.5


def test_resumed_run_drops_steps_it_will_repeat_and_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 1')
    with MetricsFile(path, steps_done=2) as file:
        file.append(metrics(3))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    with MetricsFile(path, steps_done=0):
        pass
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "spoilt", [b"\xff\xfe\n", b'{"step": \x80}\n', b"[]\n", b"1\n", b'{"step": "2"}\n', b"\xe2\x80\xa8\n", b"\0" * 9]
)
def test_a_line_that_a_disk_has_spoilt_is_dropped(tmp_path: Path, spoilt: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + spoilt + b'{"step": 2}\n' * (spoilt[-1:] == b"\n"))
    with MetricsFile(path, steps_done=2) as file:
        file.append(metrics(3))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] in ([1, 2, 3], [1, 3])


def test_a_full_disk_is_one_warning_and_loses_no_line_that_can_be_written_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with (
        pytest.warns(UserWarning, match=r"cannot write .*metrics\.jsonl: File too large; training goes on") as caught,
        MetricsFile(path, steps_done=0) as file,
    ):
        file.append(metrics(1))
        with file_size_limit(path.stat().st_size + 20):
            file.append(metrics(2))
            file.append(metrics(3))
        file.append(metrics(4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert len(caught) == 1


@pytest.mark.parametrize("rewinds", [False, True])
def test_a_disk_that_stays_full_ends_nothing(tmp_path: Path, rewinds: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    with (
        pytest.warns(UserWarning, match="cannot write") as caught,
        file_size_limit(20),
        MetricsFile(path, steps_done=0) as file,
    ):
        file.append(metrics(1))
        if rewinds:
            file.rewind(0)
    assert len(caught) == 1


def test_time_left_ignores_one_slow_step() -> None:
    left = TimeLeft(10)
    assert left.after(metrics(1, step_s=60.0)) == pytest.approx(540)
    for step in range(2, 5):
        seconds = left.after(metrics(step, step_s=2.0))
    assert seconds == pytest.approx(12)


def test_plain_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(100, steps_done=0, quiet=False) as progress:
        for step in range(1, 101):
            progress.show(metrics(step))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step   1/100  loss 2.000  grad norm 1  640 tokens/s  0:10 left"
    assert lines[-1].endswith("0:00 left")
    assert 15 < len(lines) < 25


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(2, steps_done=0, quiet=True) as progress:
        progress.show(metrics(1))
    assert capsys.readouterr().out == ""
