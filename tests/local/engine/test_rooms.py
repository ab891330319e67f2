"""Which of our modules a plain `zm.shard` loads: the core, and nothing that plans."""

from tests.forks import run_python

SCRIPT = """
import sys, torch
for name in [name for name in sys.modules if name.partition(".")[0] == "zeromesh"]:
    del sys.modules[name]  # the process that this one is a fork of may have all
import zeromesh as zm
zm.shard(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))), None, "node=3")
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "zeromesh":
        print(name, sum(1 for _ in open(module.__file__)))
"""
PLANNING = {"planner", "simulator", "cost", "cluster", "model", "report", "validate", "measure", "lab", "api"}
MODULES, LINES = 52, 10_000
"""At most."""


def test_sharding_loads_nothing_that_plans():
    done = run_python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    loaded = dict(line.split() for line in done.stdout.splitlines())
    assert {name.split(".")[1] for name in loaded if "." in name}.isdisjoint(PLANNING)
    assert len(loaded) <= MODULES and sum(map(int, loaded.values())) <= LINES
