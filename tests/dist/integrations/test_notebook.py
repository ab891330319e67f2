"""The example notebook: its cells before the launcher, and its function as each process runs it.

Where nbclient and ipykernel are installed, all of it runs in a kernel. By hand: `jupyter execute` of its file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.integrations.hugging import launched
from tests.dist.pool import on_ranks

TIMEOUT_S = 600
NOTEBOOK = Path(__file__).parents[3] / "examples/notebook.ipynb"


def cells() -> list[str]:
    return [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]


def test_the_last_cell_launches_the_function_before_it() -> None:
    *_, function, launch = cells()
    assert function.startswith("def train(") and "notebook_launcher(train, num_processes=2)" in launch
    assert all(cell.get("outputs", []) == [] for cell in json.loads(NOTEBOOK.read_text())["cells"])


@on_ranks(2)
def test_its_function_trains() -> None:
    names: dict[str, Any] = {}
    with launched():
        exec(cells()[2], names)
        names["train"](steps=2)


def test_all_of_it_runs_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    client, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    book = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(book, timeout=TIMEOUT_S, kernel_name="python3").execute()
    plan, step, _, printed = (cell.outputs for cell in book.cells if cell.cell_type == "code")
    for (shown,) in (plan, step):
        assert shown.data["text/html"].startswith("<iframe srcdoc=") and len(shown.data["text/plain"]) < 400
    text = "".join(output.get("text", "") for output in printed)
    assert "predicted bytes  allocated bytes" in text and "loss " in text
