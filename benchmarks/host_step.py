"""A step on the host's memory, from gradients there to compute copies, compared with one kernel on one tensor.

    python -m benchmarks.host_step

One process, one thread, `host=1`, fp32 masters, bf16 compute. Ours: norm, clip, AdamW and the compute copies of 300
tensors in 30 units. The other: `torch._fused_adamw_` on one flat tensor of that size, and one cast to bf16. They take
turns. Further rows, without clipping and for the call of `step` only, show where the rest of the time goes. Each of our
steps follows a backward that is not timed. There, norms are computed on the device before gradients come down; the row
`read` reads gradients on the host instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zeromesh as zm
from benchmarks.harness import in_turns, parser, ratio, save
from zeromesh.engine.api import engine_of
from zeromesh.engine.param import settle

UNITS, TENSORS, SIZE = 30, 10, 320
CLIPPED = 1e-3


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(SIZE, SIZE) for _ in range(TENSORS))

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.stack([weight.float().square().sum() for weight in self.weights]).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(UNITS))

    def forward(self) -> Tensor:
        value = torch.zeros(())
        for unit in self.units:
            value = unit(value)
        return value


def of_slices() -> dict[str, Callable[[], float]]:
    model = zm.shard(Model(), None, "host=1,node=0", units=[Unit], param_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    engine = engine_of(model)

    def with_gradients() -> None:
        optimizer.zero_grad()
        model().backward()

    def whole(clips: bool, reads: bool = False) -> float:
        with_gradients()
        if reads:
            settle(None)  # as a reader of gradients does
        began = time.perf_counter()
        if clips:
            zm.clip_grad_norm_(model, CLIPPED)
        optimizer.step()
        engine.at_rest(follow=True)
        return time.perf_counter() - began

    def call() -> float:
        with_gradients()
        began = time.perf_counter()
        optimizer.step()
        taken = time.perf_counter() - began
        engine.at_rest(follow=True)
        return taken

    return {
        "ours": lambda: whole(True),
        "ours, read": lambda: whole(True, reads=True),
        "ours, not clipped": lambda: whole(False),
        "the call of step": call,
    }


def of_one_tensor() -> Callable[[], float]:
    numel = UNITS * TENSORS * SIZE**2
    flat, grad, first, second = (torch.randn(numel).abs() for _ in range(4))
    compute, count = torch.empty(numel, dtype=torch.bfloat16), torch.tensor(1.0)
    options: dict[str, Any] = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}

    def step() -> float:
        began = time.perf_counter()
        torch._fused_adamw_([flat], [grad], [first], [second], [], [count], amsgrad=False, maximize=False, **options)
        compute.copy_(flat)
        return time.perf_counter() - began

    return step


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=41)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    found = in_turns({**of_slices(), "one tensor": of_one_tensor()}, arguments.rounds, warm_up=3)
    other = found.pop("one tensor")
    save(arguments.out, rows={name: ratio(seconds, other) for name, seconds in found.items()})


if __name__ == "__main__":
    main()
