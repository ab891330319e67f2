"""Step time of zeromesh against plain PyTorch, DDP and FSDP2 in the same layout, on gloo ranks of one machine.

    make bench-peers ARGS="--pairs 30 --out benchmarks/results/peers.json"

Both sides of a pair live in the same processes and take turns, in alternating order. A turn is two steps, of which the
second is timed. The figure is the ratio of the medians, with the quartiles of single pairs' ratios. Wire dtypes are the
same on both sides: parameters and gradients in the compute dtype. One thread per rank. In the pairs called floor, plain
PyTorch takes our place: every rank by itself, nothing sent. No system can be below their ratio.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import zeromesh as zm
from benchmarks.harness import add, in_turns, on_ranks, parser, ratio
from zeromesh.comm.collectives import reduce_scatter, workspace_bytes
from zeromesh.comm.groups import make_groups
from zeromesh.launch.ranks import Ranks
from zeromesh.strategy import Layout

Step = Callable[[], None]
MODELS = {
    "7M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 4},
    "20M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 24, "num_attention_heads": 4},
    "30M": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 10, "num_attention_heads": 8},
}


BLOCK = {
    **dict.fromkeys([f"self_attn.{each}_proj" for each in "qkv"], ColwiseParallel()),
    **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], ColwiseParallel()),
    **dict.fromkeys(["self_attn.o_proj", "mlp.down_proj"], RowwiseParallel()),
}


def make_model(size: str, tp: Any = None) -> nn.Module:
    """Makes the same model on every rank, divided over the mesh `tp` if there is one."""
    torch.manual_seed(0)
    config = LlamaConfig(**MODELS[size], vocab_size=512, max_position_embeddings=512, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    if tp is not None:
        ends = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, tp, ends)
        for block in model.model.layers:
            parallelize_module(block, tp, BLOCK)
    return model


def batches(micro_batches: int, sequences: int, tokens: int, tp: int = 1) -> list[torch.Tensor]:
    """Returns this rank's batches. The ranks of one tensor-parallel group have equal batches."""
    generator = torch.Generator().manual_seed(dist.get_rank() // tp if dist.is_initialized() else 0)
    return [torch.randint(0, 512, (sequences, tokens), generator=generator) for _ in range(micro_batches)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training step. `context` surrounds each micro-batch; its argument says whether it is the last."""

    model: nn.Module
    optimizer: Any
    data: list[torch.Tensor]
    context: Callable[[bool], Any] = lambda last: nullcontext()

    def __call__(self) -> None:
        for index, batch in enumerate(self.data):
            with self.context(index == len(self.data) - 1):
                (self.model(input_ids=batch, labels=batch, use_cache=False).loss / len(self.data)).backward()
        self.optimizer.step()
        self.model.zero_grad()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def zeromesh_step(
    size: str, dtype: torch.dtype, data: list[torch.Tensor], strategy: str, mesh: Any, tp: Any = None, **options: Any
) -> Training:
    """Makes our step; `options` are further options of `zm.shard`."""
    param_dtype = None if dtype is torch.float32 else dtype
    model = zm.shard(make_model(size, tp), mesh, strategy, param_dtype=param_dtype, **options)
    context = lambda last: zm.accumulate(model, last=last)  # noqa: E731
    return Training(model=model, optimizer=adamw(model.parameters()), data=data, context=context)


def plain_step(size: str, dtype: torch.dtype, data: list[torch.Tensor], *, owners: int = 1) -> Step:
    """Makes a step of plain PyTorch. With several owners, the optimizer gets one in `owners` parameters, as a sharded
    one would."""
    model = make_model(size).to(dtype)
    return Training(model=model, optimizer=adamw(list(model.parameters())[::owners]), data=data)


def fsdp(model: Any, mesh: Any, dtype: torch.dtype = torch.float32, reshard: bool | int = True) -> Any:
    """Wraps the model in FSDP2, with a unit for each block."""
    policy = MixedPrecisionPolicy(param_dtype=None if dtype is torch.float32 else dtype)
    for module in (*model.model.layers, model.model.embed_tokens, model.lm_head):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp_step(
    size: str,
    dtype: torch.dtype,
    data: list[torch.Tensor],
    mesh: Any,
    *,
    our_reduce: bool = False,
    reshard: bool | int = True,
    reduce_last: bool = False,
    tp: Any = None,
) -> Step:
    """Makes a step of FSDP2.

    Args:
        our_reduce: use our reduce-scatter for gloo; gloo's own moves the bytes of an all-reduce.
        reshard: whether blocks reshard after their forward; a number: to shards over that many ranks.
        reduce_last: gradients stay whole between micro-batches.
        tp: mesh of tensor parallelism inside.
    """
    model = fsdp(make_model(size, tp), mesh, dtype, reshard)
    if our_reduce:
        reduce = OurReduceScatter(mesh)
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.set_custom_reduce_scatter(reduce)

    def context(last: bool) -> Any:
        # The same layout: gradients are reduced over the shard axis every micro-batch, between groups in the last one.
        if mesh.ndim == 2:
            model.set_requires_all_reduce(last)
        if reduce_last:
            model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        return nullcontext()

    return Training(model=model, optimizer=adamw(model.parameters()), data=data, context=context)


class OurReduceScatter(torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter):
    """zeromesh's reduce-scatter for gloo, over the last axis of `mesh`, over which FSDP2 shards."""

    def __init__(self, mesh: Any) -> None:
        axes = [(name, size) for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True)][::-1]
        layout = Layout.of(",".join(f"{name}=3" for name, _ in axes), axes)
        self.group = make_groups(mesh, layout.axes)[axes[0][0]]
        self.workspace = torch.empty(workspace_bytes(self.group), dtype=torch.uint8)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        mean = op == dist.ReduceOp.AVG or getattr(op, "op", op) == dist.ReduceOp.AVG
        scale = 1 / group.size() if mean else 1.0
        reduce_scatter(input_tensor.view(-1), output_tensor.view(-1), self.group, workspace=self.workspace, scale=scale)


def ddp_step(
    size: str, dtype: torch.dtype, data: list[torch.Tensor], *, zero: bool, bucket_mib: int | None = None
) -> Step:
    model = DistributedDataParallel(make_model(size).to(dtype), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
    sharded = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=1e-4, fused=True)
    optimizer = (sharded if zero else adamw)(model.parameters())
    context = lambda last: nullcontext() if last else model.no_sync()  # noqa: E731
    return Training(model=model, optimizer=optimizer, data=data, context=context)


def systems(world: int) -> dict[str, tuple[Callable[..., Step], Callable[..., Step]]]:
    """Returns (ours, peer) by name; each takes (size, dtype, data)."""
    if world == 1:
        return {"plain": (partial(zeromesh_step, strategy="node=3", mesh=None), plain_step)}
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("node",))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("cluster", "node"))
    divided = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("node", "tp"))
    inside = {"mesh": divided["node"], "tp": divided["tp"]}
    ours, reduced = partial(zeromesh_step, strategy="node=3"), partial(fsdp_step, our_reduce=True)
    in_two = partial(zeromesh_step, strategy="node=3,cluster=0", mesh=grid)
    return {
        "3 / FSDP2": (partial(ours, mesh=flat), partial(fsdp_step, mesh=flat)),
        "3 / FSDP2+our reduce-scatter": (partial(ours, mesh=flat), partial(reduced, mesh=flat)),
        "3,0 / FSDP2 2-D": (in_two, partial(fsdp_step, mesh=grid)),
        "3,0 / FSDP2 2-D+our reduce-scatter": (in_two, partial(reduced, mesh=grid)),
        "TP 2: 3 / FSDP2": (partial(ours, **inside), partial(fsdp_step, **inside)),
        "TP 2: 3 / FSDP2+our reduce-scatter": (partial(ours, **inside), partial(reduced, **inside)),
        "1 / DDP+ZeRO": (partial(zeromesh_step, strategy="node=1", mesh=flat), partial(ddp_step, zero=True)),
        "0 / DDP": (partial(zeromesh_step, strategy="node=0", mesh=flat), partial(ddp_step, zero=False)),
        "floor / DDP+ZeRO": (partial(plain_step, owners=world), partial(ddp_step, zero=True)),
        "floor / DDP": (plain_step, partial(ddp_step, zero=False)),
    }


