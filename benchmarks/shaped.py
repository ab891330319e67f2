"""Lossless strategies of zeromesh against DDP, FSDP2 and DeepSpeed behind slow links: the fastest by memory.

    make bench-shaped ARGS="--tree 2@200mbit,2 --micro-batches 1 4 --out benchmarks/results/shaped.json"

Needs root: the cluster is emulated (`lab`). All systems live in the same processes and take turns, a step each
in every round, in an order that changes from round to round; the figure is the median. Ours are made anew for each
round. Of each system a round times the second of two steps in a row, which pays for the refresh that the first one left
under way; what the second one leaves ends before the next system begins. Memory is counted in bytes a rank: parameters,
gradients, optimizer's states, gathered and kept copies. Ours as allocated, staging of other wire dtypes included; the
peers' by formula, in their favour: two gathered blocks and the gradients of one where they shard (`peer_bytes`). What
collectives work in is left out on both sides: ours, 8 MiB a lane on CPU whatever the model (a quarter of what FSDP2
takes of a 7M model, nothing beside a large one), and what gloo allocates by itself. One thread per rank.

Of a few systems (`--only`) many rounds can be taken: `shaped_table.py` holds them against each other in pairs.

FSDP2 takes part as it ships and with our reduce-scatter handed to it: gloo's own moves the bytes of an all-reduce.

Ours and one of the DDPs join units, or fill buckets, up to 8 MiB: behind slow links that hides more than the 25 MiB
that both ship with.

DeepSpeed takes part where it is installed; `deepspeed_peers.py` says how, in which settings, and what has no CPU build.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from benchmarks.deepspeed_peers import deepspeed_bytes, deepspeed_peers, installed
from benchmarks.harness import in_turns, parser
from benchmarks.peers import MODELS, Step, batches, ddp_step, fsdp_step, make_model, timed
from benchmarks.shaped_table import NAMES, NO_MASTERS, OURS_REDUCES, fastest_pair, is_lossless, shape_of
from lab import Lab, Tree
from zeromesh.engine.api import engine_of
from zeromesh.measure.setting import read_setting
from zeromesh.schedule.step import sent_bytes_per_axis

OURS = {
    2: "0,0 1,0 1,1 2,1 2,2 3,0 3,1 3,2 3,3k 3,3",
    3: "0,0,0 1,1,0 1,1,1 2,1,1 2,2,1 2,2,2 3,1,0 3,3,0 3,1,1 3,3,1 3,2,2 3,3,2 3,3,3k 3,3,3",
}
"""Lossless strategies by depth, innermost axis first."""

QUANTISED = {2: "2,2 3,3", 3: "2,2,2 3,3,3"}
"""Strategies that also run with int8 parameters and int4 gradients on the outermost axis, compared with themselves."""

OVERLAPPED = {2: "0,0 1,1 2,2 3,3", 3: "0,0,0 1,1,1 2,2,1 3,3,1"}
"""Strategies that also run with levels at work at once: those that otherwise use several levels in turn."""

AS_DDP = {2: "0,0 1,0 1,1 2,2 3,0 3,1", 3: "0,0,0 1,1,1 2,2,2 3,1,1 3,3,0 3,3,1"}
"""Strategies that also run in bf16 without fp32 masters, to compare with DDP and ZeroRedundancyOptimizer."""

BUCKET_BYTES = 8 << 20

CAPS = (1.0, 1.3, 1.6, 1.9, 2.5, 4.0)
"""Times what FSDP2 takes."""

Maker = Callable[..., Step]


def ours(depth: int, dtype: torch.dtype) -> list[str]:
    """Every system of ours: a strategy, and whether its masters are bf16."""

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
    """Bytes a rank of a peer: fp32 masters, gradients and two moments; `item` bytes of a gathered element."""
    model = make_model(size)
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


def our_step(size: str, dtype: torch.dtype, data: list[torch.Tensor], *, system: str, mesh: Any) -> Ours:
    """One of ours, made anew."""
    strategy, no_masters = system.removesuffix(NO_MASTERS), system.endswith(NO_MASTERS)
    options = {} if dtype is torch.float32 else {"param_dtype": dtype}
    if no_masters:
        options |= {"master_dtype": dtype, "grad_dtype": dtype}
    model = zm.shard(make_model(size), mesh, strategy, bucket_bytes=BUCKET_BYTES, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Ours(model=model, optimizer=optimizer, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """A sharded model and what it is trained on."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    data: list[torch.Tensor]

    def __call__(self) -> None:
        for index, batch in enumerate(self.data):
            with zm.accumulate(self.model, last=index == len(self.data) - 1):
                (self.model(input_ids=batch, labels=batch, use_cache=False).loss / len(self.data)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Waits for the refresh that a step has left under way."""
        engine_of(self.model).at_rest()

    def counted(self) -> tuple[int, dict[str, int]]:
        """Bytes a rank after a step, and bytes that a rank sends on each axis in a step."""
        schedule = engine_of(self.model).schedule
        lines = zm.memory_report(self.model, self.optimizer)
        total = sum(line.allocated_bytes for line in lines if line.kind == "total")
        workspace = sum(schedule.memory.workspace.values())
        return total - workspace, sent_bytes_per_axis(schedule, micro_batches=len(self.data))


def rank_program(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = tuple(args.shape)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)][::-1])
    sizes = (shape[0], math.prod(shape[1:]))  # the peers know two levels: what is behind a slow link, and the rest
    known = {} if args.ours else {n: m for n, m in peers(sizes).items() if not re.search(args.skip or "^$", n)}
    known = {name: maker for name, maker in known.items() if re.search(args.only, name)}
    for dtype in [getattr(torch, name) for name in args.dtypes]:
        for micro_batches in args.micro_batches:
            data = batches(micro_batches, 2, 64)
            rows = [
                *_our_rows(args, dtype, data, mesh),
                *_peer_rows(args, dtype, data, known, sizes),
            ]
            makers = {row["system"]: row.pop("make") for row in rows}
            times = in_turns({name: partial(_second, make) for name, make in makers.items()}, args.rounds, warm_up=0)
            for row in rows:
                found = times[row["system"]]
                row |= {"step_s": round(statistics.median(found), 4), "all_s": [round(value, 4) for value in found]}
            if dist.get_rank() == 0:
                print(json.dumps({"dtype": str(dtype)[6:], "micro_batches": micro_batches, "rows": rows}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads outlive the groups


def _our_rows(
    args: argparse.Namespace, dtype: torch.dtype, data: list[torch.Tensor], mesh: Any
) -> list[dict[str, Any]]:
    """Ours, made anew for each round: each model has communicators, whose threads would disturb the others, and the
    next model uses those of the last."""
    rows = []
    for system in (name for name in ours(mesh.ndim, dtype) if re.search(args.only, name)):
        make = partial(our_step, args.model, dtype, data, system=system, mesh=mesh)
        first = make()
        first()
        memory, sent = first.counted()
        rows.append({"system": system, "bytes": memory, "sent_bytes": sent, "make": make})
    return rows


def _peer_rows(
    args: argparse.Namespace,
    dtype: torch.dtype,
    data: list[torch.Tensor],
    known: dict[str, Maker],
    sizes: tuple[int, int],
) -> list[dict[str, Any]]:
    """The peers, made once: they share the groups of their mesh."""
    rows = []
    for name, maker in known.items():
        if len(data) > 1 or "whole" not in name:  # with one micro-batch gradients are whole nowhere
            step = maker(args.model, dtype, data)
            step()  # DDP makes its buckets anew after the first
            memory = peer_bytes(name, args.model, dtype.itemsize, sizes)
            rows.append({"system": name, "bytes": memory, "make": lambda step=step: step})
    return rows


def _second(make: Callable[[], Step]) -> float:
    """Seconds of the second of two steps, which pays for what the first has left under way."""
    step = make()
    step()
    seconds = timed(step)
    if isinstance(step, Ours):
        step.settle()
    dist.barrier()
    return seconds


def compare(rows: Sequence[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """For each cap, the fastest of ours and of the peers that fit under it.

    In bf16 some of the peers have no fp32 masters: held against those, ours may have none either. Of both comparisons
    the worse one counts.
    """
    unit = next((row["bytes"] for row in rows if row["system"] == "FSDP2"), 0)
    lossless = [row for row in rows if is_lossless(row)]
    found = []
    for cap in (*CAPS, math.inf) if unit else ():
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
    options.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--skip", default="", help="peers whose name this regular expression finds")
    options.add_argument("--only", default="", help="systems, ours too, whose name this regular expression finds")
    options.add_argument("--ours", action="store_true", help="without the peers")
    options.add_argument("--shape", type=int, nargs="+", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.shape:
        rank_program(args)
        return
    print(
        f"DeepSpeed {installed()} takes part" if installed() else "DeepSpeed is not installed: without it", flush=True
    )
    tree = Tree.parse(args.tree)
    command = [sys.executable, "-m", "benchmarks.shaped", *sys.argv[1:], "--shape", *map(str, shape_of(args.tree))]
    with Lab(tree) as lab:
        lab.run(command, check=True, timeout_s=7200, on_line=partial(_collect, args))


def _collect(args: argparse.Namespace, rank: int, stream: str, line: str) -> None:
    if rank != 0 or not line.startswith("{"):
        return
    cell = {"tree": args.tree, **json.loads(line)}
    cell["under_caps"] = compare(cell["rows"], cell["dtype"])
    for row in sorted(cell["rows"], key=lambda row: row["step_s"]):
        print(f"{row['step_s']:8.3f} s {row['bytes'] / 1e6:7.1f} MB  {row['system']}")
    for entry in cell["under_caps"]:
        print(entry, flush=True)
    if args.out:
        held = json.loads(args.out.read_text()) if args.out.exists() else {"cells": []}
        here = read_setting()
        cell |= {"model": args.model, "rounds": args.rounds} | {name: here.pop(name) for name in ("at", "load_average")}
        for one in held["cells"]:
            one.setdefault("model", held["setting"].get("model"))  # of all of them, before each had its own
        held["setting"] = here
        same = ("tree", "dtype", "micro_batches", "model")
        held["cells"] = [one for one in held["cells"] if any(one.get(key) != cell[key] for key in same)] + [cell]
        args.out.write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    main()
