"""Where the virtual device cannot be compiled, the command says what is needed, once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from zeromesh.cli.app import main

CONFIG = """
strategy = "node=3"
mesh = { node = 8 }
run = { directory = "out", steps = 1 }
model = { config = { model_type = "tiny" } }
data = { files = ["*.txt"], seq_len = 8, holdout = 0 }
batch = { global_sequences = 8, micro = 1 }
optimizer = { lr = 1e-2 }
"""


def test_without_a_compiler_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "some.txt").write_text("a text to learn from " * 8)
    fake = Path(__file__).parents[1] / "train" / "fake"
    monkeypatch.setenv("PYTHONPATH", f"{fake}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "nothing-built"))
    monkeypatch.setattr(sys, "argv", ["zeromesh", "rehearse", str(tmp_path / "run.toml")])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert said.err.count("zeromesh: ") == 1 and "Traceback" not in said.err
    assert "compiled on first use, which needs a C++ compiler" in said.err and "apt install g++" in said.err
