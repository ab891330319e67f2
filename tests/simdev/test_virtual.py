"""The virtual device: real engine code at the size of models and worlds that no test machine has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeromesh as zm
from tests.simdev.ranks import alone
from zeromesh import simdev
from zeromesh.engine.build import make_control


@alone(virtual=True)
def test_large_tensors_are_shapes_and_small_ones_have_values():
    large = torch.empty(1 << 40, dtype=torch.bfloat16, device="simdev")
    assert simdev.memory_stats().allocated_bytes == 2 << 40
    assert (large + 1).shape == large.shape and large.sum().item() == 0
    words = torch.tensor([3, 5]).to("simdev")
    assert (words * 2 + 1).tolist() == [7, 11]
    assert words[words > 3].tolist() == [5]
    assert (words + large[:2]).tolist() == [0, 0]  # a value that nobody knows
    words.add_(large[:2].long())
    assert words.tolist() == [0, 0]
    words.fill_(4)
    assert words.tolist() == [4, 4]
    with pytest.raises(NotImplementedError, match=r"nonzero cannot run on the virtual device: .* virtual=False"):
        large.nonzero()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Llama's blocks, or of a mixture's with experts. Blocks repeat, so a few are enough."""

    hidden: int
    feed_forward: int
    experts: int = 1
    blocks: int = 3


LLAMA_65B = Shape(hidden=8192, feed_forward=22016)
MIXTURE = Shape(hidden=4096, feed_forward=14336, experts=8)


class Expert(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Each expert takes an equal part of the tokens, so that shapes depend on no values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.after = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.experts = nn.ModuleList(Expert(shape) for _ in range(shape.experts))
        if shape.experts > 1:
            self.router = nn.Linear(shape.hidden, shape.experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.mT, -1) @ v)
        h = self.after(x)
        parts = [expert(part) for expert, part in zip(self.experts, h.chunk(len(self.experts), 1), strict=True)]
        weights = self.router(h).sigmoid().mean(-1, keepdim=True) if len(parts) > 1 else 1.0
        return x + weights * torch.cat(parts, 1)


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


WORDS_BYTES = 4096
"""Beside model state: each parameter's count of steps, and the losses; 4 bytes each."""

LAUNCHES = 10
"""The most that a unit may take on an axis, in a lane."""


def rehearsed(shape: Shape, mesh: DeviceMesh, strategy: str) -> None:
    """Two steps as rank 0; memory is that of the schedule, to the byte, and launches keep within their budget."""
    before = simdev.memory_stats().allocated_bytes
    with torch.device("meta"):
        model = Model(shape).bfloat16()
    model = zm.shard(model, mesh, strategy, reduce_dtype=torch.bfloat16, init=initialise)
    assert simdev.memory_stats().allocated_bytes - before == zm.memory_report(model)[-1].predicted_bytes
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    launches: Counter[str] = Counter()

    def heard(entry: simdev.recorder.Entry) -> None:
        if isinstance(entry, simdev.Collective) and entry.group != "default_pg":
            launches[entry.group] += 1

    x = torch.empty(1, 2048, shape.hidden, dtype=torch.bfloat16, device="simdev")
    for _ in range(2):
        launches.clear()
        with simdev.Recorder(heard):
            model(x).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    del x
    report = zm.memory_report(model, optimizer)[-1]
    assert report.predicted_bytes == report.allocated_bytes
    assert 0 <= simdev.memory_stats().allocated_bytes - before - report.predicted_bytes <= WORDS_BYTES
    assert simdev.memory_stats().peak_reserved_bytes >= simdev.memory_stats().peak_allocated_bytes
    units = shape.blocks + 1
    assert launches and all(count <= LAUNCHES * units for count in launches.values()), launches


def initialise(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


@alone(virtual=True)
def test_memory_of_large_models_is_what_was_predicted():
    """On one rank, the last: all are alike."""
    simdev.counting_group((1 << 10) - 1, 1 << 10)
    mesh = init_device_mesh("simdev", (1 << 7, 8), mesh_dim_names=("cluster", "node"))
    for shape, strategy in ((LLAMA_65B, "node=3,cluster=1"), (MIXTURE, "node=3,cluster=3")):
        rehearsed(shape, mesh, strategy)


@alone(virtual=True)
def test_any_rank_of_a_counting_group_hears_what_it_says():
    simdev.counting_group(5, 64)
    control = make_control(init_device_mesh("simdev", (8, 8), mesh_dim_names=("cluster", "node")))
    assert control.say({"step": 7, "names": ["a"]}) == {"step": 7, "names": ["a"]}
    assert control.gather("here") == ["here"] * 64
