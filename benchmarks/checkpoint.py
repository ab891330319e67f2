"""Times saves and loads against plain DCP of FSDP2: the same model, disk and ranks, in one run, taking turns.

    python benchmarks/checkpoint.py -o benchmarks/results/checkpoint.json

Reads may come from the page cache, on both sides. Every save is synced to the disk, on both sides.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
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

WORLD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Medians over the repeats of the slowest rank, seconds.

    Args:
        state_bytes: parameters and moments of all ranks.
        save_s, dcp_save_s: until everything is on the disk.
        block_s: how long an asynchronous save keeps training waiting.
        copy_s: a copy of this rank's shards into memory that is there already, for comparison with `block_s`.
        load_s, dcp_load_s: into a model of the same layout.
        load_other_s: into one of another strategy.
        staging_bytes: host memory of the copy, on one rank.
        load_average: of the machine at the end; above the number of cores the seconds say little.
    """

    state_bytes: int
    save_s: float
    dcp_save_s: float
    block_s: float
    copy_s: float
    load_s: float
    dcp_load_s: float
    load_other_s: float
    staging_bytes: int
    load_average: float


def build(layers: int, hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(hidden, hidden) for _ in range(layers)])


def train_once(model: nn.Module, hidden: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, hidden)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, started together."""
    dist.barrier()
    start = perf_counter()
    work()
    seconds = torch.tensor(perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


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
    times: dict[str, list[float]] = {}

    def record(name: str, work: Callable[[], Any]) -> None:
        times.setdefault(name, []).append(timed(work))

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
        if rank == 0:
            shutil.rmtree(root / "theirs", ignore_errors=True)
        record("dcp_save_s", dcp_save)
        start = perf_counter()
        record("block_s", lambda: checkpoints.save(1))
        checkpoints.wait()
        whole = torch.tensor(perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX)
        times.setdefault("save_s", []).append(float(whole))
        record("copy_s", lambda: torch._foreach_copy_(warm, shards))
        record("dcp_load_s", dcp_load)
        record("load_s", checkpoints.load)
        record("load_other_s", elsewhere.load)
        if turn == 0:
            times.clear()  # the first turn makes buffers and fills caches
    staging_bytes = checkpoints.staging_bytes
    checkpoints.close()
    if rank == 0:
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        total = sum(shard.numel() * shard.itemsize for shard in shards) * WORLD
        result = Result(state_bytes=total, staging_bytes=staging_bytes, load_average=os.getloadavg()[0], **medians)
        (root / "result.json").write_text(json.dumps(asdict(result)))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
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
        result = json.loads((Path(directory) / "result.json").read_text())
    for name, ours, reference, bound in (
        ("save against DCP of FSDP2", result["save_s"], result["dcp_save_s"], 1.05),
        ("load against DCP of FSDP2", result["load_s"], result["dcp_load_s"], 1.1),
        ("block against a warm copy", result["block_s"], result["copy_s"], 1.2),
        ("load under another strategy", result["load_other_s"], result["load_s"], 1.5),
    ):
        print(f"{name:<30} {ours:8.3f} s  {reference:8.3f} s  {ours / reference:6.2f} x  (at most {bound} x)")
    print(json.dumps(result))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
