"""Loads a pretrained model on several ranks: memory beyond the shard, and time compared with reading the file.

    make bench-loading ARGS="-o benchmarks/results/loading.json"     # about two minutes, and 3 GB of disk

A Llama in bf16 of one gigabyte (--layers for a smaller one) is written once. In each round every side loads it once, in
turns, into new buffers of the same ranks:

read      each rank reads a quarter of the file into host memory, all at once
ours      zm.from_pretrained, then zm.shard: node=3,cluster=1 with bf16 computation and fp32 masters
without   the same without reading: what it takes to allocate and to bring together
first     the library's from_pretrained on the first rank, the meta device on the others, then zm.shard

Files come from the page cache unless --cold drops them before, which the kernel may ignore. `beyond` is the most memory
that a rank has resident while it loads, above the memory that it keeps. `kept` is how much more it has afterwards than
before.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers

import zeromesh as zm
from benchmarks.harness import on_ranks, parser, save
from zeromesh.checkpoint.safetensors import Stored
from zeromesh.launch.ranks import Ranks

SHAPE = {"cluster": 2, "node": 2}
WIDTH = 2048


def write_model(directory: Path, layers: int) -> int:
    config = transformers.LlamaConfig(
        vocab_size=16384, hidden_size=WIDTH, intermediate_size=5504, num_hidden_layers=layers, num_attention_heads=16
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(directory)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def read_quarter(directory: Path, rank: int, world: int) -> Any:
    held = []
    for path in sorted(directory.glob("*.safetensors")):
        part = path.stat().st_size // world
        buffer = torch.empty(part, dtype=torch.uint8)
        with path.open("rb", buffering=0) as file:
            file.seek(part * rank)
            view = memoryview(buffer.numpy())
            while view:
                view = view[file.readinto(view) :]
        held.append(buffer)
    return held


def shard(model: Any, mesh: Any) -> Any:
    return zm.shard(model, mesh, "node=3,cluster=1", param_dtype=torch.bfloat16)


def ours(directory: Path, mesh: Any) -> Any:
    return shard(zm.from_pretrained(transformers.AutoModelForCausalLM, directory), mesh)


def without(directory: Path, mesh: Any) -> Any:
    with mock.patch.object(Stored, "fill", lambda *_: None):
        return ours(directory, mesh)


def first(directory: Path, mesh: Any) -> Any:
    kind = transformers.AutoModelForCausalLM
    if dist.get_rank() == 0:
        model = kind.from_pretrained(directory)
    else:
        with torch.device("meta"):
            model = kind.from_config(transformers.AutoConfig.from_pretrained(directory))
    return shard(model, mesh)


def timed(load: Callable[[], Any], files: list[Path]) -> tuple[float, int, int]:
    """Returns seconds until the last rank is done, the most bytes that any rank took beyond those that it keeps, and
    the most that any keeps."""
    gc.collect()
    for path in files if dist.get_rank() == 0 else ():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, started = memory("VmRSS"), perf_counter()
    held = load()
    dist.barrier()
    seconds = perf_counter() - started
    found = torch.tensor([memory("VmHWM") - memory("VmRSS"), memory("VmRSS") - before])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    del held
    return seconds, *found.tolist()


def work(ranks: Ranks, *, model: str, rounds: int, cold: bool) -> dict[str, list[tuple[float, int, int]]]:
    """A task of all ranks. Returns, by side, the results of `timed` in each round."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    directory, mesh = Path(model), ranks.mesh
    sides: dict[str, Callable[[], Any]] = {
        "read": lambda: read_quarter(directory, ranks.rank, ranks.world),
        "ours": lambda: ours(directory, mesh),
        "without": lambda: without(directory, mesh),
        "first": lambda: first(directory, mesh),
    }
    files = sorted(directory.glob("*.safetensors")) if cold else []
    found: dict[str, list[tuple[float, int, int]]] = {side: [] for side in sides}
    for _ in range(rounds + 1):
        for side, load in sides.items():
            found[side].append(timed(load, files))
    return {side: rows[1:] for side, rows in found.items()}  # the first round warms up


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=9)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--cold", action="store_true", help="from the disk and not from the page cache")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as base:
        size = write_model(Path(base), given.layers)
        rows = on_ranks("benchmarks.loading:work", SHAPE, model=base, rounds=given.rounds, cold=given.cold)
    unit = 2 * max(4 * WIDTH * WIDTH + 3 * WIDTH * 5504, 16384 * WIDTH)
    found: dict[str, Any] = {"ranks": 4, "file_bytes": size, "unit_bytes": unit, "cold": given.cold}
    for side, measured in rows.items():
        seconds, beyond, kept = zip(*measured, strict=True)
        found[side] = {"seconds": statistics.median(seconds), "all": seconds, "beyond_bytes": max(beyond)}
        found[side]["kept_bytes"] = max(kept)
    values = found["ours"]["seconds"] - found["without"]["seconds"]
    found["all_over_reading"] = found["ours"]["seconds"] / found["read"]["seconds"]
    found["values_over_reading"] = values / found["read"]["seconds"]
    save(given.out, **found)


if __name__ == "__main__":
    main()
