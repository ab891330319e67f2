"""Shards that lie in the host's memory for a while come back as they were, and nobody computes with them meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeromesh as zm
from tests.dist.parity import mesh_of
from tests.dist.pool import on_ranks
from zeromesh.engine.api import engine_of
from zeromesh.errors import ModelError

STRATEGIES = ["node=3,cluster=1", "node=3k@int8/int4+ef,cluster=2", "host=2,node=3d,cluster=1", "node=0,cluster=0"]


def make(strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.GELU()) for _ in range(3)))
    model = zm.shard(model, mesh_of(2, 2), strategy, param_dtype=torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    rows = torch.randn(4, 40, generator=torch.Generator().manual_seed(seed + torch.distributed.get_rank()))
    model(rows.bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_training_goes_on_as_if_nothing_had_moved(strategy):
    found = []
    for moves in (), ("host=1", "host=2", "host=3"):
        model, optimizer = make(strategy)
        train(model, optimizer, 0)
        for seed, host in enumerate(moves or ("", "", ""), 1):
            if host:
                before = zm.memory_report(model, optimizer)
                with zm.parked(model, optimizer, host):
                    held = [t.untyped_storage().nbytes() for t in engine_of(model).backend.working_buffers()]
                    assert host != "host=3" or not any(held)
                    masters = [b.master for u in engine_of(model).units for b in u.buffers if not b.master_in_params]
                    on_host = strategy.startswith("host")
                    assert on_host or not any(m.untyped_storage().nbytes() for m in masters if m is not None)
                assert zm.memory_report(model, optimizer) == before
            train(model, optimizer, seed)
        found.append(zm.full_state_dict(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@on_ranks(4)
def test_memory_that_numpy_shows_stays():
    """torch cannot resize it. On a CPU, `zm.save_safetensors` shares shards with numpy."""
    model, optimizer = make("node=1,cluster=0")
    train(model, optimizer, 0)
    before = [param.local.clone() for param in model.parameters()]
    next(iter(model.parameters())).local.numpy()
    with zm.parked(model, optimizer):
        pass
    assert all(torch.equal(param.local, value) for param, value in zip(model.parameters(), before, strict=True))
    train(model, optimizer, 1)


@on_ranks(4)
def test_whoever_looks_at_a_parked_model_is_refused():
    (model, optimizer), (other, _) = make("node=3,cluster=1"), make("node=1,cluster=0")
    rows = torch.ones(1, 40, dtype=torch.bfloat16)
    train(model, optimizer, 0)
    with torch.no_grad():
        expected = model(rows)
        with zm.parked(model, optimizer, "host=2"):
            assert torch.equal(model(rows), expected)
    weight = next(iter(model.parameters()))
    with zm.parked(model, optimizer):
        looks = [
            lambda: model(rows),
            lambda: weight.sum(),
            lambda: weight.local,
            lambda: model.state_dict(),
            lambda: weight.data.zero_(),
            lambda: zm.parked(model).__enter__(),
        ]
        for look in looks:
            with pytest.raises(ModelError, match=r"inside zm\.parked"):
                look()
        assert other(rows).shape == (1, 40) and next(iter(other.parameters())).sum().isfinite()
        assert optimizer.state[weight]["exp_avg"].sum().isfinite()  # states are tensors of the host
    with torch.no_grad():
        assert torch.equal(model(rows), expected)
    model(rows).sum().backward()
    for host, message in (
        ("host=3", "step first, and drop the gradients"),
        ("node=1", "takes host=1, host=2 or host=3"),
    ):
        with pytest.raises(ModelError, match=message), zm.parked(model, optimizer, host):
            pass
