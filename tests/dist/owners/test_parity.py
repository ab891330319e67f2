"""Optimizers on whole tensors: the same numbers as on one process, under every kind of strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import zeromesh as zm
from tests.dist.owners.optimizers import LAMB, SOAP, EightBits, Orthogonal
from tests.dist.parity import Net, close, mesh_of, next_token_loss, same_params, same_state, sharded_params, tokens
from tests.dist.pool import kept, on_ranks, told_by_first
from zeromesh.engine.optim import WHOLE
from zeromesh.engine.vouched import stored

MICRO_BATCHES = 2
STEPS = 2
ALL = "all kinds"


class Block(nn.Module):
    """Odd matrices, of which one is frozen and one of a single row; vectors, and a number."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim + 4)
        self.down = nn.Linear(dim + 4, dim, bias=False)
        self.fixed = nn.Linear(dim, dim, bias=False).requires_grad_(False)
        self.row = nn.Linear(dim, 1)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x))) + 0.1 * self.fixed(x) * torch.tanh(self.row(x))


def net() -> Net:
    """Its head is tied to its embedding, and one layer gets no gradient."""
    torch.manual_seed(0)
    model = Net(block=Block)
    model.blocks[0].unused = nn.Linear(5, 5)
    model.head.weight = model.embed.weight
    return model.double()


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    return next_token_loss(model, tokens(step, micro, rank))


def shard(model: nn.Module, sizes: tuple[int, ...], strategy: str, **options: Any) -> nn.Module:
    return zm.shard(model, mesh_of(*sizes), strategy, **options)


def backward(model: nn.Module, step: int, ranks: int | None = None) -> None:
    """The gradient of all micro-batches of so many ranks, which this world's share."""
    world = dist.get_world_size()
    todo = [(m, rank) for m in range(MICRO_BATCHES) for rank in range(dist.get_rank(), ranks or world, world)]
    for micro, rank in todo:
        with zm.accumulate(model, last=(micro, rank) == todo[-1]):
            (loss_of(model, step, micro, rank) / len(todo)).backward()


def backward_plainly(model: nn.Module, step: int, ranks: int | None = None) -> None:
    """The same in one process, of a plain model."""
    ranks = ranks or dist.get_world_size()
    for micro in range(MICRO_BATCHES):
        for rank in range(ranks):
            (loss_of(model, step, micro, rank) / MICRO_BATCHES / ranks).backward()


def groups_of(model: nn.Module, *, matrices: bool) -> list[dict[str, Any]]:
    params = [param for param in model.parameters() if param.requires_grad]
    if matrices:
        return [{"params": [param for param in params if param.ndim == 2]}]
    return [
        {"params": [param for param in params if param.ndim >= 2], "lr": 0.01},
        {"params": [param for param in params if param.ndim < 2]},
    ]


KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Muon": (optim.Muon, {"lr": 0.02, "weight_decay": 0.1}),
    "Adafactor": (optim.Adafactor, {"lr": 0.05}),
    "LAMB": (LAMB, {}),
    "SOAP": (SOAP, {}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "EightBits": (EightBits, {"lr": 0.05}),
    "Adagrad": (optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Parameters of one process with all ranks' data after each step, and its optimizers at the end."""

    params: list[nn.Module]
    optimizers: dict[str, optim.Optimizer]


def optimizers_of(kind: str, model: nn.Module, make: Callable[..., optim.Optimizer]) -> list[optim.Optimizer]:
    """Muon for matrices and AdamW for the rest, as users mix them; any other for all."""
    _, options = KINDS[kind]
    found = [make(groups_of(model, matrices=kind == "Muon"), **options)]
    if kind == "Muon":
        found.append(optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01))
    return found


def same_states(model: nn.Module, ours: optim.Optimizer, expected: nn.Module, theirs: optim.Optimizer) -> None:
    """Each tensor's states are whole on one of the ranks of a copy, and the plain optimizer's."""
    params = sharded_params(model)
    for name, plain in expected.named_parameters(remove_duplicate=False):
        if params[name] not in WHOLE[ours]:
            assert params[name] not in ours.state, f"{name} has states on a rank that does not own it"
            continue
        for key, value in theirs.state.get(plain, {}).items():
            held = stored(key, torch.as_tensor(ours.state[params[name]][key]))
            for part, plain_part in stored(key, torch.as_tensor(value)).items():
                close(held[part], plain_part, f"{part} of {name}")


class Many(nn.Module):
    """Tensors for each kind of optimizer, in few units; its head is tied to its embedding."""

    def __init__(self, dim: int = 5, experts: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.experts = nn.Parameter(torch.randn(experts, dim, dim + 2) / dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(6))
        self.unused = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        for expert in self.experts:
            x = x + torch.tanh(x @ expert)[..., : x.shape[-1]]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def many() -> Many:
    torch.manual_seed(0)
    return Many().double()


def all_kinds(model: nn.Module, make: Callable[..., optim.Optimizer]) -> dict[str, optim.Optimizer]:
    """Every optimizer on tensors of its own, AdamW on slices for those that Muon leaves."""
    params = dict(model.named_parameters())

    def of(*names: str) -> list[dict[str, Any]]:
        own = [param for name, param in params.items() if param.requires_grad and name.startswith(names)]
        return [{"params": [param for param in own if param.ndim > 1]}, {"params": [p for p in own if p.ndim < 2]}]

    def made(kind: str, *names: str, **ours: Any) -> optim.Optimizer:
        return make(KINDS[kind][0], of(*names), ours, **KINDS[kind][1])

    muon = of("embed.", "blocks.0.up", "blocks.0.row")
    return {
        "Muon": make(optim.Muon, muon[:1], {"batched": True}, **KINDS["Muon"][1]),
        "AdamW on slices": optim.AdamW(muon[1:], lr=0.01),
        "Adafactor": made("Adafactor", "blocks.1.up", "unused"),
        "LAMB": made("LAMB", "blocks.1.down", "layers.0", "layers.1", batched=True),
        "SOAP": made("SOAP", "blocks.0.down", "blocks.0.gain", "blocks.1.row", "layers.2"),
        "AdamW": made("AdamW", "blocks.1.gain", "layers.3.weight"),
        "Adagrad": made("Adagrad", "layers.3.bias"),
        "EightBits": made("EightBits", "layers.4", "layers.5"),
        "Experts": make(Orthogonal, of("experts"), {"dims": 2, "batched": True}),
    }


def plain_kind(kind: type[optim.Optimizer], groups: Any, ours: dict[str, Any], **options: Any) -> optim.Optimizer:
    return kind(groups, **options)


def owned_kind(kind: type[optim.Optimizer], groups: Any, ours: dict[str, Any], **options: Any) -> optim.Optimizer:
    return zm.by_owner(kind, groups, bucket_bytes=400, **ours, **options)  # several, that are on their way at once


def in_one_process(kind: str, ranks: int, steps: int = STEPS) -> Expected:
    """With optimizers of one kind, or of all on tensors of their own."""
    model = many() if kind == ALL else net()
    if kind == ALL:
        optimizers = all_kinds(model, plain_kind)
    else:
        optimizers = dict(zip((kind, "AdamW"), optimizers_of(kind, model, KINDS[kind][0]), strict=False))
    params = []
    for step in range(steps):
        backward_plainly(model, step, ranks)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        params.append(copy.deepcopy(model))
    return Expected(params=[*params[:-1], model], optimizers=optimizers)


def train(sizes: tuple[int, ...], strategies: Sequence[str]) -> None:
    """Under each of the strategies, the steps of one process."""
    expected = kept(told_by_first, in_one_process, ALL, dist.get_world_size())
    for strategy in strategies:
        model = shard(many(), sizes, strategy)
        optimizers = all_kinds(model, owned_kind)
        for step in range(STEPS):
            backward(model, step)
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            try:
                same_params(model, expected.params[step])
            except AssertionError as error:
                raise AssertionError(f"under {strategy}, step {step}: {error}") from error
        for kind, optimizer in optimizers.items():
            if kind != "AdamW on slices":
                same_states(model, optimizer, expected.params[-1], expected.optimizers[kind])
        same_state(model, expected.params[-1])


@on_ranks(4)
def test_under_every_kind_of_strategy():
    """With the one on three axes, each stage on some axis; the ring over both, and nothing overlapped."""
    train((2, 2), ["node=3,cluster=2;collective=ho_ring", "node=0,cluster=3k;overlap=none"])


@on_ranks(8)
def test_on_three_axes():
    """More ranks than tensors, too."""
    train((2, 2, 2), ["node=3d,cluster=1,region=1"])
