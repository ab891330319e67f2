"""The cost of the host's memory to a step: ours with `host=`, FSDP2 with CPUOffloadPolicy, on devices with a wall
clock.

    make bench-offload ARGS="--out benchmarks/results/offload.json"

Needs root and a compiler, like `overlap.py`, whose model and steps it uses. Four ranks of one machine share a host of
50 GB/s; each copies 25 GB/s in each direction. Links take almost no time. The rate of products is chosen so that the
host's step, which reads and writes 32 bytes per parameter, takes `ratio` times as long as the forward.

Exposed is the time of a step less that of forward and backward without an optimizer. The formula's value is the maximum
over units k of the steps of the first k plus the copy up of the k-th, less the forwards before it: h_1 + ... + h_k +
u_k - (f_1 + ... + f_(k-1)). FSDP2 steps on real memory of the host: its kernel is replaced by one that takes the same
time as ours.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import zeromesh as zm
from benchmarks.harness import in_lab, parser, save
from benchmarks.overlap import (
    FLOPS_PER_BYTE,
    LAYERS,
    PARAMETERS,
    TOKENS,
    Step,
    make_model,
    medians,
    rank_program,
    training_step,
)
from lab import Lab
from zeromesh import simdev
from zeromesh.engine.api import engine_of

RANKS = 4
COPY_BYTES_PER_S, HOST_BYTES_PER_S = 25e9, 50e9
STEP_BYTES = 32
"""Per parameter: its value, gradient and two moments, each read and written in fp32."""

HOST_S = STEP_BYTES * PARAMETERS / HOST_BYTES_PER_S
UP_S = 4 * PARAMETERS / RANKS / COPY_BYTES_PER_S
RATIOS = (0.5, 1.0, 3.0)
STRATEGIES = (
    "node=3,cluster=3",
    "host=1,node=3,cluster=3",
    "host=2,node=3,cluster=3",
    "host=3,node=3,cluster=3",
    "host=1,node=3,cluster=3;step=device",
    "host=3,node=3,cluster=3;step=device",
)


def clock(ratio: float, dilation: float) -> simdev.Clock:
    flops = 2 * PARAMETERS * TOKENS * ratio / HOST_S
    return simdev.Clock(
        flops=flops,
        memory_bytes_per_s=flops / FLOPS_PER_BYTE,
        host_copy_bytes_per_s=COPY_BYTES_PER_S,
        host_memory_bytes_per_s=HOST_BYTES_PER_S / RANKS,
        dilation=dilation,
    )


def formula_s(ratio: float) -> float:
    """Exposed seconds of a step with equal units."""
    host, up, forward = (seconds / LAYERS for seconds in (HOST_S, UP_S, HOST_S / ratio))
    return max(k * host + up - (k - 1) * forward for k in range(1, LAYERS + 1))


def ours(strategy: str) -> tuple[nn.Module, Step]:
    mesh = init_device_mesh("simdev", (2, 2), mesh_dim_names=("cluster", "node"))
    model = zm.shard(make_model(), mesh, strategy, units=[nn.Linear])
    return model, training_step(model, 1, lambda last: nullcontext())


def fsdp2() -> tuple[nn.Module, Step]:
    model = make_model()
    for module in (*model, model):
        fully_shard(module, offload_policy=CPUOffloadPolicy())
    return model, training_step(model, 1, lambda last: nullcontext())


def replace_adamw(rate: simdev.Clock) -> torch.library.Library:
    """Replaces the host's fused kernel by one that takes as long as the clock says, while the library lives."""

    def step(params: list[Tensor], *_: Any, **__: Any) -> None:
        seconds = STEP_BYTES * sum(param.numel() for param in params) / rate.host_memory_bytes_per_s
        time.sleep(seconds * rate.dilation)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_adamw_", step, "CPU")
    return library


def measure(make: Callable[[], tuple[nn.Module, Step]], steps: int) -> dict[str, Any]:
    """Returns the medians of consecutive steps, without the first two."""
    model, step = make()
    events = list[torch.Event]()
    for _ in range(2 + steps):
        step(events)
    if not isinstance(model, torch.distributed.fsdp.FSDPModule):
        engine_of(model).at_rest()
    torch.accelerator.synchronize()
    return medians(events, 1, first=2)


def judge(ratio: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds each row's exposed seconds, and compares them with the goals."""
    plain, of_states, _, of_all, _, streamed, peer = rows
    bare = plain["phases"]["forward"] + plain["phases"]["backward"]
    wanted = formula_s(ratio)
    for row in rows:
        row["exposed_s"] = round(row["step_s"] - bare, 6)
        row["over_formula"] = round(row["exposed_s"] / wanted, 3)
    longer_s = max(plain["step_s"], bare + wanted)
    return {
        "host=3 over FSDP2": round(of_all["step_s"] / peer["step_s"], 3),
        "host=3;step=device over FSDP2": round(streamed["step_s"] / peer["step_s"], 3),
        "host=1 over the longer of host=0 and the formula": round(of_states["step_s"] / longer_s, 3),
    }


def run(ratio: float, args: argparse.Namespace) -> dict[str, Any]:
    rows = list[dict[str, Any]]()

    def told(line: str) -> None:
        if line.startswith("{"):
            rows.append(json.loads(line))
            print(f"{1e3 * rows[-1]['step_s']:8.2f} ms  {rows[-1]['system']}", flush=True)

    options = [f"--ratio={ratio}", f"--dilation={args.dilation}", f"--steps={args.steps}"]
    with Lab(str(RANKS)) as lab:
        in_lab(lab, "offload", *options, told=told)
    return {
        "ratio": ratio,
        "formula_s": round(formula_s(ratio), 6),
        "host_s": round(HOST_S, 6),
        "dilation": args.dilation,
        "rows": rows,
        **judge(ratio, rows),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=5, help="timed ones of each system")
    options.add_argument("--dilation", type=float, default=200.0)
    options.add_argument("--ratio", type=float, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.ratio:
        rate = clock(args.ratio, args.dilation)
        library = replace_adamw(rate)  # noqa: F841  # until the ranks end
        known = {strategy: partial(ours, strategy) for strategy in STRATEGIES} | {"FSDP2 with CPUOffloadPolicy": fsdp2}
        rank_program(rate, known, partial(measure, steps=args.steps))
    else:
        save(args.out, cells=[run(ratio, args) for ratio in RATIOS])


if __name__ == "__main__":
    main()
