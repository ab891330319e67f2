"""FSDP2, which nobody here wrote, on the same device through the same checker: the device is faithful to it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.simdev.ranks import alone
from zeromesh import simdev


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@alone()
def test_it_races_nowhere_and_the_host_reads_nothing():
    """It frees gradients early: memory of its reduction's stream, freed once the optimizer, on another, has
    read them. Before that stream uses it again it waits for the other, which a check at the release cannot know."""
    simdev.counting_group(0, 4)
    mesh = init_device_mesh("simdev", (2, 2), mesh_dim_names=("cluster", "node"))
    model = Net().to("simdev")
    with simdev.Checker() as checker:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        for _ in range(3):
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                model(torch.ones(2, 8, device="simdev")).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert checker.checked > 1000
    assert checker.races == [], [*map(str, checker.races)][:4]
    assert checker.host_reads == []
    operations = {early.earlier_operation for early in checker.early_frees}
    assert operations <= {"aten::_foreach_mul_", "aten::_foreach_addcmul_", "all_reduce"}, operations
