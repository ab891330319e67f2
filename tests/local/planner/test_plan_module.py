"""`zeromesh plan` of a function that returns a module, in a directory of one's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SOURCE = """
from torch import nn

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 512)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)

def make():
    return Toy()
"""


def test_a_module_of_the_working_directory_is_planned(tmp_path: Path) -> None:
    """`-P` leaves the working directory out of the path, as an installed console script does."""
    (tmp_path / "toy.py").write_text(SOURCE)
    arguments = ["--cluster", "gloo-laptop", "--seq-len", "128", "--global-batch-tokens", "4096", "--json"]
    command = [sys.executable, "-P", "-m", "zeromesh.cli", "plan", "--model", "toy:make", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    states = sum(answer["best"]["memory_bytes"][key] for key in ("params", "grads", "optimizer"))
    assert 0 < states < 20 * 100_000
