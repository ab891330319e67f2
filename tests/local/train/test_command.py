"""`zeromesh train` as a user starts it: exit codes, messages and files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zeromesh.cli.app import main
from zeromesh.report.run import KINDS

CONFIG = """
strategy = "node=3"
mesh = { node = 2 }
[run]
directory = "out"
steps = 3
[model]
config = { model_type = "gpt2", n_embd = 16, n_layer = 2, n_head = 2 }
[data]
files = ["text/*.txt"]
seq_len = 16
[batch]
global_sequences = 5
micro = 2
[optimizer]
lr = 1e-2
[eval]
every = 3
sequences = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number:02}.txt").write_text(f"text number {number}\n" * 10)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def zeromesh_train(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zeromesh.cli", "train", str(file), *arguments]
    around = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, env=around, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str]]:
    """Exit code and complaint of the command in this process, before it starts any."""

    def run(file: Path, *arguments: str, **environment: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["zeromesh", "train", str(file), *arguments])
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    return run


def test_the_demo(tmp_path: Path) -> None:
    """`make demo`, but for the number of its steps: from the sources of Python's standard library to table and page."""
    demo = Path(__file__).parents[3] / "examples/demo.toml"
    changes = (f'run.directory="{tmp_path}"', "run.steps=3", "eval.sequences=4")
    done = zeromesh_train(demo, *(word for change in changes for word in ("--set", change)))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1]["eval_loss"] > 0
    assert [line["tokens"] for line in lines] == [16 * 128] * 3
    names = [*KINDS.values(), "total", "node: 2 ranks, stage 3", "cluster: 2 ranks, stage 1"]
    for name in names:
        row = re.search(rf"^{re.escape(name)} +([\d,]+) +([\d,]+)$", done.stdout, re.MULTILINE)
        assert row and row[1] == row[2] != "0", (name, done.stdout)
    assert "step 3/3" in done.stdout
    assert "predicted and measured agree on all 4 devices" in done.stdout
    page = (tmp_path / "run.html").read_text()
    assert "<b>3 of 3</b>" in page and "Predicted and allocated agree on all ranks" in page


def test_wrong_key_is_one_message_and_exit_code_2(file: Path, answer: Callable[..., tuple[object, str]]) -> None:
    code, errors = answer(file, "--set", "run.stpes=3")
    assert code == 2
    assert errors.startswith(f"zeromesh: {file}: unknown key run.stpes; did you mean run.steps?")
    assert len(errors.splitlines()) == 1


def test_wrong_input_found_by_the_ranks_is_one_message_too(file: Path) -> None:
    done = zeromesh_train(file, "--set", 'data.files=["missing/*.txt"]')
    assert done.returncode == 2
    assert "data.files: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_mesh_must_have_the_launchers_size_and_rank_0_says_so_once(
    file: Path, answer: Callable[..., tuple[object, str]]
) -> None:
    code, errors = answer(file, RANK="0", WORLD_SIZE="3")
    assert code == 2 and "mesh node=2 has 2 ranks, but the launcher started 3 processes" in errors
    assert answer(file, RANK="1", WORLD_SIZE="3") == (2, "")
