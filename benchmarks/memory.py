"""Peak memory of one process: zeromesh without sharding against plain PyTorch, gradients alive in both.

    python benchmarks/memory.py --out benchmarks/results/memory.json

Each side runs in a process of its own: accumulation 2, `zero_grad(set_to_none=False)`, fused AdamW. The figure is the
process's peak resident set less what it held before the model was made.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peers import MODELS, batches, make_model

import zeromesh as zm
from zeromesh.measure.setting import read_setting


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def train(side: str, size: str, steps: int) -> None:
    """Prints the peak in bytes."""
    torch.set_num_threads(1)
    zm.shard(torch.nn.Linear(2, 2), None, "node=3")  # its imports are not the model's memory
    before = resident_bytes()
    model: Any = make_model(size)
    if side == "zeromesh":
        zm.shard(model, None, "node=3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(steps):
        data = batches(2, 2, 128)
        for index, batch in enumerate(data):
            with zm.accumulate(model, last=index == 1) if side == "zeromesh" else nullcontext():
                (model(input_ids=batch, labels=batch, use_cache=False).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def peak(side: str, size: str, steps: int) -> int:
    command = [sys.executable, __file__, "--side", side, "--model", size, "--steps", str(steps)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="30M")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--side", choices=["zeromesh", "plain"])
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    if args.side:
        return train(args.side, args.model, args.steps)
    peaks = [
        (peak("zeromesh", args.model, args.steps), peak("plain", args.model, args.steps)) for _ in range(args.pairs)
    ]
    ours, plain = (statistics.median(side) for side in zip(*peaks, strict=True))
    result = {"model": args.model, "zeromesh_bytes": ours, "plain_bytes": plain, "ratio": round(ours / plain, 4)}
    record = {"setting": read_setting(), "results": result, "peaks": peaks}
    print(json.dumps(record))
    if args.out:
        Path(args.out).write_text(json.dumps(record, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
