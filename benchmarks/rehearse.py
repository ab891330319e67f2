"""The cost of `zeromesh rehearse`, and the engine's host time compared with FSDP2's.

    make bench-rehearse ARGS="--out benchmarks/results/rehearse.json"     # --only price|host

price   Llama-70B, 80 layers, on 1,024 ranks (examples/rehearse-llama-70b.toml): seconds, and the resident set.
        Goal: 60 s on two cores, 4 GiB.
host    processor seconds of the host for a block's forward and backward on the virtual device, where collectives do
        nothing, less those of the same model without sharding: ours and FSDP2's, at 8, 64, 512 and 4,096 ranks. Medians
        of `--rounds`, in turns. Goal: .35 of FSDP2's, and less than 20 % more at 4,096 than at 8.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, in_turns, itself, parser, save

LARGE = ROOT / "examples" / "rehearse-llama-70b.toml"
WORLDS = (8, 64, 512, 4096)
LAYERS, WIDTH = 24, 1024


def price() -> dict[str, Any]:
    """Measures the cost of one rehearsal of the large model."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    found = rehearse(LARGE, "--world", "1024")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": round(time.monotonic() - began, 1),
        "processor_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "largest_resident_bytes": after.ru_maxrss * 1024,
        "load_average": os.getloadavg()[0],
        "rehearsal": {key: found[key] for key in ("memory", "bytes_by_axis", "launches_per_unit", "step_s", "host_s")},
    }


def rehearse(config: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "zeromesh.cli", "rehearse", str(config), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def host(rounds: int) -> dict[str, Any]:
    """Measures each world in a separate process."""
    return {str(world): itself("rehearse", "--only", "host", "--world", world, "--rounds", rounds) for world in WORLDS}


def host_of(world: int, rounds: int) -> dict[str, Any]:
    """Microseconds of the host per block, beyond those of the same block without sharding."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import zeromesh as zm
    from zeromesh import simdev

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH)
            self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.up, self.gate = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
            self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x: Any) -> Any:
            h = self.norm(x)
            x = x + self.out(self.query(h) * self.key(h) + self.value(h))
            return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    device = simdev.start(virtual=True).torch
    simdev.counting_group(0, world)
    mesh = init_device_mesh("simdev", (world,), mesh_dim_names=("node",))

    def made() -> nn.Sequential:
        return nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    theirs = made()
    for block in theirs:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    with torch.device("meta"):
        ours = nn.Sequential(*(Block() for _ in range(LAYERS)))
    ours = zm.shard(ours, mesh, "node=3", param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    models = {"plain": made().bfloat16(), "zeromesh": ours, "FSDP2": theirs}
    x = torch.zeros(64, WIDTH, device=device, dtype=torch.bfloat16)

    def timed(model: nn.Module) -> float:
        model.zero_grad(set_to_none=True)
        began = time.process_time()
        model(x).sum().backward()
        return time.process_time() - began

    # The first rounds learn the order, and allocate.
    seconds = in_turns({name: partial(timed, model) for name, model in models.items()}, rounds, warm_up=3)
    dist.destroy_process_group()
    found = {name: statistics.median(values) / LAYERS * 1e6 for name, values in seconds.items()}
    added = {name: found[name] - found["plain"] for name in ("zeromesh", "FSDP2")}
    return {"plain_us": found["plain"], "net_us": added, "ratio": added["zeromesh"] / added["FSDP2"]}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", choices=("price", "host"))
    made.add_argument("--rounds", type=int, default=15)
    made.add_argument("--world", type=int, default=0, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.world:
        print(json.dumps(host_of(options.world, options.rounds)))
        return
    parts = {"price": price, "host": lambda: host(options.rounds)}
    found = {name: part() for name, part in parts.items() if options.only in (None, name)}
    known = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    save(options.out, **{key: value for key, value in known.items() if key != "setting"} | found)


if __name__ == "__main__":
    main()
