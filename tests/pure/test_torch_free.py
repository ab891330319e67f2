"""Everything that thinks works without torch: imported, run and asked for help in interpreters without it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise AssertionError("imported " + name)

sys.meta_path.insert(0, Refuse())
for name in "", ".sharding", ".integrations", ".wires", ".errors", ".cli.app", ".train":
    importlib.import_module("zeromesh" + name)
# What reads an arbitrary nn.Module, or makes one, is imported where it is needed.
but = tuple("zeromesh.model." + name for name in ("from_module", "from_transformers", "module_"))
for name in "cluster", "model", "strategy", "schedule", "cost", "simulator", "planner", "report", "trace", "units":
    package = importlib.import_module("zeromesh." + name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        if not module.name.startswith(but):
            importlib.import_module(module.name)
base = "--model gpt2 --cluster a800-8x-hdr --world 8 --seq-len 512 --global-batch-tokens 8192 --json"
for command in "plan", "simulate --strategy node=3,cluster=0":
    sys.argv = ["zeromesh", *command.split(), *base.split()]
    importlib.import_module("zeromesh.cli.app").main()
try:
    import zeromesh.launch.ranks
except AssertionError as refused:
    assert "imported torch" in str(refused)
else:
    raise AssertionError("torch is not refused")
"""


def test_packages_and_commands_do_not_import_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
