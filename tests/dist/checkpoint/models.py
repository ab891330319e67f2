"""A small model with parts that are hard to save, sharded, trained a little, and gathered for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from tests.dist.pool import kept

Mesh = tuple[tuple[str, int], ...]
"""(name, size), outermost first."""


class Odd(nn.Module):
    """Odd shapes, a 0-d and a frozen parameter, tied weights, a running mean, a 4-d kernel, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6, bias=bool(i % 2)) for i in range(3)])
        self.kernel = nn.Conv2d(1, 3, (2, 3))
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden)) * self.scale
        hidden = self.norm(hidden) + self.kernel(hidden[:, None, None].expand(-1, 1, 3, -1)).mean() + self.frozen.mean()
        logits: Tensor = self.head(hidden + self.none.sum())
        return logits


def make(
    mesh: Mesh, strategy: str, seed: int = 0, device: str = "cpu", build: Callable[[], nn.Module] = Odd, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded over the worker's mesh, with AdamW."""
    torch.manual_seed(seed)
    names, sizes = zip(*mesh, strict=True)
    model = zm.shard(build(), kept(init_device_mesh, device, sizes, mesh_dim_names=names), strategy, **options)
    return model, adamw(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    """Some steps, each rank on its own data; this rank's losses."""
    losses, device = [], next(model.buffers()).device  # parameters may lie on the host
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(0, 11, (4,), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def slices(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, tuple[int, ...], int, Tensor]]:
    """(name, shape, start, local) of everything this rank holds, read without the code under test."""
    found: list[tuple[str, tuple[int, ...], int, Tensor]] = []
    for param in model.parameters():
        place = tuple(param.shape), param.elements.start  # type: ignore[attr-defined]
        found.append((param.full_name, *place, param.local.to("cpu", copy=True)))  # type: ignore[attr-defined]
        for key, value in optimizer.state.get(param, {}).items():
            where = place if value.dim() else ((), 0)
            found.append((f"{param.full_name}/{key}", *where, value.reshape(-1).to("cpu", copy=True)))  # type: ignore[attr-defined]
    for name, buffer in model.named_buffers():
        if dist.get_rank() == 0:
            found.append((name, tuple(buffer.shape), 0, buffer.reshape(-1).to("cpu", copy=True)))
    return found


def assemble(ranks: list[list[tuple[str, tuple[int, ...], int, Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors out of all ranks' slices; replicas must be equal."""
    whole: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    for name, shape, start, local in (piece for pieces in ranks for piece in pieces):
        numel = torch.Size(shape).numel()
        tensor = whole.setdefault(name, torch.zeros(numel, dtype=local.dtype))
        seen = covered.setdefault(name, torch.zeros(numel, dtype=torch.bool))
        span = slice(start, start + local.numel())
        assert torch.equal(tensor[span][seen[span]], local[seen[span]]), f"replicas of {name} differ"
        tensor[span], seen[span] = local, True
    assert all(seen.all() for seen in covered.values())
    return whole


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit-equal, with the same names."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
