"""Step time of this checkout against another checkout of zeromesh, in the same layouts, on gloo ranks of one machine.

    make bench-versions ARGS="../before --pairs 15 --out benchmarks/results/versions.json"

The ranks of both run at once and take turns, in alternating order. A turn is two steps, of which the second is timed.
The figure is the ratio of the medians, with the quartiles of single pairs' ratios. One thread per rank. Rows of AdamW
time only the optimizer, in one process with all `0`, on 128 parameters of 64 x 64 and of 512 x 512. Both start anew
every `PAIRS_A_START` pairs, since a heap's placement in memory is luck: AdamW of a checkout against itself took .91 to
1.0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

LAYOUTS = {
    "one process": "",
    "all 0": "node=0,cluster=0",
    "all 1": "node=1,cluster=1",
    "all 3": "node=3,cluster=3",
    "3,0": "node=3,cluster=0",
    "host": "",  # small blocks, so that the engine's own time dominates
    **{f"AdamW {size} {kind}": "node=0" for size in (64, 512) for kind in ("plain", "foreach", "fused")},
}
PAIRS_A_START = 20
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Makes glibc keep freed memory. By default its limits follow a process's history, so that equal code took 0.65 to
1.05."""


def work(layout: str, micro_batches: int, rank: int, world: int, store: str) -> None:
    """Runs one rank. A line of input is a turn; the answer is the seconds of its second step."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM

    import zeromesh as zm

    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = None
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("cluster", "node"))
    adamw, size, kind = layout.split() if layout.startswith("AdamW") else ("", "0", "plain")
    model: nn.Module
    if adamw:
        model = nn.Sequential(*(nn.Linear(int(size), int(size), bias=False) for _ in range(128)))
        data = [torch.randn(1, int(size))]
    elif layout == "host":
        model = nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(64)))
        data = [torch.randn(1, 8) for _ in range(micro_batches)]
    else:
        config = LlamaConfig(
            hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=4, vocab_size=512
        )
        model = LlamaForCausalLM(config)
        data = [torch.randint(0, 512, (1, 64)) for _ in range(micro_batches)]
    zm.shard(model, mesh, LAYOUTS[layout] or "node=3", bucket_bytes=0 if layout == "host" else 25 << 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **{} if kind == "plain" else {kind: True})
    if adamw:
        model(data[0]).sum().backward()

    def step() -> None:
        if adamw:
            for _ in range(20 if size == "64" else 2):
                optimizer.step()
            return
        for index, batch in enumerate(data):
            with zm.accumulate(model, last=index == len(data) - 1):
                (model(batch).square().sum() if layout == "host" else model(batch, labels=batch).loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in sys.stdin:
        step()
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


class Version:
    """The ranks of one checkout."""

    def __init__(self, root: Path, layout: str, micro_batches: int, world: int) -> None:
        command, store = [sys.executable, "-m", "benchmarks.versions", "--work"], tempfile.mktemp()
        self._ranks = [
            subprocess.Popen(
                [*command, *map(str, (layout, micro_batches, rank, world, store))],
                env={**os.environ, **HEAP, "PYTHONPATH": str(root / "src")},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def turn(self) -> float:
        """Runs a turn. Returns the seconds of the slowest rank's second step."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        return max(float(rank.stdout.readline()) for rank in self._ranks if rank.stdout is not None)

    def close(self) -> None:
        for rank in self._ranks:
            rank.communicate()


def compare(other: Path, layout: str, micro_batches: int, pairs: int) -> dict[str, Any]:
    world = 4 if "node=" in LAYOUTS[layout] and "AdamW" not in layout else 1
    times: dict[str, list[float]] = {"ours": [], "before": []}
    for begun in range(0, pairs, PAIRS_A_START):
        roots = {"ours": ROOT, "before": other}
        versions = {name: Version(root, layout, micro_batches, world) for name, root in roots.items()}
        turns = {name: version.turn for name, version in versions.items()}
        for name, seconds in in_turns(turns, min(pairs - begun, PAIRS_A_START)).items():
            times[name] += seconds
            versions[name].close()
    return {"layout": layout, "micro_batches": micro_batches} | ratio(times["ours"], times["before"])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("other", type=Path, help="a checkout of the commit to compare with")
    options.add_argument("--pairs", type=int, default=15)
    options.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    options.add_argument("--micro-batches", type=int, nargs="*", default=[1, 4])
    given = options.parse_args()
    rows = []
    for layout, micro_batches in product(given.layouts, given.micro_batches):
        if layout.startswith("AdamW") and rows and rows[-1]["layout"] == layout:
            continue  # it does not depend on micro-batches
        rows.append(compare(given.other.resolve(), layout, micro_batches, given.pairs))
        print(rows[-1], flush=True)
    save(given.out, rows=rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        layout, micro_batches, rank, world, store = sys.argv[2:]
        work(layout, int(micro_batches), int(rank), int(world), store)
    else:
        # Only here, since ranks import the other checkout's zeromesh.
        from benchmarks.harness import in_turns, parser, ratio, save

        main()
