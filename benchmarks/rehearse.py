"""`zeromesh rehearse` against real runs, its own price, and the host's time beside FSDP2's.

    python benchmarks/rehearse.py --out benchmarks/results/rehearse.json [--only truth|price|sizes|host]

truth   the demo and two other models of transformers, two steps on 4 gloo ranks of this machine (ranks 0 and 3 are
        looked at), and the same configurations rehearsed as those ranks. Parameters, gradients, optimizer states, bytes
        and calls of collectives by axis must be equal; of the buffers what is not the workspace of collectives, since
        gloo's work in memory and with messages of their own.
price   Llama-70B, 80 layers, on 1,024 ranks (examples/rehearse-llama-70b.toml): seconds, and the resident set.
        Goal: 60 s on two cores, 4 GiB.
sizes   all blocks of Llama-7B (32), Llama-65B (80) and a mixture of eight experts, by `tests/simdev/test_virtual.py`,
        as the last of 64, 1,024 and 16,384 ranks: predicted and allocated bytes, which must be equal; and seconds.
host    processor seconds of the host for a block's forward and backward on the virtual device, where collectives do
        nothing, less those of the same model without sharding: ours and FSDP2's, at 8, 64, 512 and 4,096 ranks. Medians
        of `--rounds`, in turns. Goal: half of FSDP2's, and less than 20 % more at 4,096 than at 8.
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
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO, LARGE = ROOT / "examples" / "demo.toml", ROOT / "examples" / "rehearse-llama-70b.toml"
MODELS = {
    "the demo": [],
    "gpt2": ['model.config={model_type="gpt2", n_embd=64, n_layer=3, n_head=4, n_positions=128}'],
    "qwen2": [
        'model.config={model_type="qwen2", hidden_size=64, intermediate_size=160, num_hidden_layers=3, '
        "num_attention_heads=4, num_key_value_heads=2}",
        'dtypes.param="bf16"',
        "model.activation_checkpointing=true",
        'strategy="node=3,cluster=2"',
    ],
}
WORLDS = (8, 64, 512, 4096)
SIZES = (64, 1024, 16384)
LAYERS, WIDTH = 24, 1024


def truth() -> dict[str, Any]:
    """By model, what was compared; raises where something differs."""
    found = {}
    for name, overrides in MODELS.items():
        real = on_real_ranks(overrides)
        for rank in (0, 3):
            rehearsed = rehearse(DEMO, *flags(overrides), "--rank", str(rank))
            here = real[rank]
            kinds = {kind: sizes["allocated_bytes"] for kind, sizes in rehearsed["memory"]["kinds"].items()}
            there = here["memory"] | {"buffers": here["memory"]["buffers"] - here["workspace"]}
            assert kinds == there, (name, rank, kinds, there)
            assert rehearsed["memory"]["predicted_bytes"] == rehearsed["memory"]["allocated_bytes"]
            assert rehearsed["bytes_by_axis"] == here["sent"], (name, rank, rehearsed["bytes_by_axis"], here["sent"])
            assert rehearsed["collectives_by_axis"] == here["calls"], (name, rank, rehearsed, here)
            found[f"{name}, rank {rank}"] = {
                "allocated_bytes": kinds,
                "sent_bytes": here["sent"],
                "collectives": here["calls"],
                "launches_per_unit": rehearsed["launches_per_unit"],
            }
    return found


def on_real_ranks(overrides: list[str]) -> list[dict[str, Any]]:
    """What each of 4 gloo ranks allocates and sends in the second of two steps."""
    from zeromesh.launch.job import make_job
    from zeromesh.launch.processes import local_launches, raise_failed, run_ranks

    with make_job("benchmarks.rehearse:real_rank", {"overrides": overrides}) as job:
        raise_failed(run_ranks(local_launches(job.command, 4, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})))
        return job.result()


def real_rank(store_file: Path | None, *, overrides: list[str]) -> list[dict[str, Any]]:
    import torch.distributed as dist

    from zeromesh.engine.api import engine_of
    from zeromesh.launch.ranks import join_ranks
    from zeromesh.observe.report import memory_report, traffic_report
    from zeromesh.train.config import load_config
    from zeromesh.train.corpus import read_corpus
    from zeromesh.train.loop import _build, make_trainer

    config = load_config(DEMO, overrides)
    with join_ranks(config.mesh, store_file, device="cpu") as ranks:
        corpus = read_corpus(config)
        trainer = make_trainer(config, ranks, corpus, _build(config, ranks, corpus))
        trainer.step(0)
        recompute = config.model.activation_checkpointing
        with traffic_report(trainer.model, micro_batches=config.micro_batches, recompute=recompute) as traffic:
            trainer.step(0)
        report = memory_report(trainer.model, trainer.optimizer)
        own = {
            "memory": {line.kind: line.allocated_bytes for line in report if line.kind != "total"},
            "workspace": sum(engine_of(trainer.model).schedule.memory.workspace.values()),
            "sent": {line.axis: line.sent_bytes for line in traffic.lines()},
            "calls": dict(Counter(call.axis for call in traffic.calls)),
        }
        everyone: list[Any] = [None] * ranks.world
        dist.all_gather_object(everyone, own)
        return everyone


def price() -> dict[str, Any]:
    """Of one rehearsal of the large model."""
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


def sizes() -> dict[str, Any]:
    """Each world in a process of its own."""
    found = {}
    for world in SIZES:
        command = [sys.executable, __file__, "--only", "sizes", "--world", str(world)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found[str(world)] = json.loads(done.stdout)
    return found


def sizes_of(world: int) -> dict[str, Any]:
    from dataclasses import replace

    from torch.distributed.device_mesh import init_device_mesh

    from tests.simdev import test_virtual as models
    from zeromesh import simdev

    simdev.start(virtual=True)
    simdev.counting_group(world - 1, world)
    mesh = init_device_mesh("simdev", (world // 8, 8), mesh_dim_names=("cluster", "node"))
    found = {}
    for name, shape in {
        "Llama-7B": replace(models.LLAMA_7B, blocks=32),
        "Llama-65B": replace(models.LLAMA_65B, blocks=80),
        "mixture": replace(models.MIXTURE, blocks=32),
    }.items():
        for strategy in ("node=3,cluster=1", "node=3,cluster=3"):
            began = time.process_time()
            held = models.rehearsed(shape, mesh, strategy)
            found[f"{name}, {strategy}"] = held | {"processor_s": round(time.process_time() - began, 1)}
    return found


def rehearse(config: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "zeromesh.cli", "rehearse", str(config), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def flags(overrides: list[str]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def host(rounds: int) -> dict[str, Any]:
    """Each world in a process of its own."""
    found = {}
    for world in WORLDS:
        command = [sys.executable, __file__, "--only", "host", "--world", str(world), "--rounds", str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[str(world)] = json.loads(done.stdout)
    return found


def host_of(world: int, rounds: int) -> dict[str, float]:
    """Microseconds of the host for a block, beyond those of the same block that nobody shards."""
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
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for index in range(rounds + 3):
        for name, model in models.items():
            model.zero_grad(set_to_none=True)
            began = time.process_time()
            model(x).sum().backward()
            if index >= 3:  # the first ones learn the order, and allocate
                seconds[name].append(time.process_time() - began)
    dist.destroy_process_group()
    block = {name: statistics.median(values) / LAYERS * 1e6 for name, values in seconds.items()}
    net = {name: block[name] - block["plain"] for name in ("zeromesh", "FSDP2")}
    return {"plain_us": block["plain"], "net_us": net, "ratio": net["zeromesh"] / net["FSDP2"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("truth", "price", "sizes", "host"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--world", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.world:
        of_world = sizes_of(options.world) if options.only == "sizes" else host_of(options.world, options.rounds)
        print(json.dumps(of_world))
        return
    parts = {"truth": truth, "price": price, "sizes": sizes, "host": lambda: host(options.rounds)}
    found = {name: part() for name, part in parts.items() if options.only in (None, name)}
    if options.out:
        known = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps(known | found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
