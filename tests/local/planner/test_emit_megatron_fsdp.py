"""The Megatron-FSDP module is run: against a stand-in that records, and against the package's own signatures.

The package itself needs CUDA from its constructor on (torch.cuda.current_device), so no step of it is run here.
docs/planning.md says what was seen of its steps.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeromesh.model.from_module import from_module
from zeromesh.planner.emit import emit_megatron_fsdp
from zeromesh.strategy import Plan, Strategy

STRATEGIES = ("node=0,cluster=0", "node=2,cluster=2", "node=3,cluster=3", "node=3,cluster=0", "node=3,cluster=1")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.synced: list[bool] = []
        self.helper = SimpleNamespace(gradient_scaling_factor=None)
        group = SimpleNamespace(
            main_grad_buffer=SimpleNamespace(gradient_scaling_factor=1 / 8), hfsdp_helper_gbuf=self.helper
        )
        self.param_and_grad_buffer = SimpleNamespace(parameter_groups=[group])

    def forward(self, ids: Tensor) -> Tensor:
        return self.module(ids)

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        self.synced.append(sync_model)


@pytest.fixture(autouse=True)
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())  # type: ignore[no-untyped-call]  # torch's
    yield
    dist.destroy_process_group()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What the emitted module hands to the stand-in, by function."""
    calls: dict[str, dict[str, Any]] = {}

    def fully_shard_model(**options: Any) -> Wrapped:
        calls["fully_shard_model"] = options
        return Wrapped(options["module"])

    def fully_shard_optimizer(**options: Any) -> Any:
        calls["fully_shard_optimizer"] = options
        return options["optimizer"]

    def policy(**options: Any) -> SimpleNamespace:
        calls["MixedPrecisionPolicy"] = options
        return SimpleNamespace(**options)

    package = ModuleType("megatron_fsdp")
    vars(package).update(
        fully_shard_model=fully_shard_model, fully_shard_optimizer=fully_shard_optimizer, MixedPrecisionPolicy=policy
    )
    monkeypatch.setitem(sys.modules, "megatron_fsdp", package)
    return calls


def emitted(strategy: str, **choices: Any) -> dict[str, Any]:
    plan = Plan(
        strategy=Strategy.parse(strategy),
        mesh=(("node", 4), ("cluster", 2)),
        micro_batches=2,
        **{"param_dtype": "bf16", "grad_dtype": "fp32", **choices},
    )
    namespace: dict[str, Any] = {}
    exec(compile(emit_megatron_fsdp(plan, from_module(Toy(), seq_len=31, name="toy")), "emitted", "exec"), namespace)
    return namespace


def sharded(namespace: dict[str, Any]) -> tuple[Any, Any]:
    return namespace["shard"](Toy(), lambda params: torch.optim.SGD(params, lr=0.1), namespace["make_mesh"]("cpu"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_are_those_of_the_strategy(strategy: str, calls: dict[str, dict[str, Any]]) -> None:
    sharded(emitted(strategy))
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


def test_the_dtypes_are_those_of_the_plan(calls: dict[str, dict[str, Any]]) -> None:
    sharded(emitted("node=3,cluster=3", reduce_dtype="fp32"))
    assert {p.dtype for p in calls["fully_shard_model"]["module"].parameters()} == {torch.bfloat16}
    assert calls["MixedPrecisionPolicy"] == {
        "main_params_dtype": torch.float32,
        "main_grads_dtype": torch.float32,
        "grad_comm_dtype": torch.float32,
    }


@pytest.mark.parametrize(("strategy", "factor"), [("node=3,cluster=1", 1 / 8), ("node=3,cluster=0", None)])
def test_gradients_are_averaged_where_the_package_sums(
    strategy: str, factor: float | None, calls: dict[str, dict[str, Any]]
) -> None:
    model, _ = sharded(emitted(strategy))
    assert model.helper.gradient_scaling_factor == factor


def test_a_step_synchronises_with_the_last_micro_batch(calls: dict[str, dict[str, Any]]) -> None:
    namespace = emitted("node=3,cluster=0")
    model, optimizer = sharded(namespace)
    before = model.module.head.weight.detach().clone()
    batches = [torch.arange(5).view(1, 5)] * 2
    namespace["train_step"](model, optimizer, batches, lambda m, ids: m(ids).float().square().sum())
    assert model.synced == [False, True]
    assert not torch.equal(model.module.head.weight, before)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_package_takes_the_arguments(strategy: str, calls: dict[str, dict[str, Any]]) -> None:
    stand_in = sys.modules.pop("megatron_fsdp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Transformer Engine and Apex are missing
        package = pytest.importorskip("megatron_fsdp", reason="megatron-fsdp is not installed")
    sys.modules["megatron_fsdp"] = stand_in
    sharded(emitted(strategy))
    for name, options in calls.items():
        inspect.signature(getattr(package, name)).bind(**options)
    inspect.signature(package.MegatronFSDP.set_model_auto_sync).bind(None, True)
