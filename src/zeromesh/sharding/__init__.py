"""`zm.shard`; and, in `value`, its arguments as one value, which integrations with training libraries take.

The engine runs any strategy and never asks the planner. This package is above both, and asks it for "auto".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from zeromesh.errors import InputError
from zeromesh.options import Options
from zeromesh.schedule.unit import BUCKET_BYTES

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from zeromesh.cluster.cluster import Cluster
    from zeromesh.modules import UnitClasses
    from zeromesh.planner.workload import Workload
    from zeromesh.strategy import Strategy
    from zeromesh.strategy.parts import Parts
    from zeromesh.strategy.plan import Plan

ModelT = TypeVar("ModelT", bound="nn.Module")


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

    Then make any elementwise torch optimizer from ``model.parameters()`` and train as usual. Rank 0's values win; other
    ranks may hold any values, also on the meta device.

    Args:
        model: any module. Its parameters are freed as they are sharded.
        mesh: torch's mesh with named dimensions, outermost first. Its device receives the shards. None for a single
            process, whose model stays on its device.
        strategy: ``"node=3,cluster=1"`` (innermost axis first), a preset's name, a plan, or "auto", the planner's
            choice for this mesh. A plan's dtypes apply unless given here.
        param_dtype: dtype of compute, and of parameters on the wire. Default: each parameter's own.
        reduce_dtype: dtype of gradients on the wire. Default: `param_dtype`.
        grad_dtype: dtype of the accumulated gradient shard. Default: fp32 (fp64 for fp64 parameters).
        master_dtype: dtype of the optimizer's copy. Default: fp32 (fp64 for fp64 parameters).
        units: classes, or their names, of modules that are gathered together. Default: the model's repeated blocks, its
            input embedding and its output head. All other parameters belong to the root unit.
        resident: names of units that get their own gather slot.
        init: function that initialises the parameters and buffers of one module in place, for models on the meta
            device. Default: Hugging Face's `_init_weights`, else the module's `reset_parameters`.
        bucket_bytes: without sharded parameters, neighbouring units are joined up to this many bytes of compute
            parameters and reduced together; 0 joins none.
        debug: compare each unit's parameters before and after every use; slow, for bug reports. Default: True if the
            environment variable ZEROMESH_DEBUG is set and not 0.
        register: allocate gather and reduce slots in memory that the device's backend sends without staging, if it has
            such memory. Default: True if ZEROMESH_REGISTER is set and not 0.
        parts: modules with their own strategy, and their own axes if needed, by a pattern of qualified names or by
            class: ``{"*.experts": zm.Part(mesh=mesh["expert"], strategy="expert=3")}``. The notation can also express
            parts on the model's mesh.
        cluster: with "auto": the description of the mesh's devices and links. Its levels are the mesh's axes, by name
            and size.
        workload: with "auto": sequence length, batch, micro-batch, and dtypes without an option here. The compute dtype
            is `param_dtype`, else the model's own, never the workload's. Recomputation is the model's setting.

    Returns:
        `model` itself.

    Raises:
        InputError: "auto" without cluster and workload, or either of them without "auto".
        NotationError, MeshError: the strategy does not parse or does not fit the mesh, or the mesh not the cluster.
        ModelError: a unit's class is not in the model, a parameter is in two parts, or the model is already sharded.
        MismatchError: the ranks have different strategies, meshes or models, or one of the errors above was raised on
            another rank.

    Examples:
        >>> import torch, zeromesh as zm
        >>> model = zm.shard(torch.nn.Linear(4, 4), None, "node=3")
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    options = Options(
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
    return shard_with(model, mesh, strategy, options, cluster, workload)


def shard_with(
    model: ModelT,
    mesh: DeviceMesh | None,
    strategy: str | Strategy | Plan,
    options: Options,
    cluster: Cluster | str | None,
    workload: Workload | None,
) -> ModelT:
    """`shard` with its options as one value."""
    from zeromesh.engine import api  # imports torch, which a Sharding alone does not need

    require_plannable(strategy, mesh=mesh, cluster=cluster, workload=workload)
    if strategy != "auto":
        return api.shard(model, mesh, strategy, options)
    from zeromesh.api import auto_strategy, with_dtypes  # the planner, which nothing else here needs
    from zeromesh.engine.build import make_control

    assert mesh is not None and cluster is not None and workload is not None  # required above
    own = [name for name in _UNPLANNED if getattr(options, name) not in (None, (), [], {}, BUCKET_BYTES)]
    if own:
        raise InputError(
            f'strategy "auto" plans for the default units, so it does not take {" or ".join(own)}: drop them, or name '
            f"a strategy"
        )
    devices, described, asked = mesh, cluster, workload  # not None, also inside the lambda
    planned = make_control(mesh).together(
        lambda: auto_strategy(model, devices, described, with_dtypes(asked, model, options.dtypes))
    )
    # Planned for one dtype; without the option each parameter computes in its own.
    return api.shard(model, mesh, replace(planned, param_dtype=None), options)


_UNPLANNED = ("parts", "units", "resident", "bucket_bytes")
"""Options that the planner knows nothing of."""


def require_plannable(strategy: object, *, mesh: object, cluster: object, workload: object) -> None:
    """Raises InputError for "auto" without mesh, cluster or workload, and for cluster or workload without "auto"."""
    if strategy == "auto" and (cluster is None or workload is None or mesh is None):
        raise InputError('strategy "auto" needs a mesh, cluster=... and workload=zm.Workload(...)')
    if strategy != "auto" and (cluster is not None or workload is not None):
        raise InputError(f'cluster and workload only apply to strategy "auto"; got strategy {str(strategy)!r}')
