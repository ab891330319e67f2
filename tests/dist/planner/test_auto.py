"""`zm.shard(..., "auto")` plans for what it runs: its options' dtypes, else the model's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from tests.dist.features.parity import net, tokens
from tests.dist.pool import kept, on_ranks
from zeromesh.api import with_dtypes
from zeromesh.cluster import Cluster, find_cluster
from zeromesh.engine.api import engine_of
from zeromesh.errors import InputError, MeshError
from zeromesh.strategy import Plan, Strategy

WORKLOAD = {"seq_len": 8, "global_batch_tokens": 16, "micro_batch": 1}
CLUSTER = find_cluster("gloo-laptop")


def planned(model: nn.Module, workload: dict[str, Any], *, cluster: Cluster = CLUSTER, **options: Any) -> nn.Module:
    mesh = kept(init_device_mesh, "cpu", (2,), mesh_dim_names=("node",))
    return zm.shard(model, mesh, "auto", cluster=cluster, workload=zm.Workload(**WORKLOAD | workload), **options)


@on_ranks(2)
def test_it_computes_in_the_models_own_dtype_or_the_options():
    """A workload says bf16 if nobody says anything."""
    assert planned(net().float(), {})(tokens(0, 0, 0)).dtype is torch.float32
    assert planned(net().float(), {}, param_dtype=torch.bfloat16)(tokens(0, 0, 0)).dtype is torch.bfloat16


@on_ranks(2)
def test_parameters_of_several_dtypes_compute_in_their_own():
    model = net().float()
    model.head.bfloat16()
    units = engine_of(planned(model, {})).schedule.units
    assert {buffer.param_dtype for unit in units for buffer in unit.buffers} == {"fp32", "bf16"}


@on_ranks(2)
def test_what_fits_depends_on_the_dtypes():
    """Of the smallest layout 20 MB in fp64, 13 MB in bf16; 17 are usable."""
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=18.5e6))
    with pytest.raises(InputError, match=r"fits on 2 x cpu-thread under no strategy: .* with 0\.0 GB"):
        planned(net(dim=256).double(), {}, cluster=small)
    planned(net(dim=256).float(), {}, cluster=small, param_dtype=torch.bfloat16)


@on_ranks(2)
def test_other_dtypes_are_the_options_or_the_workloads():
    precision = engine_of(planned(net().float(), {"master_dtype": "bf16", "grad_dtype": "bf16"})).precision
    assert (precision.master, precision.grad, precision.reduce) == (torch.bfloat16, torch.bfloat16, None)
    precision = engine_of(planned(net().float(), {"master_dtype": "bf16"}, master_dtype=torch.float32)).precision
    assert (precision.master, precision.grad) == (torch.float32, torch.float32)


@on_ranks(2)
def test_a_plans_masters_are_the_engines():
    mesh = kept(init_device_mesh, "cpu", (2,), mesh_dim_names=("node",))
    plan = Plan(strategy=Strategy.parse("node=3"), mesh=(("node", 2),), master_dtype="bf16")
    assert engine_of(zm.shard(net().float(), mesh, plan)).precision.master is torch.bfloat16


@pytest.mark.parametrize(
    ("planned_mesh", "strategy"),
    [
        ((("node", 2), ("cluster", 1)), "node=3,cluster=0"),  # of a part of the cluster
        ((("rack", 1), ("node", 2)), "rack=1,node=3"),
        ((("node", 2),), "node=3"),  # on a mesh with one more axis
    ],
)
@on_ranks(2)
def test_a_plan_runs_on_a_mesh_that_has_other_axes_of_one_rank(planned_mesh, strategy):
    plan = Plan(strategy=Strategy.parse(strategy), mesh=planned_mesh)
    for shape, names, expected in (((2,), ("node",), "node=3"), ((1, 2), ("cell", "node"), "node=3,cell=0")):
        mesh = kept(init_device_mesh, "cpu", shape, mesh_dim_names=names)
        layout = engine_of(zm.shard(net().float(), mesh, plan)).schedule.layout
        assert str(layout.strategy) == expected


@on_ranks(2)
def test_a_plan_for_more_ranks_than_the_mesh_has_is_refused():
    mesh = kept(init_device_mesh, "cpu", (2,), mesh_dim_names=("node",))
    plan = Plan(strategy=Strategy.parse("node=3,cluster=0"), mesh=(("node", 2), ("cluster", 2)))
    with pytest.raises(MeshError, match="the mesh has no axis 'cluster'"):
        zm.shard(net(), mesh, plan)
    plan = Plan(strategy=Strategy.parse("node=3"), mesh=(("node", 8),))
    with pytest.raises(MeshError, match=r"another mesh than this one, which has node=2 \(planned: 8\): plan for it"):
        zm.shard(net(), mesh, plan)


@pytest.mark.parametrize("option", [{"units": ["Block"]}, {"resident": ["blocks.0"]}, {"bucket_bytes": 0}])
def test_a_plan_is_made_for_the_units_that_a_model_has(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(InputError, match=f"takes no {name}: name a strategy beside them"):
        mesh: Any = object()
        zm.shard(net(), mesh, "auto", cluster="gloo-laptop", workload=zm.Workload(**WORKLOAD), **option)


def test_what_a_module_trains_is_its_own_business() -> None:
    with pytest.raises(InputError, match=r"trainable='lora:16' is for a model given by name"):
        zm.plan(net(), "gloo-laptop", zm.Workload(**WORKLOAD), trainable="lora:16")


@pytest.mark.parametrize(
    ("dtype", "options", "names"),
    [
        (torch.float32, {}, ("fp32", None, "fp32", "bf16")),
        (torch.bfloat16, {"param_dtype": torch.float32}, ("fp32", None, "fp32", "bf16")),
        (torch.float32, {"reduce_dtype": torch.bfloat16, "debug": True}, ("fp32", "bf16", "fp32", "bf16")),
        (torch.bfloat16, {"master_dtype": torch.float32}, ("bf16", None, "fp32", "fp32")),
        (torch.float64, {}, ("fp64", None, "fp64", "fp64")),
    ],
)
def test_the_plan_is_made_for_these_dtypes(dtype: torch.dtype, options: dict[str, Any], names: tuple[str, ...]) -> None:
    found = with_dtypes(zm.Workload(**WORKLOAD, master_dtype="bf16"), nn.Linear(4, 4, dtype=dtype), options)
    assert (found.param_dtype, found.reduce_dtype, found.grad_dtype, found.master_dtype) == names


def test_a_dtype_that_cannot_be_trained_in_is_refused_before_planning() -> None:
    with pytest.raises(InputError, match=r"grad_dtype must be one of fp64, .*; got 'int8'"):
        with_dtypes(zm.Workload(**WORKLOAD), nn.Linear(4, 4), {"grad_dtype": torch.int8})
