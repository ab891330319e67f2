"""Step time of this checkout against another one of zeromesh, in the same layouts, on gloo ranks of one machine.

    make bench-versions ARGS="../before --pairs 15 --out benchmarks/results/versions.json"

The ranks of both run at once and take turns, two steps each of which the second is timed, in alternating order; the
figure is the ratio of the medians, with the quartiles of the ratios of single pairs. One thread per rank.
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
    "host": "",  # small blocks: what is left is the engine's own time
}


def work(layout: str, micro_batches: int, rank: int, world: int, store: str) -> None:
    """One rank: a line on its input is a turn, and its answer the seconds of the second step."""
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
    model: nn.Module
    if layout == "host":
        model = nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(64)))
        data = [torch.randn(1, 8) for _ in range(micro_batches)]
    else:
        config = LlamaConfig(
            hidden_size=256, intermediate_size=688, num_hidden_layers=8, num_attention_heads=4, vocab_size=512
        )
        model = LlamaForCausalLM(config)
        data = [torch.randint(0, 512, (1, 64)) for _ in range(micro_batches)]
    zm.shard(model, mesh, LAYOUTS[layout] or "node=3", bucket_bytes=0 if layout == "host" else 25 << 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
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
        store = tempfile.mktemp()
        self._ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.versions",
                    "--work",
                    layout,
                    str(micro_batches),
                    str(rank),
                    str(world),
                    store,
                ],
                env={**os.environ, "PYTHONPATH": str(root / "src")},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def turn(self) -> float:
        """Seconds of the slowest rank's second step."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        return max(float(rank.stdout.readline()) for rank in self._ranks if rank.stdout is not None)

    def close(self) -> None:
        for rank in self._ranks:
            rank.communicate()


def compare(other: Path, layout: str, micro_batches: int, pairs: int) -> dict[str, Any]:
    """One row."""
    world = 1 if layout in ("one process", "host") else 4
    ours, before = versions = [Version(root, layout, micro_batches, world) for root in (ROOT, other)]
    times = in_turns({"ours": ours.turn, "before": before.turn}, pairs)
    for version in versions:
        version.close()
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
        rows.append(compare(given.other.resolve(), layout, micro_batches, given.pairs))
        print(rows[-1], flush=True)
    save(given.out, rows=rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        layout, micro_batches, rank, world, store = sys.argv[2:]
        work(layout, int(micro_batches), int(rank), int(world), store)
    else:
        # Not above: ranks import the other checkout's zeromesh.
        from benchmarks.harness import in_turns, parser, ratio, save

        main()
