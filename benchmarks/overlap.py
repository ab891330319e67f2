"""How much of its communication a step hides: ours, FSDP2 and DDP on devices with a wall clock, behind slow links.

    make bench-overlap ARGS="--out benchmarks/results/overlap.json"
    python -m benchmarks.overlap --cells "2x2 200mbit" --budget-s 1800 --out benchmarks/results/overlap.json

Needs root and a compiler. Each rank has a simulated device in its clocked mode (docs/simdev.md), behind shaped links of
an emulated cluster (`lab`), with one rank per leaf. Kernels take time but no processor. Collectives are a ring of
messages over gloo, for all systems alike. So two cores can carry eight ranks, if time is slow enough: links and kernels
are slower by one factor, `dilation`, and seconds are the device's. `busy` is the share of the cores that the ranks
used.

The model is a stack of linear layers without bias, each one a unit, in fp32. Kernels are few and long. The rate of
products is chosen so that a step computes `ratio` times as long as the outermost link needs for `node=3,cluster=1`. A
row's bound is the maximum of its computation and of any link's counted bytes over its rate. Steps follow one another
without a pause, and the median of all except the first counts. `phases` show where the computation's stream stood
still: forwards, backwards and the rest after the last of them, over the time that their products take.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zeromesh as zm
from benchmarks.harness import add, held, in_lab, parser
from lab import Lab
from lab.counters import difference
from zeromesh import simdev
from zeromesh.engine.api import engine_of
from zeromesh.launch.processes import schedule_as_batch

LAYERS, WIDTH, TOKENS = 12, 896, 64
PARAMETERS = LAYERS * WIDTH**2
PRODUCTS_FLOPS = (6 * LAYERS - 2) * WIDTH**2 * TOKENS  # per micro-batch; the first layer's input needs no gradient
SHARES = {"forward": 2 * LAYERS / (6 * LAYERS - 2), "backward": (4 * LAYERS - 2) / (6 * LAYERS - 2), "end": 0.0}
"""Shares of these FLOPs by phase."""

BUCKET_MIB = 4
"""DDP's buckets and our joined units hold one layer, as 25 MiB do in a model of usual size."""

FLOPS_PER_BYTE = 80 * TOKENS / 8192
"""An H100's in TF32, as kernels reach it, scaled to the few tokens: their products stand for those of 8,192 tokens."""

FAST_BITS = 10e9
PAYLOAD = 1448 / 1514
"""Payload's share of a link's rate, which counts whole frames."""

AXES = {2: ("cluster", "node"), 3: ("cluster", "pod", "node")}
OURS = {2: "3,1 3,2 3,3 1,1", 3: "3,1,1 3,3,1 3,3,2 3,3,3 1,1,1"}
"""Strategies by depth, innermost axis first."""

SAME_MEMORY = 1.10
"""Peaks of one layout in ours and in FSDP2 differ by 7 % in a model of 12 layers, by the layers that are held at
once."""

LONG_S = 15.0
"""If a system's first step takes longer, by the machine's clock, only one step is timed."""

