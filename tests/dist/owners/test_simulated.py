"""The run by owners and its simulation agree on owners, bytes on each axis, and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import zeromesh as zm
from tests.dist.owners.test_parity import MICRO_BATCHES, backward, shard
from tests.dist.parity import net
from tests.dist.pool import on_ranks
from tests.pure.planner.setups import small_cluster
from zeromesh.cost.constants import default_constants
from zeromesh.engine.api import engine_of
from zeromesh.model.from_module import from_module
from zeromesh.model.spec import ModelSpec
from zeromesh.owners.optimizer import OwnerOptimizer
from zeromesh.parallel import WHOLE
from zeromesh.schedule.step import sent_bytes_per_axis
from zeromesh.simulator.division import Division
from zeromesh.simulator.run import Setup, simulate
from zeromesh.simulator.workload import FixedWorkload

TOKENS = 8


class Block(nn.Module):
    """Two matrices of one shape, and a stack of experts'."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.gate = (nn.Linear(dim, dim + 4, bias=False) for _ in range(2))
        self.experts = nn.Parameter(torch.randn(3, dim + 4, dim) / dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x))) * self.gate(x)
        return x + torch.stack([hidden @ expert for expert in self.experts]).sum(0)


MODEL = {"dim": 6, "num_blocks": 3, "block": Block}


@cache
def described() -> ModelSpec:
    """With experts of which a token meets some, as a dispatcher would show; here it meets all."""
    spec = from_module(net(**MODEL), seq_len=TOKENS, inputs=(torch.zeros(1, TOKENS, dtype=torch.int64),))
    units = [
        replace(unit, tensors=tuple(replace(t, active_share=0.5 if len(t.shape) == 3 else 1.0) for t in unit.tensors))
        for unit in spec.units
    ]
    return replace(spec, units=tuple(units))


def optimizers_of(model: nn.Module, optimizer: str, ownership: str) -> list[optim.Optimizer]:
    params = dict(model.named_parameters())
    matrices = [p for name, p in params.items() if optimizer == "muon" and name.startswith("blocks") and p.ndim > 1]
    rest = [p for p in params.values() if not any(p is other for other in matrices)]
    muon = [zm.by_owner(optim.Muon, matrices, dims=2, lr=0.02)] if matrices else []
    adamw = zm.by_owner(optim.AdamW, rest, lr=0.01) if ownership == "owners" else optim.AdamW(rest, lr=0.01)
    return [*muon, adamw]


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def compare(strategy: str, optimizer: str, ownership: str) -> None:
    model = shard(net(**MODEL), (2, 2), strategy)
    optimizers = optimizers_of(model, optimizer, ownership)
    owned = [each for each in optimizers if isinstance(each, OwnerOptimizer)]
    dtypes = {"param_dtype": "fp64", "grad_dtype": "fp64", "master_dtype": "fp64"}
    work = FixedWorkload(
        seq_len=TOKENS,
        global_batch_tokens=TOKENS * 4 * MICRO_BATCHES,
        optimizer=optimizer,
        ownership=ownership,
        **dtypes,
    )
    spec, cluster = described(), small_cluster(2, 2)
    division = Division.of(spec, cluster, WHOLE, seq_len=TOKENS)
    setup = Setup.of(division, division.parts[0], strategy, work, "zeromesh", default_constants())
    for ours, simulated in zip(owned, setup.owned, strict=True):
        known = [
            Counter(
                ((each.shape, each.start, each.padded), owner)
                for each, owner in zip(tensors, owners.rank_of, strict=True)
            )
            for tensors, owners in ((ours.placements, ours.owners), (simulated.tensors, simulated.owners))
        ]
        assert known[0] == known[1]
        copies = dist.get_world_size() // len(simulated.held_bytes)
        held = gathered(ours.state_bytes() + ours.kept_bytes())
        assert sorted(held) == sorted(simulated.held_bytes * copies)
    lines = sent_bytes_per_axis(engine_of(model).schedule, micro_batches=MICRO_BATCHES)
    mean = Counter[str]()
    for each in gathered(lines):
        mean.update(each)
    rounded = 2 * 8 * sum(len(each.buckets) for each in setup.owned)  # to a whole element, there and back
    for axis in simulate(spec, cluster, strategy, work).axes:
        assert 0 <= axis.bytes_sent_per_device - mean[axis.axis] / 4 <= rounded, axis
    if len(optimizers) > 1:
        return
    for step in range(2):  # in the first, values go to owners too
        engine_of(model).at_rest(follow=True)
        with zm.traffic_report(model, micro_batches=MICRO_BATCHES) as traffic:
            backward(model, step)
            optimizers[0].step()
            optimizers[0].zero_grad()
    assert {line.axis: line.sent_bytes for line in traffic.lines()} == lines


@on_ranks(4)
def test_what_runs_is_what_is_simulated():
    """AdamW on slices and by owners, and Muon on matrices and experts."""
    slices, owners, muon = ("adamw", "slices"), ("adamw", "owners"), ("muon", "slices")
    for strategy, kinds in {"node=3,cluster=1": (slices, muon), "node=1,cluster=0": (owners, muon)}.items():
        for optimizer, ownership in kinds:
            try:
                compare(strategy, optimizer, ownership)
            except AssertionError as error:
                raise AssertionError(f"{optimizer} on {ownership} under {strategy}: {error}") from error
