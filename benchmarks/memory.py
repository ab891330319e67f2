"""Peak memory of one process: zeromesh without sharding against plain PyTorch, with gradients alive in both.

    make bench-memory ARGS="--out benchmarks/results/memory.json"

Each side runs in a separate process: accumulation 2, `zero_grad(set_to_none=False)`, fused AdamW. The figure is the
process's peak resident set, less its size before the model was made.
"""

from __future__ import annotations

import os
import resource
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import zeromesh as zm
from benchmarks.harness import itself, parser, save
from benchmarks.peers import MODELS, batches, make_model


def peak(side: str, size: str, steps: int) -> int:
    """Peak bytes of one side."""
    torch.set_num_threads(1)
    zm.shard(torch.nn.Linear(2, 2), None, "node=3")  # its imports are not part of the model's memory
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    model: Any = make_model(size)
    if side == "zeromesh":
        zm.shard(model, None, "node=3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(steps):
        for index, batch in enumerate(batches(2, 2, 128)):
            with zm.accumulate(model, last=index == 1) if side == "zeromesh" else nullcontext():
                (model(input_ids=batch, labels=batch, use_cache=False).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="30M")
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--side", choices=["zeromesh", "plain"], help="print the bytes of this one")
    args = options.parse_args()
    if args.side:
        print(peak(args.side, args.model, args.steps))
        return
    own = ("--model", args.model, "--steps", args.steps, "--side")
    peaks = [[itself("memory", *own, side) for side in ("zeromesh", "plain")] for _ in range(args.pairs)]
    ours, plain = (statistics.median(side) for side in zip(*peaks, strict=True))
    result = {"model": args.model, "zeromesh_bytes": ours, "plain_bytes": plain, "ratio": round(ours / plain, 4)}
    save(args.out, results=result, peaks=peaks)


if __name__ == "__main__":
    main()
