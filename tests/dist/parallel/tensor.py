"""A small model under tensor parallelism and a strategy, against plain training of it in one process.

`check(strategy, plan)` runs on every rank of a pool: the ranks of one line of the axis `tp` are given the same tokens,
all others different ones (`tests.dist.parity`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import zeromesh as zm
from tests.dist.parity import MakeOptimizer, Net, Pair, adamw, next_token_loss, tokens
from tests.dist.pool import kept
from zeromesh.engine.api import engine_of

MICRO_BATCHES, CLIP = 2, 0.5

FP64: dict[str, Any] = dict.fromkeys(("reduce_dtype", "grad_dtype", "master_dtype"), torch.float64)


class Block(nn.Module):
    """A hidden width that no degree divides, a bias on either side, and a parameter of one element."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 5)
        self.down = nn.Linear(5, dim)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


def build() -> Net:
    """The same on every rank."""
    torch.manual_seed(3)
    net = Net(dim=6, num_blocks=2, block=Block).double()
    for param in net.parameters():
        nn.init.normal_(param, mean=0.5 if param.dim() < 2 else 0.0, std=0.4)
    return net


def parallelise(net: Net, tp: DeviceMesh, plan: str) -> Net:
    """Makes DTensors of parameters.

    Args:
        net: changed in place.
        tp: of one dimension.
        plan: `blocks`: of the blocks' matrices alone. `tensor`: of embedding and head too. `sequence`: of all, with
            activations divided between matrices. `loss`: the same, with logits that stay divided.
    """
    uneven = {"use_local_output": False}  # torch would take a local tensor for half of the whole
    for block in net.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(**uneven), "down": RowwiseParallel()})
    if plan == "tensor":
        parallelize_module(
            net,
            tp,
            {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())},
        )
    return net


def divide(net: Net, tp: DeviceMesh, plan: str) -> Net:
    """`parallelise`, or the same with sequence parallelism."""
    if plan in ("blocks", "tensor"):
        return parallelise(net, tp, plan)
    for block in net.blocks:
        assert isinstance(block, Block)
        block.gain = nn.Parameter(
            DTensor.from_local(block.gain.detach(), tp, [Replicate()], run_check=False), requires_grad=True
        )
        parallelize_module(
            block,
            tp,
            {
                "norm": SequenceParallel(use_local_output=False),
                "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            },
        )
    logits = {"output_layouts": Shard(-1), "use_local_output": False} if plan == "loss" else {}
    parallelize_module(
        net,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
            "norm": SequenceParallel(use_local_output=False),
            "head": ColwiseParallel(input_layouts=Shard(1), **({"output_layouts": Replicate()} | logits)),
        },
    )
    return net


def momentum(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def mesh_of(*shape: int, tp: int = 2) -> DeviceMesh:
    """Data-parallel axes, given innermost first, around an axis `tp`."""
    names = ("node", "cluster")[: len(shape)]
    return kept(init_device_mesh, "cpu", (*reversed(shape), tp), mesh_dim_names=(*reversed(names), "tp"))


def sharded(
    strategy: str, plan: str, mesh: DeviceMesh, wrap: Callable[[nn.Module], None] = lambda block: None, **options: Any
) -> nn.Module:
    """The model, divided over `tp`, where that has ranks, and sharded over all other axes."""
    names = mesh.mesh_dim_names or ()
    net = divide(build(), mesh["tp"], plan) if mesh["tp"].size() > 1 else build()
    for block in net.blocks:
        wrap(block)
    return zm.shard(net, mesh[names[:-1]], strategy, **(FP64 | options))


def dividing(plan: str) -> AbstractContextManager[object]:
    """Under which losses of the plan's logits are computed."""
    return loss_parallel() if plan == "loss" else nullcontext()


def pair_of(strategy: str, plan: str, mesh: DeviceMesh, **options: Any) -> Pair:
    """`sharded` beside the plain model."""
    return Pair(base=build(), model=sharded(strategy, plan, mesh, **options), clip=CLIP)


def check(
    strategy: str, plan: str, *shape: int, make_optimizer: MakeOptimizer = adamw, steps: int = 2, **options: Any
) -> None:
    """Trains and compares: see the module.

    Args:
        strategy: as for `zm.shard`.
        plan: as for `parallelise`.
        shape: of the data-parallel mesh, innermost first.
        make_optimizer: for each of the two models.
        steps: of the optimizers.
        options: of `sharded`.
    """
    with dividing(plan):
        pair_of(strategy, plan, mesh_of(*shape), **options).train(steps=steps, make_optimizer=make_optimizer)


def backward(model: nn.Module, plan: str, step: int, rank: int) -> None:
    """All micro-batches of one step."""
    for micro in range(MICRO_BATCHES):
        with zm.accumulate(model, last=micro == MICRO_BATCHES - 1), dividing(plan):
            (next_token_loss(model, tokens(step, micro, rank)) / MICRO_BATCHES).backward()


def params_of(model: nn.Module) -> Iterator[Any]:
    return iter(engine_of(model).optimizer_params())
