"""A small model under tensor parallelism and a strategy, against plain training of it in one process.

`check(strategy, plan)` runs on every rank of a pool: the ranks of one line of the axis `tp` are given the same tokens,
all others different ones. It compares norms, and each rank's slices of gradients, parameters and optimizer states with
what plain training in fp64 has at the same elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
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
from tests.dist.features.parity import share_grads
from tests.dist.pool import kept, told_by_first
from zeromesh.engine.api import engine_of

WIDTH, HIDDEN, VOCABULARY, BATCH, SEQUENCE = 6, 5, 11, 2, 4
STEPS, MICRO_BATCHES, CLIP = 2, 2, 0.5
TOLERANCE = 1e-10

FP64: dict[str, Any] = dict.fromkeys(("reduce_dtype", "grad_dtype", "master_dtype"), torch.float64)


class Block(nn.Module):
    """A hidden width that no degree divides, a bias on either side, and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, and a head that is not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def build() -> Net:
    """The same on every rank."""
    torch.manual_seed(3)
    net = Net().double()
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
    for layer in net.layers:
        parallelize_module(layer, tp, {"up": ColwiseParallel(**uneven), "down": RowwiseParallel()})
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
    for layer in net.layers:
        assert isinstance(layer, Block)
        layer.gain = nn.Parameter(
            DTensor.from_local(layer.gain.detach(), tp, [Replicate()], run_check=False), requires_grad=True
        )
        parallelize_module(
            layer,
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


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + 100 * micro + rank)
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, dims=1).flatten()) / MICRO_BATCHES


Record = dict[str, Any]
"""Of one step: gradients, the norm, parameters and states by name."""


@functools.cache
def plain(ranks: int, optimizer: str) -> list[Record]:
    """Plain training on the tokens of so many data-parallel ranks, done by rank 0 for all."""
    return told_by_first(_train_plainly, ranks, optimizer)


def _train_plainly(ranks: int, optimizer: str) -> list[Record]:
    model, records = build(), []
    stepping = make_optimizer(optimizer, model)
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            for rank in range(ranks):
                (loss_of(model, batch(step, micro, rank)) / ranks).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        stepping.step()
        states = {name: dict(stepping.state[p]) for name, p in model.named_parameters()}
        records.append(
            {
                "norm": norm,
                "grad": grads,
                "param": {name: p.detach().clone() for name, p in model.named_parameters()},
                **{
                    key: {name: state[key].clone() for name, state in states.items()}
                    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer")
                    if key in next(iter(states.values()))
                },
            }
        )
        stepping.zero_grad()
    return records


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def mesh_of(*shape: int, tp: int = 2) -> DeviceMesh:
    """Data-parallel axes, given innermost first, around an axis `tp`."""
    names = ("node", "cluster")[: len(shape)]
    return kept(init_device_mesh, "cpu", (*reversed(shape), tp), mesh_dim_names=(*reversed(names), "tp"))


def sharded(
    strategy: str, plan: str, mesh: DeviceMesh, wrap: Callable[[nn.Module], None] = lambda layer: None, **options: Any
) -> nn.Module:
    """The model, divided over `tp`, where that has ranks, and sharded over all other axes."""
    names = mesh.mesh_dim_names or ()
    net = divide(build(), mesh["tp"], plan) if mesh["tp"].size() > 1 else build()
    for layer in net.layers:
        wrap(layer)
    return zm.shard(net, mesh[names[:-1]], strategy, **(FP64 | options))


def own_part(param: Any, whole: Tensor) -> Tensor:
    """What this rank's slice of a parameter holds of a tensor of its shape."""
    return whole[param.region.index].reshape(-1)[param.flat_start :][: param.local.numel()]


