"""Everything that thinks works without torch: each package is imported in a fresh interpreter, and torch stays out."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH_FREE = ["cluster", "model", "strategy", "schedule", "cost", "simulator", "planner", "report", "trace", "units"]
READS_MODULES = ("zeromesh.model.from_module", "zeromesh.model.from_transformers", "zeromesh.model.module_")
"""The one exception: what reads an arbitrary nn.Module, or makes one, imported where it is needed."""
ENTRY_POINTS = [
    "zeromesh",
    "zeromesh.sharding",
    "zeromesh.integrations",
    "zeromesh.wires",
    "zeromesh.errors",
    "zeromesh.cli.app",
    "zeromesh.train",
]

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module("zeromesh.{name}")
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    if not module.name.startswith({exceptions!r}):
        importlib.import_module(module.name)
"""
REFUSE_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise AssertionError("imported " + name)
sys.meta_path.insert(0, Refuse())
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", TORCH_FREE)
def test_package_does_not_import_torch(name: str) -> None:
    done = run(REFUSE_TORCH + IMPORT_ALL.format(name=name, exceptions=READS_MODULES))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_point_does_not_import_torch(name: str) -> None:
    done = run(REFUSE_TORCH + f"import {name}")
    assert done.returncode == 0, done.stderr


def test_refusal_works() -> None:
    assert "imported torch" in run(REFUSE_TORCH + "import zeromesh.launch.ranks").stderr
