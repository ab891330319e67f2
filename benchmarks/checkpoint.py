"""Times saves and loads against plain DCP of FSDP2, with the same model, disk and ranks, in one run and in turns.

    make bench-checkpoint ARGS="-o benchmarks/results/checkpoint.json"

Both sides save parameters and AdamW's states in fp32 (zeromesh also the ranks' random states), to one file per rank.
Reads may come from the page cache, on both sides. When a save ends, everything is on the disk, on both sides. DCP syncs
each data file and its index, which is its default. zeromesh also syncs its manifest and both directories, and it copies
the shards before it writes them. Both compute CRC-32s of what they write. Before the clock starts, a side's previous
save is deleted, and the deletion synced.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load_into
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save_from
from torch.distributed.fsdp import fully_shard

import zeromesh as zm
from benchmarks.harness import on_ranks, parser, save
from zeromesh.launch.ranks import Ranks

WORLD = 2


def build(layers: int, hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(hidden, hidden) for _ in range(layers)])


def train_once(model: nn.Module, hidden: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, hidden)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Returns (seconds, processor seconds) of the slowest rank; all ranks start together."""
    dist.barrier()
    start, cpu = perf_counter(), process_time()
    work()
    spent = torch.tensor([perf_counter() - start, process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent[0]), float(spent[1])


def measure(ranks: Ranks, *, directory: str, layers: int, hidden: int, repeats: int) -> dict[str, Any]:
    """A task of all ranks. Returns the slowest rank's times, and their medians.

    save, dcp_save: until everything is on the disk.
    block: how long an asynchronous save keeps training waiting.
    copy: of this rank's shards into memory that is there already, for comparison with `block`.
    load, dcp_load: into a model of the same layout.
    load_other: into one of another strategy.
    """
    warnings.simplefilter("ignore")  # torch warns about its own calls
    torch.set_num_threads(1)
    root, rank, mesh = Path(directory), ranks.rank, ranks.mesh
    theirs = build(layers, hidden)
    for layer in theirs:
        fully_shard(layer, mesh=mesh["node"])
    fully_shard(theirs, mesh=mesh["node"])
    their_optimizer = train_once(theirs, hidden)
    ours = zm.shard(build(layers, hidden), mesh, "node=3,cluster=0")
    our_optimizer = train_once(ours, hidden)
    other = zm.shard(build(layers, hidden), mesh, "node=1,cluster=0", units=[nn.Sequential])
    other_optimizer = train_once(other, hidden)
    checkpoints = zm.Checkpoints(root / "ours", ours, our_optimizer, keep=1)
    elsewhere = zm.Checkpoints(root / "ours", other, other_optimizer)
    shards = [p.local for p in ours.parameters()]  # type: ignore[attr-defined]
    shards += [value for values in our_optimizer.state.values() for value in values.values()]
    warm = [torch.zeros_like(shard) for shard in shards]
    times: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)

    def record(name: str, work: Callable[[], Any]) -> None:
        seconds, cpu_s = timed(work)
        times[name].append(seconds)
        cpu[name].append(cpu_s)

    def delete(directory: Path) -> None:
        if rank == 0:
            for path in [path for path in directory.glob("*") if path.name != ".lock"]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        dist.barrier()

    def save() -> None:
        checkpoints.save(1)
        checkpoints.wait()

    def dcp_save() -> None:
        model_state, optimizer_state = get_state_dict(theirs, their_optimizer)
        state: dict[str, Any] = {"model": model_state, "optim": optimizer_state}
        dcp_save_from(state, checkpoint_id=root / "theirs")

    def dcp_load() -> None:
        model_state, optimizer_state = get_state_dict(theirs, their_optimizer)
        state: dict[str, Any] = {"model": model_state, "optim": optimizer_state}
        dcp_load_into(state, checkpoint_id=root / "theirs")
        set_state_dict(theirs, their_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    for turn in range(repeats + 1):
        for name, work in (("save", save), ("dcp_save", dcp_save))[:: 1 if turn % 2 else -1]:
            delete(root / ("ours" if work is save else "theirs"))
            record(name, work)
        record("dcp_load", dcp_load)
        record("load", checkpoints.load)
        record("load_other", elsewhere.load)
        delete(root / "ours")
        record("copy", lambda: torch._foreach_copy_(warm, shards))
        record("block", lambda: checkpoints.save(1))
        checkpoints.wait()
        if turn == 0:
            times.clear()  # the first turn makes buffers and fills caches
            cpu.clear()
    staging_bytes = checkpoints.staging_bytes
    checkpoints.close()
    return {
        "state_bytes": sum(shard.numel() * shard.itemsize for shard in shards) * WORLD,
        "staging_bytes": staging_bytes,  # of one rank, for the copy that an asynchronous save makes
        "median_s": {name: statistics.median(seconds) for name, seconds in times.items()},
        "all_s": dict(times),
        # Over all threads of the rank that used most; hardly affected by other work on the machine.
        "median_cpu_s": {name: statistics.median(seconds) for name, seconds in cpu.items()},
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--hidden", type=int, default=2048)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary one")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        sizes = {"layers": given.layers, "hidden": given.hidden, "repeats": given.repeats}
        mesh = {"cluster": 1, "node": WORLD}
        result = on_ranks("benchmarks.checkpoint:measure", mesh, directory=directory, **sizes)
    save(given.out, **result)
    for name, ours, reference, bound in (
        ("save against DCP of FSDP2", "save", "dcp_save", 1.05),
        ("load against DCP of FSDP2", "load", "dcp_load", 1.1),
        ("block against a warm copy", "block", "copy", 1.2),
        ("load under another strategy", "load_other", "load", 1.5),
    ):
        median, every = result["median_s"], result["all_s"]
        shown = [f"{median[key]:8.4f} s ({min(every[key]):.4f} to {max(every[key]):.4f})" for key in (ours, reference)]
        print(f"{name:<28} {'  '.join(shown)}  {median[ours] / median[reference]:5.2f} x  (at most {bound} x)")


if __name__ == "__main__":
    main()
