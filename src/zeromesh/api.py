"""The calls that plan: `zm.plan`, `zm.simulate`, and the plan that `zm.shard` makes for the strategy "auto"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zeromesh.errors import InputError, MeshError
from zeromesh.planner.evaluate import Choice
from zeromesh.planner.fixed import simulate_choices
from zeromesh.planner.plan import Planned
from zeromesh.planner.plan import plan as search_plan
from zeromesh.planner.workload import Workload
from zeromesh.strategy import Strategy
from zeromesh.strategy.plan import Plan

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from zeromesh.cluster.cluster import Cluster
    from zeromesh.model.spec import ModelSpec


def plan(
    model: nn.Module | str, cluster: Cluster | str, workload: Workload, *, world: int = 0, trainable: str = "all"
) -> Plan:
    """Finds the layout of `model` on `cluster` to run: the simplest that fits and is nearly as fast as the fastest.

    `zeromesh plan` prints the same with its default options, if `workload.param_dtype` is the device's matrix dtype, as
    in the command.

    Args:
        model: a module (neither read nor changed: it is run on fake tensors), or a value of `--model`.
        cluster: a description, a preset's name, or a TOML file.
        workload: sequence length and batch. Micro-batch and recomputation are searched unless given.
        world: number of devices, filling inner levels first; 0 for all.
        trainable: for a model given by name: all, a fraction, or lora:RANK.

    Returns:
        A strategy for `zm.shard`, with the choices that belong to it and the predicted figures.

    Raises:
        InputError: nothing fits, or the batch does not divide; the message names values that would.
        ClusterError, ModelError: the cluster or model does not exist, or cannot be read.
    """
    return _search(model, cluster, workload, world, trainable).plan


def simulate(
    model: nn.Module | str,
    cluster: Cluster | str,
    workload: Workload,
    strategy: str,
    *,
    world: int = 0,
    trainable: str = "all",
    engine: str = "zeromesh",
) -> Choice:
    """Simulates one step of `strategy`; `zeromesh simulate` prints the same.

    Args:
        strategy: in the notation, or a preset's name.
        engine: engine whose step is predicted: zeromesh, fsdp, deepspeed or amsp.
        model, cluster, workload, world, trainable: as in `plan`.

    Returns:
        The chosen micro-batch and recomputation, with their simulation: `.simulation.trace` is the timeline,
        `.to_json()` the figures.
    """
    spec, hardware = _load(model, cluster, workload, world, trainable)
    parsed = Strategy.parse(strategy, [name for name, _ in hardware.axes])
    return simulate_choices(spec, hardware, workload, parsed, engine=engine, trace=True)[0]


def with_dtypes(workload: Workload, model: nn.Module, options: Mapping[str, Any]) -> Workload:
    """`workload` in the dtypes that `shard` takes. Options come first, then the model's dtype, and the workload's for
    everything but parameters."""
    from zeromesh.engine.api import precision_of
    from zeromesh.modules import DTYPE_NAMES, DTYPES

    sizes: Counter[Any] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    own = next((dtype for dtype, _ in sizes.most_common() if dtype in DTYPE_NAMES), DTYPES["fp32"])
    precision = replace(precision_of(options, workload), param=precision_of(options, None).param)
    buffer = precision.buffer(1, own, trainable=True)
    assert buffer.master_dtype is not None  # it is trained
    return replace(
        workload,
        param_dtype=buffer.param_dtype,
        reduce_dtype=buffer.reduce_dtype if precision.reduce else None,
        grad_dtype=buffer.grad_dtype,
        master_dtype=buffer.master_dtype,
    )


def auto_strategy(model: nn.Module, mesh: DeviceMesh, cluster: Cluster | str, workload: Workload) -> Plan:
    """The plan for `model` on `mesh`, whose axes must be the cluster's levels."""
    from zeromesh.engine.build import mesh_axes
    from zeromesh.model.module_units import recomputes
    from zeromesh.model.spec import Recomputation

    axes = mesh_axes(mesh, ())
    if workload.recomputation is None:
        workload = replace(workload, recomputation=Recomputation.FULL if recomputes(model) else Recomputation.NONE)
    planned = _search(model, cluster, workload, mesh.size(), "all")
    levels = tuple((name, size) for name, size in planned.cluster.axes if size > 1)
    if levels != tuple((name, size) for name, size in axes if size > 1):
        raise MeshError(
            f"the mesh must have the cluster's levels as axes, innermost first {_text(levels)} for {mesh.size()} "
            f"devices of {planned.cluster.name}; this mesh has {_text(axes)}"
        )
    return planned.plan


def _search(model: Any, cluster: Cluster | str, workload: Workload, world: int, trainable: str) -> Planned:
    spec, hardware = _load(model, cluster, workload, world, trainable)
    return search_plan(spec, hardware, workload)


def _load(
    model: Any, cluster: Cluster | str, workload: Workload, world: int, trainable: str
) -> tuple[ModelSpec, Cluster]:
    from zeromesh.model.load import load_model

    if isinstance(cluster, str):
        from zeromesh.cluster.catalogue import find_cluster

        cluster = find_cluster(cluster)
    hardware = cluster.take(world) if world else cluster
    if isinstance(model, str):
        return load_model(model, seq_len=workload.seq_len, trainable=trainable, dtype=workload.param_dtype), hardware
    if trainable != "all":
        raise InputError(
            f"trainable={trainable!r} is for a model given by name: a module says itself what is trained "
            f"(requires_grad)"
        )
    from zeromesh.model.from_module import from_module  # imports torch

    return from_module(model, seq_len=workload.seq_len, dtype=workload.param_dtype), hardware


def _text(axes: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes)
