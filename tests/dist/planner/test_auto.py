"""`zm.shard(..., "auto")` plans for its own run: its options' dtypes, else the model's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeromesh as zm
from tests.dist.parity import mesh_of, net, tokens
from tests.dist.pool import kept, on_ranks
from zeromesh.api import with_dtypes
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.cluster.cluster import Cluster
from zeromesh.engine.api import engine_of
from zeromesh.errors import InputError, MeshError
from zeromesh.strategy import Strategy
from zeromesh.strategy.plan import Plan

WORKLOAD = {"seq_len": 8, "global_batch_tokens": 16, "micro_batch": 1}
CLUSTER = find_cluster("gloo-laptop")


def planned(model: nn.Module, workload: dict[str, Any], *, cluster: Cluster = CLUSTER, **options: Any) -> nn.Module:
    mesh = mesh_of(2)
    return zm.shard(model, mesh, "auto", cluster=cluster, workload=zm.Workload(**WORKLOAD | workload), **options)


@on_ranks(2)
def test_it_computes_in_the_models_own_dtypes_or_the_options():
    """A workload says bf16 if nobody says anything."""
    assert planned(net().float(), {}, param_dtype=torch.bfloat16)(tokens(0, 0, 0)).dtype is torch.bfloat16
    model = net().float()
    model.head.bfloat16()
    units = engine_of(planned(model, {})).schedule.units
    assert {buffer.param_dtype for unit in units for buffer in unit.buffers} == {"fp32", "bf16"}


@on_ranks(2)
def test_what_fits_depends_on_the_dtypes():
    """The smallest layout takes 20 MB in fp64 and 13 MB in bf16; 17 MB are usable."""
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


PLANNED = (
    ((("node", 2), ("cluster", 1)), "node=3,cluster=0"),  # of a part of the cluster
    ((("rack", 1), ("node", 2)), "rack=1,node=3"),
    ((("node", 2),), "node=3"),  # on a mesh with one more axis
)


@on_ranks(2)
def test_a_plan_runs_on_a_mesh_that_has_other_axes_of_one_rank():
    for planned_mesh, strategy in PLANNED:
        plan = Plan(strategy=Strategy.parse(strategy), mesh=planned_mesh, master_dtype="bf16")
        for shape, names, expected in (((2,), ("node",), "node=3"), ((1, 2), ("cell", "node"), "node=3,cell=0")):
            mesh = kept(init_device_mesh, "cpu", shape, mesh_dim_names=names)
            engine = engine_of(zm.shard(net().float(), mesh, plan))
            assert str(engine.schedule.layout.strategy) == expected
            assert engine.precision.master is torch.bfloat16


@on_ranks(2)
def test_a_plan_for_more_ranks_than_the_mesh_has_is_refused():
    mesh = mesh_of(2)
    for strategy, planned_mesh, message in (
        ("node=3,cluster=0", (("node", 2), ("cluster", 2)), "the mesh has no axis 'cluster'"),
        ("node=3", (("node", 8),), r"another mesh; this mesh has node=2 \(planned: 8\): plan for it"),
    ):
        with pytest.raises(MeshError, match=message):
            zm.shard(net(), mesh, Plan(strategy=Strategy.parse(strategy), mesh=planned_mesh))


def test_a_plan_is_made_for_what_a_model_has() -> None:
    workload, mesh = zm.Workload(**WORKLOAD), object()
    options: tuple[dict[str, Any], ...] = ({"units": ["Block"]}, {"resident": ["blocks.0"]}, {"bucket_bytes": 0})
    for option in options:
        with pytest.raises(InputError, match=f"does not take {next(iter(option))}: drop them, or name a strategy"):
            zm.shard(net(), mesh, "auto", cluster="gloo-laptop", workload=workload, **option)  # type: ignore[call-overload]
    with pytest.raises(InputError, match=r"trainable='lora:16' is for a model given by name"):
        zm.plan(net(), "gloo-laptop", workload, trainable="lora:16")
    with pytest.raises(InputError, match=r"grad_dtype must be one of fp64, .*; got 'int8'"):
        with_dtypes(workload, nn.Linear(4, 4), {"grad_dtype": torch.int8})


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
