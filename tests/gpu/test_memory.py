"""Bytes on a device: by the schedule, by tensors, and by requests to torch's allocator."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import zeromesh as zm
from tests.dist.parity import mesh_of
from tests.dist.pool import on_ranks
from tests.gpu.conftest import NATIVE, TIMEOUT_S
from zeromesh.trace import MemoryLine

WIDTH = 256
WORDS_BYTES = 4096
"""Beside model state: which parameters had gradients, as words, and losses; the allocator's unit is 512 bytes."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def requested_bytes() -> int:
    """Bytes of live tensors, before the allocator rounds them up."""
    torch.cuda.synchronize()
    gc.collect()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for last in (False, True):
        with zm.accumulate(model, last=last):
            model(torch.ones(3, WIDTH, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def on_device(lines: Iterable[MemoryLine]) -> MemoryLine:
    (total,) = (line for line in lines if (line.kind, line.place) == ("total", "device"))
    return total


def sharded(strategy: str) -> nn.Module:
    return zm.shard(Stack().bfloat16(), mesh_of(2, 2, device="cuda"), strategy, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    "strategy",
    [
        *(
            "node=0,cluster=0",
            "node=1,cluster=2",
            "node=3,cluster=1",
            "node=3,cluster=3;prefetch=2",
            "node=3,cluster=3k",
        ),
        *("host=1,node=3,cluster=1", "host=3,node=3,cluster=3", "node=3,cluster=3h"),
    ],
)
@on_ranks(4, timeout_s=TIMEOUT_S - 20.0, backend=NATIVE)
def test_the_allocator_was_asked_for_what_was_predicted(strategy):
    model = sharded(strategy)  # libraries take their workspaces once, from torch's allocator
    train(model, torch.optim.AdamW(model.parameters()))
    del model
    before = requested_bytes()
    model = sharded(strategy)
    predicted = on_device(zm.memory_report(model)).predicted_bytes
    assert requested_bytes() - before == predicted
    # On the host the engine chooses torch's fused kernels.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=not strategy.startswith("host") or None)
    for _ in range(2):
        train(model, optimizer)
    total = on_device(zm.memory_report(model, optimizer))
    assert total.predicted_bytes == total.allocated_bytes
    assert 0 <= requested_bytes() - before - total.predicted_bytes <= WORDS_BYTES
    del model, optimizer
    assert abs(requested_bytes() - before) <= WORDS_BYTES


@on_ranks(4, timeout_s=TIMEOUT_S - 20.0, backend=NATIVE)
def test_steps_take_no_more_memory_than_the_first():
    model = sharded("node=3,cluster=1")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    peaks = []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        train(model, optimizer)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert max(peaks[2:]) <= peaks[1]
