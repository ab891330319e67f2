"""The calls that plan: `zm.plan`, `zm.simulate`, and `zm.shard` with a strategy of "auto".

The engine runs whatever strategy it is given and never asks the planner; here, above both, one call does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from zeromesh.errors import InputError, MeshError
from zeromesh.planner import Choice, Planned, Workload, simulate_strategy
from zeromesh.planner import plan as search_plan
from zeromesh.strategy import Plan, Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from zeromesh.cluster import Cluster
    from zeromesh.model import ModelSpec

ModelT = TypeVar("ModelT", bound="nn.Module")


def plan(
    model: nn.Module | str, cluster: Cluster | str, workload: Workload, *, world: int = 0, trainable: str = "all"
) -> Plan:
    """The fastest layout of `model` on `cluster` that fits in memory; `zeromesh plan` prints the same.

    Args:
        model: a module (neither read nor changed: it is run on fake tensors), or what `--model` takes.
        cluster: a description, a preset's name, or a TOML file.
        workload: sequence length and batch; micro-batch and recomputation are searched where they are open.
        world: devices to use, inner levels filled first; 0 for all.
        trainable: of a model given by name: all, a fraction, or lora:RANK.

    Raises:
        InputError: nothing fits, or the batch does not divide; says what would.
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
    """One simulated step of `strategy`; `zeromesh simulate` prints the same.

    Args:
        strategy: in the notation, or a preset's name.
        engine: whose mechanics: zeromesh, fsdp, deepspeed or amsp.
        model, cluster, workload, world, trainable: as `plan` takes them.

    Returns:
        The choice of what was left open, with its simulation: `.simulation.trace` is the timeline, `.to_json()` the
        figures.
    """
    spec, hardware = _load(model, cluster, workload, world, trainable)
    parsed = Strategy.parse(strategy, [name for name, _ in hardware.axes])
    return simulate_strategy(spec, hardware, workload, parsed, engine=engine, trace=True)


def shard(
    model: ModelT,
    mesh: DeviceMesh | None,
    strategy: str | Strategy | Plan,
    *,
    cluster: Cluster | str | None = None,
    workload: Workload | None = None,
    **options: Any,
) -> ModelT:
    """`zeromesh.engine.api.shard`, which see, and a strategy of "auto": the planner's choice for this mesh.

    Args:
        model, mesh, strategy: as there.
        cluster: with "auto": what the mesh's devices and links are. Its levels are the mesh's axes, by name and size.
        workload: with "auto": sequence length, batch and micro-batch, and dtypes for which there is no option. What is
            computed in is the option `param_dtype`, else the model's own dtype, and never the workload's. Recomputation
            is what the model is set to.
        options: dtypes, units, init, as there; the plan is made for them.

    Raises:
        InputError: "auto" without cluster and workload, or either of them without "auto".
    """
    # They import torch: `zm.plan` of a model by name must not.
    from zeromesh.engine import api
    from zeromesh.engine.build import make_control

    if strategy != "auto":
        if cluster is not None or workload is not None:
            raise InputError(f'cluster and workload are for the strategy "auto"; the strategy is {str(strategy)!r}')
        return api.shard(model, mesh, strategy, **options)
    if cluster is None or workload is None or mesh is None:
        raise InputError('strategy "auto" needs a mesh, cluster=... and workload=zm.Workload(...) to choose by')
    devices, described, asked = mesh, cluster, workload  # not None from here on
    chosen = make_control(mesh).together(
        lambda: auto_strategy(model, devices, described, with_dtypes(asked, model, options))
    )
    # Planned for one dtype; without the option each parameter computes in its own.
    return api.shard(model, mesh, replace(chosen, param_dtype=None), **options)


def with_dtypes(workload: Workload, model: nn.Module, options: Mapping[str, Any]) -> Workload:
    """`workload` in the dtypes that `shard` takes: the options', else the model's own and the workload's others."""
    from zeromesh.engine.api import precision_of
    from zeromesh.engine.units import DTYPE_NAMES, DTYPES

    sizes: Counter[Any] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    own = next((dtype for dtype, _ in sizes.most_common() if dtype in DTYPE_NAMES), DTYPES["fp32"])
    precision = replace(precision_of(options, workload), param=options.get("param_dtype"))
    buffer = precision.buffer(own, 1, trainable=True)
    assert buffer.master_dtype is not None  # it is trained
    return replace(
        workload,
        param_dtype=buffer.param_dtype,
        reduce_dtype=buffer.reduce_dtype if precision.reduce else None,
        grad_dtype=buffer.grad_dtype,
        master_dtype=buffer.master_dtype,
    )


def auto_strategy(model: nn.Module, mesh: DeviceMesh, cluster: Cluster | str, workload: Workload) -> Plan:
    """The planner's choice for `model` on `mesh`, whose axes must be the cluster's levels."""
    from zeromesh.engine.build import mesh_axes
    from zeromesh.model import Recomputation

    axes = mesh_axes(mesh, ())
    if workload.recomputation is None:
        recomputes = getattr(model, "is_gradient_checkpointing", False)
        workload = replace(workload, recomputation=Recomputation.FULL if recomputes else Recomputation.NONE)
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
    from zeromesh.cluster import find_cluster
    from zeromesh.model import load_model

    hardware = find_cluster(cluster) if isinstance(cluster, str) else cluster
    hardware = hardware.take(world) if world else hardware
    if isinstance(model, str):
        return load_model(model, seq_len=workload.seq_len, trainable=trainable, dtype=workload.param_dtype), hardware
    from zeromesh.model.from_module import from_module  # imports torch

    return from_module(model, seq_len=workload.seq_len, dtype=workload.param_dtype), hardware


def _text(axes: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes)