Step = Callable[[list[torch.Event]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    shape: tuple[int, ...]  # of the mesh, outermost first
    slow: str  # rate of the outermost links, in the lab's spelling
    micro_batches: int
    ratio: float  # computation over communication
    dilation: float  # the machine's seconds for one of the device's

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.slow} {self.micro_batches}mb {self.ratio:g}"

    @property
    def rates(self) -> tuple[float, ...]:
        """Payload rate of a link at each level, outermost first, in bytes per second of the device."""
        slow = {"200mbit": 200e6, "1gbit": 1e9}[self.slow]
        return tuple(bits / 8 * PAYLOAD for bits in (slow, *[FAST_BITS] * (len(self.shape) - 1)))

    @property
    def tree(self) -> str:
        """The lab's tree, whose links are slower by the dilation."""
        bits = [rate * 8 / PAYLOAD / self.dilation for rate in self.rates]
        return ",".join(f"{size}@{round(rate / 1e3)}kbit" for size, rate in zip(self.shape, bits, strict=True))

    @property
    def computation_s(self) -> float:
        outer = self.shape[0]
        return self.ratio * 2 * (outer - 1) / outer * 4 * PARAMETERS / self.rates[0]

    @property
    def clock(self) -> simdev.Clock:
        flops = PRODUCTS_FLOPS * self.micro_batches / self.computation_s
        return simdev.Clock(flops=flops, memory_bytes_per_s=flops / FLOPS_PER_BYTE, dilation=self.dilation)


def all_cells(dilation: float) -> list[Cell]:
    """Returns all 48 cells. If links are five times faster, time is five times slower, so the machine has equal time
    for equal bytes."""
    return [
        Cell(shape=shape, slow=slow, micro_batches=micro_batches, ratio=ratio, dilation=dilation * slower)
        for shape in ((2, 2), (2, 4), (2, 2, 2))
        for slow, slower in (("200mbit", 1), ("1gbit", 5))
        for micro_batches, ratio in itertools.product((1, 4), (0.2, 0.5, 1.0, 2.0))
    ]


def make_model() -> nn.Sequential:
    with torch.device("simdev"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def mark(events: list[torch.Event]) -> None:
    event = torch.Event("simdev", enable_timing=True)
    event.record()
    events.append(event)


def training_step(model: nn.Module, micro_batches: int, context: Callable[[bool], AbstractContextManager[Any]]) -> Step:
    """Makes a step that marks the end of each forward, each backward and the whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.empty(TOKENS, WIDTH, device="simdev")

    def step(events: list[torch.Event]) -> None:
        for index in range(micro_batches):
            with context(index == micro_batches - 1):
                loss: Tensor = model(batch).sum()
                mark(events)
                loss.backward()
                mark(events)
        optimizer.step()
        optimizer.zero_grad()
        mark(events)

    return step


def ours(cell: Cell, strategy: str) -> tuple[nn.Module, Step]:
    mesh = init_device_mesh("simdev", cell.shape, mesh_dim_names=AXES[len(cell.shape)])
    model = zm.shard(make_model(), mesh, strategy, units=[nn.Linear], bucket_bytes=BUCKET_MIB << 20)
    return model, training_step(model, cell.micro_batches, lambda last: zm.accumulate(model, last=last))


def fsdp2(cell: Cell, *, grid: bool = False, reshard: bool = True) -> tuple[nn.Module, Step]:
    world = math.prod(cell.shape)
    shape, names = ((cell.shape[0], world // cell.shape[0]), ("cluster", "node")) if grid else ((world,), ("all",))
    mesh, model = init_device_mesh("simdev", shape, mesh_dim_names=names), make_model()
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    root = fully_shard(model, mesh=mesh)

    def context(last: bool) -> AbstractContextManager[None]:
        if grid:
            root.set_requires_all_reduce(last)
        root.set_is_last_backward(last)
        return nullcontext()

    return model, training_step(model, cell.micro_batches, context)


def ddp(cell: Cell) -> tuple[nn.Module, Step]:
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB)
    return model, training_step(model, cell.micro_batches, lambda last: nullcontext() if last else model.no_sync())


def systems(cell: Cell) -> dict[str, Callable[[], tuple[nn.Module, Step]]]:
    names = AXES[len(cell.shape)][::-1]
    strategies = [
        ",".join(f"{name}={stage}" for name, stage in zip(names, stages.split(","), strict=True))
        for stages in OURS[len(cell.shape)].split()
    ]
    return {
        **{strategy: partial(ours, cell, strategy) for strategy in strategies},
        "FSDP2": partial(fsdp2, cell),
        "FSDP2, no reshard": partial(fsdp2, cell, reshard=False),
        "FSDP2 2-D": partial(fsdp2, cell, grid=True),
        "FSDP2 2-D, no reshard": partial(fsdp2, cell, grid=True, reshard=False),
        "DDP": partial(ddp, cell),
    }


def measure(make: Callable[[], tuple[nn.Module, Step]], cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Returns one system's row without the links' bytes. These are counted between the two calls of `at_rest`."""
    before = simdev.memory_stats().allocated_bytes
    model, step = make()
    began = time.perf_counter()
    step([])  # makes the optimizer's states and DDP's buckets
    at_rest(model, args.gate)
    longest = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    count = args.steps if longest < LONG_S else 1
    simdev.reset_peak_memory()
    events, began, took = list[torch.Event](), time.perf_counter(), -time.process_time()
    for _ in range(1 + count):
        step(events)
    at_rest(model, args.gate)
    took += time.process_time()
    wall_s = time.perf_counter() - began
    total = torch.tensor(took)
    dist.all_reduce(total)
    return medians(events, cell.micro_batches, first=1) | {
        "bytes": simdev.memory_stats().peak_allocated_bytes - before,
        "busy": round(float(total) / wall_s / (os.cpu_count() or 1), 3),
        "wall_s": round(wall_s, 1),
    }


def medians(events: list[torch.Event], micro_batches: int, first: int) -> dict[str, Any]:
    """Medians of consecutive steps' seconds and of their phases, without the first `first` steps."""
    spans = [one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(events)]
    size = 2 * micro_batches + 1
    steps = [spans[at : at + size] for at in range(first * size - 1, len(spans), size)]
    phases = {"forward": slice(0, -1, 2), "backward": slice(1, -1, 2), "end": slice(-1, None)}
    median = {kind: statistics.median(sum(step[part]) for step in steps) for kind, part in phases.items()}
    return {
        "step_s": round(statistics.median(map(sum, steps)), 6),
        "steps_s": [round(sum(step), 6) for step in steps],
        "phases": {kind: round(seconds, 6) for kind, seconds in median.items()},
    }


def at_rest(model: nn.Module, gate: Path) -> None:
    """Waits until nothing runs on any rank, and the links' counters have been read."""
    if not isinstance(model, DistributedDataParallel | torch.distributed.fsdp.FSDPModule):
        engine_of(model).at_rest()
    torch.accelerator.synchronize()
    dist.all_reduce(torch.zeros(1))
    if dist.get_rank() == 0:
        gate.unlink(missing_ok=True)
        print("counters", flush=True)
        while not gate.exists():
            time.sleep(0.01)
    dist.all_reduce(torch.zeros(1))


def rank_program(
    clock: simdev.Clock,
    systems: Mapping[str, Callable[[], tuple[nn.Module, Step]]],
    measured: Callable[[Callable[[], tuple[nn.Module, Step]]], dict[str, Any]],
) -> None:
    """Measures each system and prints a row for it."""
    torch.set_num_threads(1)
    schedule_as_batch()
    simdev.start(clock=clock)
    dist.init_process_group(f"cpu:gloo,simdev:{simdev.BACKEND}")
    for name, make in systems.items():
        row = {"system": name, **measured(make)}
        gc.collect()
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.all_reduce(torch.zeros(1))
    os._exit(0)  # gloo's threads outlive the groups


def run(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a cell in separate processes, since a process has only one device clock."""
    rows, counted = list[dict[str, Any]](), list[Any]()
    with tempfile.TemporaryDirectory() as directory, Lab(cell.tree) as lab:
        gate = Path(directory) / "read"

        def told(line: str) -> None:
            if line == "counters":
                counted.append(lab.counters())
                gate.touch()
            elif line.startswith("{"):
                sent = difference(counted[-1], counted[-2])
                row = json.loads(line)
                row |= bounds(cell, sent, 1 + len(row["steps_s"]))
                rows.append(row | {"ratio": round(row["step_s"] / row["bound_s"], 3)})
                print(
                    f"{rows[-1]['step_s']:8.3f} s {rows[-1]['ratio']:.3f} of its bound  {rows[-1]['system']}",
                    flush=True,
                )

        kept = [f"--{name}={getattr(args, name)}" for name in ("dilation", "steps", "only")]
        in_lab(lab, "overlap", *kept, f"--rank-of={cell.name}", f"--gate={gate}", told=told)
    about = {"cell": cell.name, "dilation": cell.dilation, "micro_batches": cell.micro_batches}
    return about | {"computation_s": round(cell.computation_s, 4), "rows": rows}


def bounds(cell: Cell, sent: dict[str, Any], steps: int) -> dict[str, Any]:
    """Seconds that each level's busiest link needs per step."""
    links = {}
    for depth, (name, rate) in enumerate(zip(AXES[len(cell.shape)], cell.rates, strict=True)):
        here = [link for path, link in sent.items() if path.count(".") == depth]
        links[name] = round(max(link.sent_payload_bytes for link in here) / steps / rate, 4)
    return {"links_s": links, "bound_s": round(max(cell.computation_s, *links.values()), 4)}


def order_s(cell: dict[str, Any], row: dict[str, Any]) -> float:
    """The bound of a step that uses the outermost link once: see `judge`."""
    bound_s: float = row["bound_s"]
    if row["system"][-1] not in "01":
        return bound_s
    inner = [seconds for name, seconds in row["links_s"].items() if name != "cluster"]
    each_s = max(cell["computation_s"], *inner) / cell["micro_batches"]
    return max(bound_s, (cell["micro_batches"] - 1) * each_s + max(each_s, row["links_s"]["cluster"]))


def is_ours(row: dict[str, Any]) -> bool:
    return "=" in row["system"]


def judge(cell: dict[str, Any]) -> dict[str, Any]:
    """Compares a cell's step times.

    Returns:
        The fastest of our strategies (`best`), its step time over its bound, and seconds for which its computation
        stood still, by phase. For each peer, its step time over that of our fastest strategy that needs no more
        memory. FSDP2's step time over that of `best`.

        Stages 0 and 1 send on the outermost axis once a step, between the last backward and the next forward. No order
        of work hides that behind other micro-batches. So `over_order` is over a bound that counts these transfers by
        themselves.
    """
    mine = [row for row in cell["rows"] if is_ours(row)]
    peers = [row for row in cell["rows"] if not is_ours(row)]
    if not mine or not peers:
        return {}
    best = min(mine, key=lambda row: row["step_s"])
    behind = {}
    for peer in peers:
        fitting = [row["step_s"] for row in mine if row["bytes"] <= SAME_MEMORY * peer["bytes"]]
        if fitting:
            behind[peer["system"]] = round(peer["step_s"] / min(fitting), 3)
    return {
        "best": best["system"],
        "over_bound": best["ratio"],
        "over_order": round(best["step_s"] / order_s(cell, best), 3),
        "stands_s": {
            phase: round(best["phases"][phase] - share * cell["computation_s"], 3) for phase, share in SHARES.items()
        },
        "peers": behind,
        "fsdp2": next((round(row["step_s"] / best["step_s"], 3) for row in peers if row["system"] == "FSDP2"), None),
    }


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The goals' figures, over all cells that have been measured."""
    judged = list(filter(None, map(judge, cells)))
    gains = [found["fsdp2"] for found in judged if found["fsdp2"]]
    return {
        "cells": len(judged),
        "within_1.10": sum(found["over_bound"] <= 1.10 for found in judged),
        "within_1.10_of_order": sum(found["over_order"] <= 1.10 for found in judged),
        "least_peer": min((ratio for found in judged for ratio in found["peers"].values()), default=None),
        "fsdp2_mean": round(math.exp(statistics.fmean(map(math.log, gains))), 3) if gains else None,
    }


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table of the results of `judge`, with one line per cell. The last column has the peer that is
    nearest to ours with no more memory."""
    lines = [
        "| cell | fastest of ours | over bound | over order's | still in forward, backward | FSDP2 | least peer |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        if found := judge(cell):
            name = min(found["peers"], key=found["peers"].__getitem__, default="")
            least = f"{found['peers'][name]:.2f} ({name})" if name else "none has as much memory"
            stands = f"{found['stands_s']['forward']:.2f}, {found['stands_s']['backward']:.2f} s"
            numbers = (
                f"{found['over_bound']:.2f} | {found['over_order']:.2f} | {stands} | {found['fsdp2'] or math.nan:.2f}"
            )
            lines.append(f"| {cell['cell']} | `{found['best']}` | {numbers} | {least} |")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cells", default="", help="those whose name this regular expression finds")
    options.add_argument("--only", default="", help="systems whose name it finds")
    options.add_argument("--budget-s", type=float, default=math.inf, help="no cell is begun after so many seconds")
    options.add_argument("--again", action="store_true", help="cells too that the result file has")
    options.add_argument("--steps", type=int, default=3, help="timed ones of each system")
    options.add_argument(
        "--dilation", type=float, default=1.0, help="of cells of 200 Mbit/s; others have five times that"
    )
    options.add_argument("--rank-of", help=argparse.SUPPRESS)
    options.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    cells = all_cells(args.dilation)
    if args.rank_of:
        (cell,) = (cell for cell in cells if cell.name == args.rank_of)
        known = {name: make for name, make in systems(cell).items() if re.search(args.only, name)}
        rank_program(cell.clock, known, partial(measure, cell=cell, args=args))
    found = held(args.out, "cells")
    began = time.monotonic()
    for cell in cells:
        known = {each["cell"] for each in found}
        if not re.search(args.cells, cell.name) or (cell.name in known and not args.again):
            continue
        if time.monotonic() - began > args.budget_s:
            break
        print(f"{cell.name} in {cell.tree}", flush=True)
        row = run(cell, args)
        found = add(args.out, "cells", row, ["cell"], lambda rows: {"summary": summary(rows)})
        print(f"{time.monotonic() - began:.0f} s, {judge(row)}", flush=True)
    print(table(found), summary(found), sep="\n\n")


if __name__ == "__main__":
    main()