def timed(step: Step) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    step()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start


def compare(ours: Step, peer: Step, count: int) -> dict[str, Any]:
    """Compares two steps over `count` pairs, in turns."""

    def second(step: Step) -> float:
        step()  # work that a step leaves, such as refreshes, must not burden the other side
        return timed(step)

    times = in_turns({"ours": lambda: second(ours), "peer": lambda: second(peer)}, count)
    found = ratio(times["ours"], times["peer"])
    low, _, high = found["ratio_quartiles"]
    return found | {"standard_error": round((high - low) / 1.35 * 1.25 / count**0.5, 4)}


def run(ranks: Ranks, *, out: str, only: str, dtypes: list[str], pairs: int, **case: Any) -> list[dict[str, Any]]:
    """A task of all ranks; the file is written after each row."""
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    chosen = {name: sides for name, sides in systems(ranks.world).items() if only in name}
    for (name, (ours, peer)), dtype, micro_batches in product(chosen.items(), dtypes, (1, 4)):
        data = batches(micro_batches, case["sequences"], case["tokens"], 2 if name.startswith("TP 2") else 1)
        given = case["model"], getattr(torch, dtype), data
        key = {"pair": name, "dtype": dtype, "micro_batches": micro_batches, "ranks": ranks.world, **case}
        results.append(key | compare(ours(*given), peer(*given), pairs))
        if ranks.rank == 0:
            add(Path(out) if out else None, "results", results[-1], [*key])
    return results


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", choices=MODELS, default="7M")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--pairs", type=int, default=30)
    options.add_argument("--sequences", type=int, default=2)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--only", default="", help="pairs whose name contains this")
    options.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    args = options.parse_args()
    if args.ranks == 1 and args.dtypes != ["float32"]:
        options.error("plain PyTorch has no fp32 masters: one process is compared in float32 only")
    given = vars(args) | {"out": str(args.out.absolute()) if args.out else ""}
    mesh = {"node": given.pop("ranks")}
    for row in on_ranks("benchmarks.peers:run", mesh, **given):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
