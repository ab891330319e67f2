"""The FSDP2 configuration is run: on a toy model, with torch's fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeromesh.model import ModelSpec, Recomputation
from zeromesh.model.from_module import from_module
from zeromesh.planner.emit import emit_fsdp2
from zeromesh.strategy import Plan, Strategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())  # type: ignore[no-untyped-call]  # torch's
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return from_module(Toy(), seq_len=31, name="toy")


def sharded(strategy: str, spec: ModelSpec, recompute: Any = "none") -> tuple[Any, dict[str, Any]]:
    plan = Plan(
        strategy=Strategy.parse(strategy),
        mesh=(("node", 4), ("cluster", 2)),
        micro_batches=2,
        recompute=recompute,
        param_dtype="bf16",
    )
    namespace: dict[str, Any] = {}
    exec(compile(emit_fsdp2(plan, spec), "emitted", "exec"), namespace)
    model = namespace["shard"](Toy(), namespace["make_mesh"]("cpu"))
    return model, namespace


@pytest.mark.parametrize(
    ("strategy", "shape", "local"),
    [
        ("node=3,cluster=3", (8,), 8),
        ("node=3,cluster=0", (2, 4), 4),
        ("node=3k,cluster=3k", (8,), 8),
        ("node=3,cluster=3k", (8,), 8),
        ("node=3d,cluster=3d", (8,), 8),
        ("node=3d,cluster=0", (2, 4), 4),
    ],
)
def test_the_configuration_shards_as_the_strategy_says(
    strategy: str, shape: tuple[int, ...], local: int, spec: ModelSpec
) -> None:
    model, namespace = sharded(strategy, spec)
    units = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    assert units == ["", "embedding", "layers.0", "layers.1", "layers.2", "head"]
    weight = model.layers[0].up.weight
    assert tuple(weight.device_mesh.shape) == shape
    assert weight.to_local().shape[0] == 32 // local
    assert namespace["MICRO_BATCHES"] == 2


def test_keeping_a_part_reshards_to_the_node(spec: ModelSpec) -> None:
    model, _ = sharded("node=3,cluster=3k", spec)
    post_forward = model.layers[0]._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info
    assert post_forward.shard_mesh_size == 4


@pytest.mark.parametrize("recompute", list(Recomputation))
def test_a_step_runs(recompute: Recomputation, spec: ModelSpec) -> None:
    model, namespace = sharded("node=3,cluster=0", spec, recompute.value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.zeros(1, 5, dtype=torch.int64)] * 2
    namespace["train_step"](model, optimizer, batches, lambda m, ids: m(ids).float().sum())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(list(model.layers.children())) == 3
