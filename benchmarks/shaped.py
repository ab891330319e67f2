"""Lossless strategies of zeromesh against DDP, FSDP2 and DeepSpeed behind slow links: the fastest by memory.

    make bench-shaped ARGS="--tree 2@200mbit,2 --micro-batches 1 4 --out benchmarks/results/shaped.json"

Needs root: the cluster is emulated (`lab`). All systems live in the same processes and take turns in every round, in an
order that changes from round to round; the figure is the median. Ours are made anew for each round. A round times the
second of two consecutive steps, which pays for the refresh that the first one left. The work that the second one leaves
ends before the next system begins. Memory is bytes per rank: parameters, gradients, optimizer states, gathered and kept
copies. Ours is as allocated, including staging for other wire dtypes. The peers' is by formula, in their favour: two
gathered blocks and the gradients of one if they shard (`peer_bytes`). Workspaces of collectives are left out on both
sides: ours, 8 MiB per lane on CPU for any model (a quarter of FSDP2's memory for a 7M model, negligible for a large
one), and gloo's own. One thread per rank.

With few systems (`--only`) many rounds are possible: `shaped_table.py` compares them in pairs.

FSDP2 takes part as shipped, and with our reduce-scatter: gloo's own moves the bytes of an all-reduce.

Ours and one DDP join units, or fill buckets, up to 8 MiB: behind slow links that hides more than the default of 25 MiB
in both.

DeepSpeed takes part if it is installed. `deepspeed_peers.py` describes its settings, and the parts without a CPU build.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from benchmarks.deepspeed_peers import deepspeed_bytes, deepspeed_peers, installed
from benchmarks.harness import add, in_turns, on_ranks, parser
from benchmarks.peers import (
    MODELS,
    Step,
    Training,
    batches,
    ddp_step,
    fsdp_step,
    make_model,
    timed,
    zeromesh_step,
)
from benchmarks.shaped_table import CURVE, NAMES, NO_MASTERS, OURS_REDUCES, fastest_pair, is_lossless, mesh_of
from zeromesh.engine.api import engine_of
from zeromesh.launch.ranks import Ranks
from zeromesh.schedule.step import sent_bytes_per_axis

OURS = {
    2: "0,0 1,0 1,1 2,1 2,2 3,0 3,1 3,2 3,3k 3,3",
    3: "0,0,0 1,1,0 1,1,1 2,1,1 2,2,1 2,2,2 3,1,0 3,3,0 3,1,1 3,3,1 3,2,2 3,3,2 3,3,3k 3,3,3",
}
"""Lossless strategies by depth, innermost axis first."""

QUANTISED = {2: "2,2 3,3", 3: "2,2,2 3,3,3"}
"""Strategies that also run with int8 parameters and int4 gradients on the outermost axis, to be compared with
themselves."""

OVERLAPPED = {2: "0,0 1,1 2,2 3,3", 3: "0,0,0 1,1,1 2,2,1 3,3,1"}
"""Strategies that also run with two levels at work at once: those that otherwise use several levels in turn."""

AS_DDP = {2: "0,0 1,0 1,1 2,2 3,0 3,1", 3: "0,0,0 1,1,1 2,2,2 3,1,1 3,3,0 3,3,1"}
"""Strategies that also run in bf16 without fp32 masters, for comparison with DDP and ZeroRedundancyOptimizer."""

BUCKET_BYTES = 8 << 20

Maker = Callable[..., Step]


def ours(depth: int, dtype: torch.dtype) -> list[str]:
    """Returns our systems: strategies, some of which have bf16 masters."""

    def spelt(stages: str, ending: str = "") -> str:
        return ",".join(f"{name}={stage}" for name, stage in zip(NAMES, stages.split(","), strict=False)) + ending

    return [
        *map(spelt, OURS[depth].split()),
        *(spelt(stages, "@int8/int4") for stages in QUANTISED[depth].split()),
        *(spelt(stages, ";collective=ho_ring") for stages in OVERLAPPED[depth].split()),
        *(spelt(stages, NO_MASTERS) for stages in AS_DDP[depth].split() if dtype is torch.bfloat16),
    ]


def peers(sizes: tuple[int, int]) -> dict[str, Maker]:
    world, node = math.prod(sizes), sizes[1]
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    grid = init_device_mesh("cpu", sizes, mesh_dim_names=("cluster", "node"))
    fsdp = {
        "FSDP2": {"mesh": flat},
        "FSDP2, gradients whole between micro-batches": {"mesh": flat, "reduce_last": True},
        "FSDP2, no reshard": {"mesh": flat, "reshard": False},
        f"FSDP2, reshard to {node}": {"mesh": flat, "reshard": node},
        "FSDP2 2-D": {"mesh": grid},
        "FSDP2 2-D, no reshard": {"mesh": grid, "reshard": False},
    }
    return {
        "DDP": partial(ddp_step, zero=False),
        "DDP, 8 MiB buckets": partial(ddp_step, zero=False, bucket_mib=BUCKET_BYTES >> 20),
        "DDP + ZeroRedundancyOptimizer": partial(ddp_step, zero=True),
        **{name: partial(fsdp_step, **setting) for name, setting in fsdp.items()},
        **{name + OURS_REDUCES: partial(fsdp_step, our_reduce=True, **setting) for name, setting in fsdp.items()},
        **deepspeed_peers(sizes),
    }


def peer_bytes(name: str, size: str, item: int, sizes: tuple[int, int]) -> int:
    """Bytes per rank of a peer: fp32 masters, gradients and two moments; `item` bytes per gathered element."""
    model: Any = make_model(size)
    world, node = math.prod(sizes), sizes[1]
    whole = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    if name.startswith("DeepSpeed"):
        return deepspeed_bytes(name, whole, block, item, sizes)
    if name.split(",")[0] == "DDP":
        return 16 * whole if item == 4 else 8 * whole  # with bf16 parameters, gradients and states
    if name.startswith("DDP +"):
        return (8 if item == 4 else 4) * whole + (8 if item == 4 else 4) * whole // world
    shards = node if "2-D" in name else world
    held = 16 * whole // shards
    gathered = item * whole if "no reshard" in name else 2 * item * block
    kept = item * whole // node if "reshard to" in name else 0
    grads = item * whole if "whole between" in name else item * block
    return held + gathered + kept + grads


def our_step(size: str, dtype: torch.dtype, data: list[torch.Tensor], *, system: str, mesh: Any) -> Training:
    no_masters = {"master_dtype": dtype, "grad_dtype": dtype} if system.endswith(NO_MASTERS) else {}
    strategy = system.removesuffix(NO_MASTERS)
    return zeromesh_step(size, dtype, data, strategy, mesh, bucket_bytes=BUCKET_BYTES, **no_masters)


def counted(step: Training) -> tuple[int, dict[str, int]]:
    """Returns the bytes that a rank holds after one of our steps, and those that it sends on each axis in a step."""
    step()
    schedule = engine_of(step.model).schedule
    lines = zm.memory_report(step.model, step.optimizer)
    total = sum(line.allocated_bytes for line in lines if line.kind == "total")
    workspace = sum(schedule.memory.workspace.values())
    return total - workspace, sent_bytes_per_axis(schedule, micro_batches=len(step.data))


def run(
    ranks: Ranks,
    *,
    model: str,
    dtype: str,
    micro_batches: int,
    tokens: int,
    rounds: int,
    layouts: Sequence[str],
    known: bool,
    skip: str,
    only: str,
) -> list[dict[str, Any]]:
    """A task of all ranks. Returns a row for each system.

    Ours are made anew for each round. Each model has communicators, whose threads would disturb others, and the next
    model takes over those of the last. The peers are made once: they share the groups of their mesh.
    """
    torch.set_num_threads(1)
    mesh, kind, data = ranks.mesh, getattr(torch, dtype), batches(micro_batches, 2, tokens)
    sizes = (mesh.shape[0], math.prod(mesh.shape[1:]))  # peers know two levels: across slow links, and within
    makers: dict[str, Callable[[], Step]] = {}
    rows: list[dict[str, Any]] = []
    for system in (name for name in layouts or ours(mesh.ndim, kind) if re.search(only, name)):
        make = makers[system] = partial(our_step, model, kind, data, system=system, mesh=mesh)
        memory, sent = counted(make())
        rows.append({"system": system, "bytes": memory, "sent_bytes": sent})
    for system, maker in peers(sizes).items() if known else ():
        whole = "whole" in system and micro_batches == 1  # with one micro-batch, no system has whole gradients
        if re.search(only, system) and not re.search(skip or "^$", system) and not whole:
            step = maker(model, kind, data)
            step()  # DDP makes its buckets anew after the first step
            makers[system] = lambda step=step: step
            rows.append({"system": system, "bytes": peer_bytes(system, model, kind.itemsize, sizes)})
    mine = {row["system"] for row in rows if "sent_bytes" in row}
    turns = {system: partial(_second, make, system in mine) for system, make in makers.items()}
    times = in_turns(turns, rounds, warm_up=0)
    for row in rows:
        found = times[row["system"]]
        row |= {"step_s": round(statistics.median(found), 4), "all_s": [round(value, 4) for value in found]}
    return rows


def _second(make: Callable[[], Any], ours: bool) -> float:
    """Seconds of the second of two steps, which pays for work that the first one left."""
    step = make()
    step()
    seconds = timed(step)
    if ours:
        engine_of(step.model).at_rest()
    dist.barrier()
    return seconds


def compare(rows: Sequence[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """For each cap, finds the fastest of ours and of the peers that fit.

    In bf16 some peers have no fp32 masters. Compared with those, ours may have none either. The worse of both
    comparisons counts.
    """
    unit = next((row["bytes"] for row in rows if row["system"] == "FSDP2"), 0)
    lossless = [row for row in rows if is_lossless(row)]
    found = []
    for cap in (*CURVE, math.inf) if unit else ():
        fitting = [row for row in lossless if row["bytes"] <= cap * unit]
        compared = [fastest_pair(fitting, dtype, masters=masters) for masters in (True, False)]
        worst = min((pair for pair in compared if pair), key=lambda p: p[1]["step_s"] / p[0]["step_s"], default=None)
        if worst:
            ours, peer = worst
            found.append(
                {
                    "cap": cap if math.isfinite(cap) else None,
                    "ours": ours["system"],
                    "peer": peer["system"],
                    "speedup": round(peer["step_s"] / ours["step_s"], 3),
                }
            )
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tree", default="2@200mbit,2", help="two or three levels, as for `make lab`")
    options.add_argument("--model", choices=MODELS, default="7M")
    options.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    options.add_argument("--tokens", type=int, default=64, help="of each of the two sequences of a micro-batch")
    options.add_argument("--layouts", nargs="+", default=[], help="strategies in the place of ours: node=3,cluster=3h")
    options.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--skip", default="", help="peers whose name this regular expression finds")
    options.add_argument("--only", default="", help="systems, ours too, whose name this regular expression finds")
    options.add_argument("--ours", action="store_true", help="without the peers")
    args = options.parse_args()
    print(
        f"DeepSpeed {installed()} takes part" if installed() else "DeepSpeed is not installed: without it", flush=True
    )
    how = {"model": args.model, "rounds": args.rounds, "skip": args.skip, "only": args.only, "known": not args.ours}
    how |= {"tokens": args.tokens, "layouts": args.layouts}
    for dtype, micro_batches in product(args.dtypes, args.micro_batches):
        case = {"tree": args.tree, "dtype": dtype, "micro_batches": micro_batches, "model": args.model}
        case |= {} if args.tokens == 64 else {"tokens": args.tokens}
        given = how | {"dtype": dtype, "micro_batches": micro_batches}
        rows = on_ranks("benchmarks.shaped:run", mesh_of(args.tree), tree=args.tree, **given)
        under_caps = compare(rows, dtype)
        for row in sorted(rows, key=lambda row: row["step_s"]):
            print(f"{row['step_s']:8.3f} s {row['bytes'] / 1e6:7.1f} MB  {row['system']}")
        for entry in under_caps:
            print(entry, flush=True)
        add(args.out, "cells", case | {"rounds": args.rounds, "rows": rows, "under_caps": under_caps}, [*case])


if __name__ == "__main__":
    main()
