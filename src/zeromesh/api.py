"""The calls that plan: `zm.plan`, `zm.simulate`, and `zm.shard` with a strategy of "auto".

The engine runs whatever strategy it is given and never asks the planner; here, above both, one call does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from zeromesh.errors import InputError, MeshError
from zeromesh.planner import Choice, Planned, Workload, simulate_strategy
from zeromesh.planner import plan as search_plan
from zeromesh.schedule import BUCKET_BYTES
from zeromesh.strategy import Plan, Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from zeromesh.cluster import Cluster
    from zeromesh.engine.parts import Parts
    from zeromesh.engine.units import UnitClasses
    from zeromesh.model import ModelSpec

ModelT = TypeVar("ModelT", bound="nn.Module")


def plan(
    model: nn.Module | str, cluster: Cluster | str, workload: Workload, *, world: int = 0, trainable: str = "all"
) -> Plan:
    """The fastest layout of `model` on `cluster` that fits in memory.

    `zeromesh plan` prints the same in its default options, where `workload.param_dtype` is what the device multiplies
    matrices in, as the command has it.

    Args:
        model: a module (neither read nor changed: it is run on fake tensors), or what `--model` takes.
        cluster: a description, a preset's name, or a TOML file.
        workload: sequence length and batch; micro-batch and recomputation are searched where they are open.
        world: devices to use, inner levels filled first; 0 for all.
        trainable: of a model given by name: all, a fraction, or lora:RANK.

    Returns:
        What `zm.shard` takes as its strategy, with the choices that belong to it and the predicted figures.

    Raises:
        InputError: nothing fits, or the batch does not divide; says what would.
        ClusterError, ModelError: there is no such cluster or model, or it cannot be read.
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
    param_dtype: torch.dtype | str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
    grad_dtype: torch.dtype | str | None = None,
    master_dtype: torch.dtype | str | None = None,
    units: UnitClasses | None = None,
    resident: Sequence[str] = (),
    init: Callable[[nn.Module], None] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    debug: bool | None = None,
    register: bool | None = None,
    parts: Parts | None = None,
    cluster: Cluster | str | None = None,
    workload: Workload | None = None,
) -> ModelT:
    """Shards `model` in place over `mesh`, each axis with the ZeRO stage that `strategy` gives it.

    Afterwards make any elementwise torch optimizer from ``model.parameters()`` and train as usual. Values are the first
    rank's; other ranks may hold anything, the meta device included.

    Args:
        model: any module; its parameters are freed as they are sharded.
        mesh: torch's mesh with named dimensions, outermost first, whose device receives the shards; None on a single
            process, which keeps the model's.
        strategy: ``"node=3,cluster=1"`` (innermost axis first), a preset's name, a plan of the planner's, whose dtypes
            count where none is given here, or "auto": the planner's choice for this mesh.
        param_dtype: of compute, and of parameters on the wire. Default: each parameter's own.
        reduce_dtype: of gradients on the wire. Default: `param_dtype`.
        grad_dtype: of the accumulated gradient shard. Default: fp32 (fp64 for fp64 parameters).
        master_dtype: of the optimizer's copy. Default: fp32 (fp64 for fp64 parameters).
        units: classes, or their names, of the modules that are gathered as one. Default: the model's repeated blocks,
            its input embedding and its output head; where classes are given, the rest belongs to the model itself.
        resident: names of units that are to have a gather slot of their own.
        init: initialises the parameters and buffers of one module in place; for models on the meta device. Default:
            Hugging Face's `_init_weights`, else the module's `reset_parameters`.
        bucket_bytes: where no parameters are sharded, neighbouring units are joined until their parameters, as they
            compute, take this many bytes, and reduced as one; 0 joins none.
        debug: compare what each unit computes with before and after every use; slow, for bug reports. Default: whether
            the environment variable ZEROMESH_DEBUG is set and not 0.
        register: take gather and reduce slots from memory that the device's backend sends from without staging, where
            it has such memory. Default: whether ZEROMESH_REGISTER is set and not 0.
        parts: modules that have a strategy of their own, on axes of their own if need be, by a pattern of their
            qualified names or by their class: ``{"*.experts": zm.Part(mesh=mesh["expert"], strategy="expert=3")}``. The
            notation says the same of parts on the model's mesh.
        cluster: with "auto": what the mesh's devices and links are. Its levels are the mesh's axes, by name and size.
        workload: with "auto": sequence length, batch and micro-batch, and dtypes for which there is no option. What is
            computed in is `param_dtype`, else the model's own dtype, and never the workload's. Recomputation is what
            the model is set to.

    Returns:
        `model` itself.

    Raises:
        InputError: "auto" without cluster and workload, or either of them without "auto".
        NotationError, MeshError: the strategy does not parse or does not fit the mesh, or the mesh not the cluster.
        ModelError: a unit's class is not in the model, a parameter in two parts, or the model is sharded already.
        MismatchError: the ranks have different strategies, meshes or models, or one of the errors above was raised on
            another rank.

    Examples:
        >>> import torch, zeromesh as zm
        >>> model = zm.shard(torch.nn.Linear(4, 4), None, "node=3")
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    # They import torch: `zm.plan` of a model by name must not.
    from zeromesh.engine import api
    from zeromesh.engine.build import make_control

    dtypes = {
        "param_dtype": param_dtype,
        "reduce_dtype": reduce_dtype,
        "grad_dtype": grad_dtype,
        "master_dtype": master_dtype,
    }
    chosen: str | Strategy | Plan = strategy
    require_plannable(strategy, mesh=mesh, cluster=cluster, workload=workload)
    if strategy == "auto":
        assert mesh is not None and cluster is not None and workload is not None  # required above
        own = {
            "parts": bool(parts),
            "units": units is not None,
            "resident": bool(resident),
            "bucket_bytes": bucket_bytes != BUCKET_BYTES,
        }
        if any(own.values()):
            raise InputError(
                f'strategy "auto" plans for the units that the model is cut into by itself, so it takes no '
                f"{' and no '.join(name for name, given in own.items() if given)}: name a strategy beside them"
            )
        devices, described, asked = mesh, cluster, workload  # not None, also inside the lambda
        planned = make_control(mesh).together(
            lambda: auto_strategy(model, devices, described, with_dtypes(asked, model, dtypes))
        )
        # Planned for one dtype; without the option each parameter computes in its own.
        chosen = replace(planned, param_dtype=None)
    return api.shard(
        model,
        mesh,
        chosen,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        grad_dtype=grad_dtype,
        master_dtype=master_dtype,
        units=units,
        resident=resident,
        init=init,
        bucket_bytes=bucket_bytes,
        debug=debug,
        register=register,
        parts=parts,
    )


def require_plannable(strategy: object, *, mesh: object, cluster: object, workload: object) -> None:
    """Raises InputError for "auto" without what it plans by, and for that without "auto"."""
    if strategy == "auto" and (cluster is None or workload is None or mesh is None):
        raise InputError('strategy "auto" needs a mesh, cluster=... and workload=zm.Workload(...) to choose by')
    if strategy != "auto" and (cluster is not None or workload is not None):
        raise InputError(f'cluster and workload are for the strategy "auto"; the strategy is {str(strategy)!r}')


def with_dtypes(workload: Workload, model: nn.Module, options: Mapping[str, Any]) -> Workload:
    """`workload` in the dtypes that `shard` takes: the options', else the model's own and the workload's others."""
    from zeromesh.engine.api import precision_of
    from zeromesh.model.module_units import DTYPE_NAMES, DTYPES

    sizes: Counter[Any] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    own = next((dtype for dtype, _ in sizes.most_common() if dtype in DTYPE_NAMES), DTYPES["fp32"])
    precision = replace(precision_of(options, workload), param=precision_of(options, None).param)
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
    from zeromesh.model.module_units import recomputes

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
    from zeromesh.cluster import find_cluster
    from zeromesh.model import load_model

    hardware = find_cluster(cluster) if isinstance(cluster, str) else cluster
    hardware = hardware.take(world) if world else hardware
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