def check(
    strategy: str,
    plan: str,
    *shape: int,
    optimizer: str = "adamw",
    wrap: Callable[[nn.Module], None] = lambda layer: None,
    **options: Any,
) -> None:
    """Trains and compares: see the module.

    Args:
        strategy: as for `zm.shard`.
        plan: as for `parallelise`.
        shape: of the data-parallel mesh, innermost first.
        optimizer: `adamw` or `sgd`, with momentum.
        wrap: is done to each block, before it is sharded.
        options: of `zm.shard`.
    """
    mesh = mesh_of(*shape)
    ranks = mesh.size() // mesh["tp"].size()
    expected = plain(ranks, optimizer)
    model = sharded(strategy, plan, mesh, wrap=wrap, **options)
    stepping, rank = make_optimizer(optimizer, model), engine_of(model).control.rank
    for step, record in enumerate(expected):
        backward(model, plan, step, rank)
        require_equal(f"gradient {step}", ((p, p.grad.local, record["grad"]) for p in params_of(model)))
        norm = float(zm.clip_grad_norm_(model, CLIP))
        assert abs(norm - record["norm"]) < TOLERANCE, f"norm {step}: {norm} instead of {record['norm']}"
        stepping.step()
        stepping.zero_grad()
        require_equal(f"parameter {step}", ((p, p.local, record["param"]) for p in params_of(model)))
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if key in record:
                states = ((p, stepping.state[p][key], record[key]) for p in params_of(model))
                require_equal(f"{key} {step}", states)


def backward(model: nn.Module, plan: str, step: int, rank: int) -> None:
    """All micro-batches of one step."""
    for micro in range(MICRO_BATCHES):
        with (
            zm.accumulate(model, last=micro == MICRO_BATCHES - 1),
            loss_parallel() if plan == "loss" else nullcontext(),
        ):
            loss_of(model, batch(step, micro, rank)).backward()


def params_of(model: nn.Module) -> Iterator[Any]:
    return iter(engine_of(model).optimizer_params())


def require_equal(
    what: str, rows: Iterator[tuple[Any, Tensor, dict[str, Tensor]]], *, tolerance: float = TOLERANCE
) -> None:
    for param, got, wholes in rows:
        wanted = own_part(param, wholes[param.full_name])
        off = float((got - wanted).abs().max()) if got.numel() else 0.0
        assert off < tolerance, f"{what} of {param.full_name}: off by {off}"


def check_beside(
    model: nn.Module,
    plain: nn.Module,
    loss_of: Callable[[nn.Module, int, int, int], Tensor],
    *,
    tolerance: float = TOLERANCE,
    **options: float,
) -> None:
    """Trains both by AdamW, `plain` on the losses of all data-parallel ranks, and compares.

    Args:
        loss_of: of a model, a step, a micro-batch and a rank.
        options: of AdamW.
    """
    control = engine_of(model).control
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, **options) for each in (plain, model)]
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            for rank in range(control.size) if dist.get_rank() == 0 else ():
                (loss_of(plain, step, micro, rank) / MICRO_BATCHES / control.size).backward()
            with zm.accumulate(model, last=micro == MICRO_BATCHES - 1):
                (loss_of(model, step, micro, control.rank) / MICRO_BATCHES).backward()
        share_grads(plain)
        norms = nn.utils.clip_grad_norm_(plain.parameters(), CLIP), zm.clip_grad_norm_(model, CLIP)
        assert abs(float(norms[0] - norms[1])) < tolerance, norms
        grads = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
        require_equal("gradient", ((p, p.grad.local, grads) for p in params_of(model)), tolerance=tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        values = {name: param.detach() for name, param in plain.named_parameters()}
        require_equal("parameter", ((p, p.local, values) for p in params_of(model)), tolerance=tolerance)
    for key in ("exp_avg", "exp_avg_sq"):
        states = {name: optimizers[0].state[param][key] for name, param in plain.named_parameters()}
        rows = ((p, optimizers[1].state[p][key], states) for p in params_of(model))
        require_equal(key, rows, tolerance=tolerance)
