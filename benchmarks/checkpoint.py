"""Times saves and loads against plain DCP of FSDP2: the same model, disk and ranks, in one run, taking turns.

    python benchmarks/checkpoint.py -o benchmarks/results/checkpoint.json

Both sides save parameters and AdamW's states in fp32 (zeromesh also the ranks' random states), to one file a rank.
Reads may come from the page cache, on both sides. When a save ends, everything is on the disk, on both sides: DCP syncs
each data file and its index, which is its default; zeromesh also its manifest and both directories, and it copies the
shards before it writes them. Both compute CRC-32s of what they write. What a side saved before is deleted, and that
synced, before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load_into
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save_from
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeromesh as zm
from zeromesh.measure.setting import read_setting

WORLD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Times of the slowest rank, seconds: medians, and what they are the medians of.

    Args:
        state_bytes: parameters and moments of all ranks.
        staging_bytes: host memory of the copy that an asynchronous save makes, on one rank.
        median_s: by what was timed.
        all_s: one for each turn.
        median_cpu_s: of all threads of a rank, of the one that used most; hardly depends on what else the machine does.

    Timed are:
        save, dcp_save: until everything is on the disk.
        block: how long an asynchronous save keeps training waiting.
        copy: of this rank's shards into memory that is there already, for comparison with `block`.
        load, dcp_load: into a model of the same layout.
        load_other: into one of another strategy.
    """

    state_bytes: int
    staging_bytes: int
    median_s: dict[str, float]
    all_s: dict[str, list[float]]
    median_cpu_s: dict[str, float]


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
    """(seconds, seconds of CPU) of the slowest rank, started together."""
    dist.barrier()
    start, cpu = perf_counter(), process_time()
    work()
    spent = torch.tensor([perf_counter() - start, process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent[0]), float(spent[1])


def rank_main(rank: int, directory: str, layers: int, hidden: int, repeats: int) -> None:
    warnings.simplefilter("ignore")  # torch's, of its own calls
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    root = Path(directory)
    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), WORLD), rank=rank, world_size=WORLD)  # type: ignore[attr-defined]
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("cluster", "node"))
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
    if rank == 0:
        result = Result(
            state_bytes=sum(shard.numel() * shard.itemsize for shard in shards) * WORLD,
            staging_bytes=staging_bytes,
            median_s={name: statistics.median(seconds) for name, seconds in times.items()},
            all_s=dict(times),
            median_cpu_s={name: statistics.median(seconds) for name, seconds in cpu.items()},
        )
        (root / "result.json").write_text(json.dumps(asdict(result)))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary one")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        options = (directory, arguments.layers, arguments.hidden, arguments.repeats)
        ranks = [get_context("spawn").Process(target=rank_main, args=(rank, *options)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit("a rank failed")
        result = {"setting": read_setting(), **json.loads((Path(directory) / "result.json").read_text())}
    for name, ours, reference, bound in (
        ("save against DCP of FSDP2", "save", "dcp_save", 1.05),
        ("load against DCP of FSDP2", "load", "dcp_load", 1.1),
        ("block against a warm copy", "block", "copy", 1.2),
        ("load under another strategy", "load_other", "load", 1.5),
    ):
        median, every = result["median_s"], result["all_s"]
        shown = [f"{median[key]:8.4f} s ({min(every[key]):.4f} to {max(every[key]):.4f})" for key in (ours, reference)]
        print(f"{name:<28} {'  '.join(shown)}  {median[ours] / median[reference]:5.2f} x  (at most {bound} x)")
    print(json.dumps(result))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
