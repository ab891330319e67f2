"""`zeromesh plan` of a function that returns a module, in a directory of one's own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from zeromesh.cli.app import main

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


def test_a_module_of_the_working_directory_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is not in the path of an installed console script."""
    (tmp_path / "toy.py").write_text(SOURCE)
    arguments = ["--cluster", "gloo-laptop", "--seq-len", "128", "--global-batch-tokens", "4096", "--json"]
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", os.getcwd())])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zeromesh", "plan", "--model", "toy:make", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    answer = json.loads(capsys.readouterr().out)
    states = sum(answer["best"]["memory_bytes"][key] for key in ("params", "grads", "optimizer"))
    assert 0 < states < 20 * 100_000
