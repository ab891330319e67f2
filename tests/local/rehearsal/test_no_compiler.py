"""Where the virtual device cannot be compiled, the command names the missing compiler, once."""

from __future__ import annotations

import os
from pathlib import Path

from tests.forks import run_python

CONFIG = """
strategy = "node=3"
mesh = { node = 8 }
run = { directory = "out", steps = 1 }
model = { config = { model_type = "tiny" } }
data = { files = ["*.txt"], seq_len = 8, holdout = 0 }
batch = { global_sequences = 8, micro = 1 }
optimizer = { lr = 1e-2 }
"""


def test_without_a_compiler_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "some.txt").write_text("a text to learn from " * 8)
    fake = Path(__file__).parents[1] / "train" / "fake"
    around = {
        "PYTHONPATH": f"{fake}:{os.environ.get('PYTHONPATH', '')}",
        "CXX": "no-such-compiler",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "nothing-built"),
    }
    ended = run_python("-m", "zeromesh.cli", "rehearse", tmp_path / "run.toml", env=os.environ | around)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.count("zeromesh: ") == 1 and "Traceback" not in ended.stderr
    assert "compiled on first use, which needs a C++ compiler" in ended.stderr
    assert "apt install g++" in ended.stderr
