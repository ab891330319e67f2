"""Emitted modules are run: FSDP2's on a toy model with torch's fake process group, Megatron-FSDP's against a stand-in
that records and against the package's own signatures.

Megatron-FSDP itself needs CUDA from its constructor on (torch.cuda.current_device), so no step of it is run here.
docs/planning.md reports on its steps.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeromesh.model.from_module import from_module
from zeromesh.model.spec import ModelSpec, Recomputation
from zeromesh.planner.emit import emit_fsdp2, emit_megatron_fsdp
from zeromesh.strategy import Strategy
from zeromesh.strategy.plan import Plan

Calls = dict[str, dict[str, Any]]


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


def emitted(emit: Callable[[Plan, ModelSpec], str], strategy: str, spec: ModelSpec, **choices: Any) -> dict[str, Any]:
    fields = {"param_dtype": "bf16", "grad_dtype": "fp32", "micro_batches": 2, **choices}
    plan = Plan(strategy=Strategy.parse(strategy), mesh=(("node", 4), ("cluster", 2)), **fields)
    namespace: dict[str, Any] = {}
    exec(compile(emit(plan, spec), "emitted", "exec"), namespace)
    return namespace


# FSDP2 ----------------------------------------------------------------------------------------------------------------


def sharded(strategy: str, spec: ModelSpec, recompute: Any = "none") -> tuple[Any, dict[str, Any]]:
    namespace = emitted(emit_fsdp2, strategy, spec, recompute=recompute)
    return namespace["shard"](Toy(), namespace["make_mesh"]("cpu")), namespace


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        ("node=3,cluster=3", (8,)),
        ("node=3,cluster=0", (2, 4)),
        ("node=3k,cluster=3k", (8,)),
        ("node=3,cluster=3k", (8,)),
        ("node=3d,cluster=0", (2, 4)),
    ],
)
def test_the_configuration_shards_as_the_strategy_says(strategy: str, shape: tuple[int, ...], spec: ModelSpec) -> None:
    model, namespace = sharded(strategy, spec)
    units = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    assert units == ["", "embedding", "layers.0", "layers.1", "layers.2", "head"]
    weight = model.layers[0].up.weight
    assert tuple(weight.device_mesh.shape) == shape
    assert weight.to_local().shape[0] == 32 // shape[-1]
    assert namespace["MICRO_BATCHES"] == 2
    if strategy == "node=3,cluster=3k":  # which reshards to the node
        post_forward = model.layers[0]._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info
        assert post_forward.shard_mesh_size == 4


OFFLOADED = [("host=3,node=3,cluster=3", Recomputation.NONE), ("host=3d,node=3d,cluster=3d", Recomputation.FULL)]


@pytest.mark.parametrize(("strategy", "recompute"), [*(("node=3,cluster=0", r) for r in Recomputation), *OFFLOADED])
def test_a_step_runs(strategy: str, recompute: Recomputation, spec: ModelSpec) -> None:
    model, namespace = sharded(strategy, spec, recompute.value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.zeros(1, 5, dtype=torch.int64)] * 2
    namespace["train_step"](model, optimizer, batches, lambda m, ids: m(ids).float().sum())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(list(model.layers.children())) == 3


# Megatron-FSDP --------------------------------------------------------------------------------------------------------

STRATEGIES = ("node=0,cluster=0", "node=2,cluster=2", "node=3,cluster=3", "node=3,cluster=0", "node=3,cluster=1")


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.synced: list[bool] = []
        self.helper = SimpleNamespace(gradient_scaling_factor=None)
        main = SimpleNamespace(gradient_scaling_factor=1 / 8)
        group = SimpleNamespace(main_grad_buffer=main, hfsdp_helper_gbuf=self.helper)
        self.param_and_grad_buffer = SimpleNamespace(parameter_groups=[group])

    def forward(self, ids: Tensor) -> Tensor:
        return self.module(ids)  # type: ignore[no-any-return]

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        self.synced.append(sync_model)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Arguments that the emitted module hands to the stand-in, by function."""
    calls: Calls = {}
    package = ModuleType("megatron_fsdp")

    def record(name: str, result: Callable[[dict[str, Any]], Any]) -> None:
        setattr(package, name, lambda **options: (calls.update({name: options}), result(options))[1])

    record("fully_shard_model", lambda options: Wrapped(options["module"]))
    record("fully_shard_optimizer", lambda options: options["optimizer"])
    record("MixedPrecisionPolicy", lambda options: SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, "megatron_fsdp", package)
    return calls


def megatron(strategy: str, spec: ModelSpec, **choices: Any) -> tuple[Any, Any, dict[str, Any]]:
    namespace = emitted(emit_megatron_fsdp, strategy, spec, **choices)
    made = namespace["shard"](Toy(), lambda params: torch.optim.SGD(params, lr=0.1), namespace["make_mesh"]("cpu"))
    return *made, namespace


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_are_those_of_the_strategy_and_the_package_takes_them(
    strategy: str, calls: Calls, spec: ModelSpec
) -> None:
    megatron(strategy, spec)
    options = calls["fully_shard_model"]
    mesh = options["device_mesh"]
    two = strategy in ("node=3,cluster=0", "node=3,cluster=1")
    assert mesh[options["dp_shard_dim"]].size() == (4 if two else 8)
    assert mesh[options["tp_dim"]].size() == 1  # without this dim the package raises
    assert ("dp_outer_dim" in options) == ("hybrid_fsdp_group" in options) == two
    if two:
        assert mesh[options["dp_outer_dim"]].size() == 2
        assert options["hybrid_fsdp_group"].size() == 8
    assert options["zero_dp_strategy"] == int(strategy[5])
    assert options["outer_dp_sharding_strategy"] == (1 if strategy == "node=3,cluster=1" else 0)
    assert options["fsdp_unit_modules"] == [Block]
    sys.modules.pop("megatron_fsdp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Transformer Engine and Apex are missing
        package = pytest.importorskip("megatron_fsdp", reason="megatron-fsdp is not installed")
    for name, handed in calls.items():
        inspect.signature(getattr(package, name)).bind(**handed)
    inspect.signature(package.MegatronFSDP.set_model_auto_sync).bind(None, True)


def test_the_dtypes_are_those_of_the_plan(calls: Calls, spec: ModelSpec) -> None:
    megatron("node=3,cluster=3", spec, reduce_dtype="fp32")
    assert {p.dtype for p in calls["fully_shard_model"]["module"].parameters()} == {torch.bfloat16}
    kinds = ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype")
    assert calls["MixedPrecisionPolicy"] == dict.fromkeys(kinds, torch.float32)


@pytest.mark.parametrize(("strategy", "factor"), [("node=3,cluster=1", 1 / 8), ("node=3,cluster=0", None)])
def test_a_step_averages_and_synchronises_with_the_last_micro_batch(
    strategy: str, factor: float | None, calls: Calls, spec: ModelSpec
) -> None:
    """Where the package sums, gradients are averaged."""
    model, optimizer, namespace = megatron(strategy, spec)
    assert model.helper.gradient_scaling_factor == factor
    before = model.module.head.weight.detach().clone()
    batches = [torch.arange(5).view(1, 5)] * 2
    namespace["train_step"](model, optimizer, batches, lambda m, ids: m(ids).float().square().sum())
    assert model.synced == [False, True]
    assert not torch.equal(model.module.head.weight, before)
