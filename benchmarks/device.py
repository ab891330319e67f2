"""One process on a GPU, compared with plain PyTorch and FSDP2: step time, host time, and peak memory against the
prediction.

    python -m benchmarks.device --out benchmarks/results/device.json
    python -m benchmarks.device --ranks 8 --strategies node=3 "node[4]=3,node[2]=1"   # as one rank of eight
    python -m benchmarks.device --device cpu --model tiny --tokens 32 --pairs 3        # that the script works

Nothing is sent. With one rank, the figures are the cost of hooks, flat buffers and casts. With more, the process group
is torch's fake one, whose collectives return at once: sharding, streams, copies and slots are those of a real rank, but
the values are not. Both sides of a pair live in the same process and take turns, in alternating order. A turn is two
steps; the second is timed, by events on the device's stream (on a CPU by the clock). The figure is the ratio of the
medians. Goal: at most 1.01. Host time is the time until a step returns, with sequences so short that the device keeps
up.

    setting         zeromesh                     plain PyTorch     FSDP2
    fp32            fp32                         fp32              fp32  (FSDP2+host: with CPUOffloadPolicy)
    bf16+masters    param_dtype=bf16             autocast          MixedPrecisionPolicy(param_dtype=bf16)
    bf16            masters and gradients too    model.bfloat16()  model.bfloat16()

Peaks are only taken on a GPU, in a separate process for each side. They are the bytes that torch's allocator gave out
beyond those before the model was made, with accumulation 2 and gradients that stay alive. `zm.memory_report` predicts
the model state exactly, and the simulator the peak with activations. The file is written after every row.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeromesh as zm
from benchmarks.harness import in_turns, itself, parser, ratio
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import Device
from zeromesh.cluster.level import Level
from zeromesh.measure.llama import Llama, loss_of
from zeromesh.measure.setting import read_setting
from zeromesh.measure.work import SHAPES, llama_shape
from zeromesh.model.shape import TransformerShape
from zeromesh.model.spec import Recomputation
from zeromesh.planner.workload import Workload

Step = Callable[[bool], None]
"""Runs a step; given True, with one sequence of `SHORT_TOKENS` tokens."""

SHORT_TOKENS = 8

MODELS = SHAPES | {
    "370M": llama_shape(1024, 2752, layers=24, heads=16, vocab=32000),
    "1.3B": llama_shape(2048, 5504, layers=24, heads=16, vocab=32000),
}
SETTINGS = ("fp32", "bf16+masters", "bf16")
PEERS = ("plain", "FSDP2", "FSDP2+host")
BF16 = torch.bfloat16
OURS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16+masters": {"param_dtype": BF16},
    "bf16": {"grad_dtype": BF16, "master_dtype": BF16},
}


class WithLoss(nn.Module):
    """A model from token ids to loss. The loss's fp32 tensors are part of the peak."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.model = Llama(shape)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model, ids)


def make_model(args: argparse.Namespace, setting: str) -> nn.Module:
    torch.manual_seed(0)
    model = Llama(MODELS[args.model]).to(args.device)
    return model.bfloat16() if setting == "bf16" else model


