"""AdamW's step on slices: against plain tensors, and against another checkout of zeromesh.

    git worktree add ../other COMMIT
    python -m benchmarks.slices --against ../other

One process, one thread, stage 0, 128 parameters of 64 x 64 and of 512 x 512, fp32. Each system lives in a process of
its own; two of them take turns, in an order that changes from pair to pair. Every `PAIRS_A_START` pairs both start
anew, since a heap's places in memory are a matter of luck: a checkout beside itself took .91 to 1.0. Milliseconds are
medians, a ratio is that of the medians, and quartiles are those of single pairs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
NUM_PARAMETERS = 128
SIZES = {64: 20, 512: 2}
"""Steps that are timed together, by size."""
PAIRS_A_START = 20
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc keeps freed memory. By default its limits follow a process's history, so that equal code took 0.65 to 1.05."""

KINDS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Squares(nn.Module):
    """A model of nothing but parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for at in range(NUM_PARAMETERS):
            self.register_parameter(f"weight{at}", nn.Parameter(torch.randn(size, size)))

    def forward(self) -> Tensor:
        return torch.stack([weight.square().sum() for weight in self.parameters()]).sum()


class System:
    """Optimizers on slices, or on plain tensors, in a process of their own."""

    def __init__(self, source: Path, sharded: bool) -> None:
        environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"} | HEAP
        command = [sys.executable, __file__, "--serve", "slices" if sharded else "plain"]
        pipes: dict[str, Any] = {"text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, **pipes)
        os.sched_setaffinity(self._process.pid, {max(os.sched_getaffinity(0))})  # one core for all, as they take turns

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def step_s(self, size: int, kind: str) -> float:
        assert self._process.stdin and self._process.stdout
        print(size, kind, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def serve(sharded: bool) -> None:
    """Until the process that asks ends."""
    steps: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        size, kind = line.split()
        if line not in steps:
            steps[line] = make_step(int(size), kind, sharded)
        began = time.perf_counter()
        for _ in range(SIZES[int(size)]):
            steps[line]()
        print((time.perf_counter() - began) / SIZES[int(size)], flush=True)


def make_step(size: int, kind: str, sharded: bool) -> Callable[[], Any]:
    model: nn.Module = Squares(size)
    if sharded:
        import zeromesh as zm

        model = zm.shard(model, None, "node=0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, **KINDS[kind])
    model().backward()
    for _ in range(3):
        optimizer.step()
    return optimizer.step


def compare(start: Callable[[], System], other: Callable[[], System], size: int, kind: str, pairs: int) -> str:
    # Not at the top: a serving process may have another checkout's zeromesh.
    from benchmarks.harness import in_turns, ratio

    found: dict[str, list[float]] = {"ours": [], "other": []}
    for turn in range(-(-pairs // PAIRS_A_START)):
        starts = [("ours", start), ("other", other)][:: -1 if turn % 2 else 1]
        systems = {name: each() for name, each in starts}
        steps = {name: partial(systems[name].step_s, size, kind) for name in found}
        for name, seconds in in_turns(steps, min(pairs, PAIRS_A_START)).items():
            found[name] += seconds
            systems[name].end()
    row = ratio(found["ours"], found["other"])
    low, _, high = row["ratio_quartiles"]
    times = f"{row['ours_s'] * 1e3:8.3f} ms / {row['peer_s'] * 1e3:8.3f} ms"
    return f"{times} = {row['ratio']:.3f}x ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--serve", choices=("slices", "plain"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve == "slices")
        return
    ours, others = partial(System, ROOT, True), {"plain tensors": partial(System, ROOT, False)}
    if arguments.against:
        others[str(arguments.against)] = partial(System, arguments.against, True)
    for size, kind, (name, other) in itertools.product(SIZES, KINDS, others.items()):
        print(f"{size:3} {kind:8} slices / {name}:", compare(ours, other, size, kind, arguments.pairs), flush=True)


if __name__ == "__main__":
    main()
