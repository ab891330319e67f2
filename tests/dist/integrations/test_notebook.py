"""The example notebook: its cells before the launcher, and its function as each process runs it.

By hand all of it runs in a kernel: `jupyter execute examples/notebook.ipynb`, with ipykernel in this environment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.dist.integrations.hugging import launched
from tests.dist.pool import on_ranks

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