def make_step(side: str, setting: str, args: argparse.Namespace, *, keep_grads: bool = False) -> tuple[Step, Any, Any]:
    """Returns a training step, its model and its optimizer. `side` is a strategy, or one of `PEERS`."""
    model: Any = make_model(args, setting)
    context: Callable[[bool], Any] = lambda last: nullcontext()  # noqa: E731
    if side not in PEERS:
        mesh = init_device_mesh(args.device, (args.ranks,), mesh_dim_names=("node",)) if args.ranks > 1 else None
        zm.shard(model, mesh, side, **OURS[setting])
        context = lambda last: zm.accumulate(model, last=last)  # noqa: E731
    elif side != "plain":
        mesh = init_device_mesh(args.device, (args.ranks,))
        policy = MixedPrecisionPolicy(param_dtype=BF16 if setting == "bf16+masters" else None)
        offload = CPUOffloadPolicy() if side == "FSDP2+host" else OffloadPolicy()
        for module in (*model.layers, model.embed_tokens, model.lm_head, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    casts = side == "plain" and setting == "bf16+masters"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    shape = (args.micro_batches, args.sequences, args.tokens)
    data = torch.randint(0, MODELS[args.model].vocab, shape, generator=generator).to(args.device)

    def step(short: bool = False) -> None:
        for index, ids in enumerate(data[:, :1, :SHORT_TOKENS] if short else data):
            with context(index == len(data) - 1):
                with torch.autocast(args.device, BF16) if casts else nullcontext():
                    loss = loss_of(model, ids) / len(data)
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it so
        optimizer.step()
        (optimizer if keep_grads else model).zero_grad(set_to_none=not keep_grads)

    return step, model, optimizer


def timed(step: Step, device: str) -> float:
    """Seconds of one step on the device, after another step of the same side. So it pays for work that the previous
    step left, as the next one pays for its own."""
    if device == "cpu":
        return host_seconds(step, device, short=False)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch leaves it so
    start.record()
    step(False)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def host_seconds(step: Step, device: str, *, short: bool = True) -> float:
    """Seconds until a step returns."""
    if device != "cpu":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step(short)
    return time.perf_counter() - begin


def compare(strategy: str, peer: str, setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the ratios over interleaved pairs: of whole steps, and of the time until short ones return."""
    steps = {"ours": make_step(strategy, setting, args)[0], "peer": make_step(peer, setting, args)[0]}
    for step in (*steps.values(), *steps.values()):
        step(False)
    host: dict[str, list[float]] = {side: [] for side in steps}

    def turn(side: str) -> float:
        step = steps[side]
        step(False)
        seconds = timed(step, args.device)
        step(True)
        host[side].append(host_seconds(step, args.device))
        return seconds

    whole = in_turns({side: partial(turn, side) for side in steps}, args.pairs, warm_up=0)
    issued = ratio(host["ours"], host["peer"])
    return {
        "strategy": strategy,
        "peer": peer,
        "setting": setting,
        **ratio(whole["ours"], whole["peer"]),
        "host_ratio": issued["ratio"],
        "our_host_s": issued["ours_s"],
        "peer_host_s": issued["peer_s"],
    }


def peak_row(side: str, setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains, and returns bytes; on a GPU in a separate process."""
    on_gpu = args.device != "cpu"
    before = 0
    if on_gpu:
        warm_up = make_step("plain", "fp32", argparse.Namespace(**vars(args) | {"model": "tiny", "tokens": 8}))
        warm_up[0](False)  # libraries take their workspaces once
        del warm_up
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    step, model, optimizer = make_step(side, setting, args, keep_grads=True)
    for _ in range(3):
        step(False)
    line: dict[str, Any] = {"side": side, "setting": setting}
    if on_gpu:
        line["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        line["reserved_bytes"] = torch.cuda.max_memory_reserved()  # in the allocator's pools, one for each stream
    if side not in PEERS:
        totals = [each for each in zm.memory_report(model, optimizer) if each.kind == "total"]  # device and host
        line["state_predicted_bytes"] = sum(total.predicted_bytes for total in totals)
        line["state_allocated_bytes"] = sum(total.allocated_bytes for total in totals)
        line["peak_predicted_bytes"] = round(predicted_peak(side, setting, args))
    return line


def predicted_peak(strategy: str, setting: str, args: argparse.Namespace) -> float:
    """Peak bytes that the simulator predicts for one device, without context and allocator."""
    wide = "bf16" if setting == "bf16" else "fp32"
    workload = Workload(
        seq_len=args.tokens,
        global_batch_tokens=args.ranks * args.micro_batches * args.sequences * args.tokens,
        micro_batch=args.sequences,
        recomputation=Recomputation.NONE,
        param_dtype="fp32" if setting == "fp32" else "bf16",
        grad_dtype=wide,
        master_dtype=wide,
    )
    with torch.device("meta"):
        model = WithLoss(MODELS[args.model])
    choice = zm.simulate(model, cluster_of(args.ranks), workload, strategy)
    memory = choice.simulation.memory
    return memory.total - memory.overhead


def cluster_of(ranks: int) -> Cluster:
    """Makes a cluster with any rates, since memory does not depend on them. Presets need pydantic, which a bare GPU
    machine may lack."""
    card = Device(name="any", memory_bytes=140e9, peak_flops={"bf16": 1e15, "fp32": 1e14})
    node = Level(name="node", size=ranks, bandwidth_bytes_per_s=450e9, latency_s=1e-6)
    return Cluster(name="any", device=card, levels=(node,), host_memory_bytes=2e12)


def peak_alone(side: str, setting: str, args: argparse.Namespace) -> dict[str, Any]:
    same = [f"--{name}={getattr(args, name)}" for name in ("device", "model", "sequences", "tokens", "ranks")]
    line: dict[str, Any] = itself("device", f"--side={side}", "--settings", setting, "--micro-batches", 2, *same)
    return line


def setting_of(args: argparse.Namespace) -> dict[str, Any]:
    on_gpu = args.device != "cpu"
    card = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cuda": torch.version.cuda if on_gpu else None,
    }
    names = ("ranks", "model", "micro_batches", "sequences", "tokens")
    return read_setting() | card | {name: getattr(args, name) for name in names}


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--model", choices=MODELS, default="370M")
    options.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options.add_argument("--micro-batches", type=int, default=2)
    options.add_argument("--sequences", type=int, default=4)
    options.add_argument("--tokens", type=int, default=1024)
    options.add_argument("--pairs", type=int, default=50)
    options.add_argument("--ranks", type=int, default=1, help="of which this process is one")
    options.add_argument("--strategies", nargs="+", default=["node=3"], help="of zeromesh, on one axis, node")
    options.add_argument("--peers", nargs="+", choices=PEERS, default=["plain", "FSDP2"])
    options.add_argument("--side", help="print only this side's peak")
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        options.error("torch finds no CUDA device; --device cpu --model tiny shows that the script works")
    if args.pairs < 2:
        options.error(f"--pairs must be at least 2, for quartiles; got {args.pairs}")
    return args


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        on_cpu = args.device == "cpu"
        if on_cpu:
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(0)
        if args.ranks > 1:
            dist.init_process_group("fake", rank=0, world_size=args.ranks, store=FakeStore())
        else:
            dist.init_process_group(
                "gloo" if on_cpu else "nccl",
                init_method=f"file://{folder}/store",
                rank=0,
                world_size=1,
                device_id=None if on_cpu else torch.device("cuda", 0),
            )
        if args.side:
            print(json.dumps(peak_row(args.side, args.settings[0], args)))
        else:
            measure(args)
        dist.destroy_process_group()


def measure(args: argparse.Namespace) -> None:
    result: dict[str, Any] = {"setting": setting_of(args), "times": [], "peaks": []}

    def note(kind: str, row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        result[kind].append(row)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    for setting in args.settings:
        for strategy in args.strategies:
            for peer in args.peers:
                note("times", compare(strategy, peer, setting, args))
                gc.collect()
    on_gpu = args.device != "cpu"
    if on_gpu:
        torch.cuda.empty_cache()  # the other processes share the device
    for setting in args.settings:
        for side in (*args.strategies, *args.peers) if on_gpu else args.strategies:
            note("peaks", (peak_alone if on_gpu else peak_row)(side, setting, args))


if __name__ == "__main__":
    main()
