"""Trains a toy with emitted DeepSpeed configurations on four gloo ranks, and without DeepSpeed.

    python deepspeed_ranks.py RESULTS.json

A program of its own: DeepSpeed keeps state for a whole process. The ranks are forked, so that it is imported once.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}

import deepspeed  # type: ignore[import-not-found]  # not a dependency

# Seconds of imports that its first reduction would do on every rank.
import deepspeed.runtime.zero.muon.muon_optimizer  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from zeromesh.model.from_module import from_module
from zeromesh.planner.emit import emit_deepspeed
from zeromesh.strategy import Plan, Strategy

WORLD, NODE, MICRO_BATCH, MICRO_BATCHES, STEPS = 4, 2, 2, 3, 4
DTYPES: dict[str, dict[str, str]] = {
    "fp32": {"param_dtype": "fp32"},
    "bf16": {"param_dtype": "bf16", "grad_dtype": "fp32"},
    "bf16, reduced in fp32": {"param_dtype": "bf16", "grad_dtype": "fp32", "reduce_dtype": "fp32"},
}
STRATEGIES = ("node=1,cluster=1", "node=2,cluster=2", "node=3,cluster=3", "node=3,cluster=3k", "node=0,cluster=0")
"""Stage 0 last: its autocast changes the buckets of engines that come after it in the same process."""
REDUCED = STRATEGIES[:3]
"""Run with both dtypes of the reduction."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


class Toy(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def data() -> Tensor:
    """Tokens of shape (micro-batches, ranks, sequences, tokens), the same in every step so that the loss falls."""
    return torch.randint(0, 64, (MICRO_BATCHES, WORLD, MICRO_BATCH, 9), generator=torch.Generator().manual_seed(0))


def plain(dtype: torch.dtype) -> list[float]:
    """Losses of fp32 masters trained with gradients computed in `dtype` and added in fp32."""
    master, work = Toy(), Toy().to(dtype)
    optimizer = torch.optim.AdamW(master.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        work.load_state_dict(master.state_dict())
        losses.append(0.0)
        for batch in data().flatten(0, 1):
            loss = loss_of(work, batch) / (MICRO_BATCHES * WORLD)
            loss.backward()
            losses[-1] += loss.item()
            for mine, other in zip(master.parameters(), work.parameters(), strict=True):
                grad = other.grad.float()
                mine.grad = grad if mine.grad is None else mine.grad + grad
                other.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return losses


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    spec = from_module(Toy(), seq_len=8, name="toy")
    mesh = (("node", NODE), ("cluster", WORLD // NODE))
    for strategy in STRATEGIES:
        for label, dtypes in DTYPES.items():
            if "reduced" in label and strategy not in REDUCED:
                continue
            plan = Plan(
                strategy=Strategy.parse(strategy),
                mesh=mesh,
                micro_batch=MICRO_BATCH,
                micro_batches=MICRO_BATCHES,
                **dtypes,
            )
            config = json.loads(emit_deepspeed(plan, spec))
            if config["zero_optimization"]["stage"] == 3:
                config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # or the toy stays whole
            yield f"{strategy} {label}", config


def train(config: dict[str, Any]) -> dict[str, Any]:
    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # of the engine before
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = torch.zeros(STEPS)
    for step in range(STEPS):
        for micro_batch in data():
            loss = loss_of(engine, micro_batch[dist.get_rank()])
            engine.backward(loss)
            parts = [getattr(model.head.weight, name, None) for name in ("ds_tensor", "ds_secondary_tensor")]
            engine.step()  # drops the second copy
            losses[step] += loss.detach().float() / (MICRO_BATCHES * WORLD)
    dist.all_reduce(losses)
    shards = [0 if part is None else 64 * 16 // part.numel() for part in parts]
    return {"losses": losses.tolist(), "shards": shards[0], "secondary_shards": shards[1]}


def rank_program(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    # An all-reduce through shared memory that only its inference calls: every rank would compile it first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    results = {name: train(config) for name, config in configurations()}
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # gloo's threads outlive the groups


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        gc.freeze()  # an engine collects garbage a dozen times as it starts, among all that was imported
        mp.start_processes(rank_program, (f"{folder}/store", sys.argv[1]), nprocs=WORLD, start_method="fork")
    results = json.loads(Path(sys.argv[1]).read_text())
    results |= {f"plain {name}": plain(getattr(torch, name)) for name in ("float32", "bfloat16")}
    Path(sys.argv[1]).write_text(json.dumps(results))
