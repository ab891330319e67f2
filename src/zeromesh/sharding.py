"""`zm.shard`, and its arguments as one value, which integrations with training libraries take.

The engine runs whatever strategy it is given and never asks the planner; here, above both, one call does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from zeromesh.errors import InputError, MeshError, short_repr
from zeromesh.options import Options
from zeromesh.schedule import BUCKET_BYTES
from zeromesh.strategy import Layout, Plan, Strategy, layouts_of, part_name
from zeromesh.strategy.parts import with_given
from zeromesh.strategy.plan import DTYPE_FIELDS, dtype_name

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from zeromesh.cluster import Cluster
    from zeromesh.modules import UnitClasses
    from zeromesh.planner import Workload
    from zeromesh.strategy.parts import Parts

ModelT = TypeVar("ModelT", bound="nn.Module")

Sizes = tuple[tuple[str, int], ...]


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
    return _shard(model, mesh, strategy, options, cluster, workload)


def _shard(
    model: ModelT,
    mesh: DeviceMesh | None,
    strategy: str | Strategy | Plan,
    options: Options,
    cluster: Cluster | str | None,
    workload: Workload | None,
) -> ModelT:
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
    """Raises InputError for "auto" without what it plans by, and for that without "auto"."""
    if strategy == "auto" and (cluster is None or workload is None or mesh is None):
        raise InputError('strategy "auto" needs a mesh, cluster=... and workload=zm.Workload(...)')
    if strategy != "auto" and (cluster is not None or workload is not None):
        raise InputError(f'cluster and workload only apply to strategy "auto"; got strategy {str(strategy)!r}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding(Options):
    """A strategy, a mesh and the options of `zm.shard` as one value, for code that makes the model later.

    Making it sends nothing and does not import torch. Wrong input raises at once.

    Args:
        strategy: as in `zm.shard`; "auto" plans for `cluster` and `workload`.
        mesh: sizes by name, outermost first (``{"cluster": 2, "node": 8}``), from which torch's mesh of all ranks is
            made; or torch's own mesh; None for a single process.
        param_dtype, reduce_dtype, grad_dtype, master_dtype, units, resident, init, bucket_bytes, register, debug,
            parts, cluster, workload: as in `zm.shard`.

    Raises:
        InputError: "auto" without mesh, cluster or workload, or cluster or workload without "auto"; or a dtype that no
            model computes in.
        NotationError, MeshError: the strategy does not parse, or does not fit the sizes.

    Examples:
        >>> import zeromesh as zm
        >>> zm.Sharding(strategy="node=3,cluster=1", mesh={"cluster": 2, "node": 8}).mesh
        (('cluster', 2), ('node', 8))
    """

    strategy: str | Strategy | Plan
    mesh: Mapping[str, int] | Sizes | DeviceMesh | None = None
    cluster: Cluster | str | None = None
    workload: Workload | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if isinstance(self.mesh, Mapping):
            object.__setattr__(self, "mesh", tuple(self.mesh.items()))
        object.__setattr__(self, "resident", tuple(self.resident))
        if isinstance(self.mesh, tuple):
            _require_sizes(self.mesh)
        for name in DTYPE_FIELDS:
            object.__setattr__(self, name, dtype_name(getattr(self, name), name))
        require_plannable(self.strategy, mesh=self.mesh, cluster=self.cluster, workload=self.workload)
        if self.strategy == "auto" or not isinstance(self.strategy, str | Strategy):
            return
        if not isinstance(self.mesh, tuple):
            if "=" in str(self.strategy):  # a preset says nothing without axes
                Strategy.parse(self.strategy)
        else:
            strategy = Strategy.parse(self.strategy, [name for name, _ in self.mesh[::-1]])
            for layout in _layouts_of(strategy, self.parts or {}, self.mesh[::-1]):
                layout.require_runnable()
            object.__setattr__(self, "strategy", strategy)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """The sharding of a plan (`zeromesh plan -o`), or of a configuration of another library (`zeromesh import`).

        Args:
            path: of the file.
            options: of `Sharding`, in place of the file's own. A file that does not say how many ranks there are needs
                a mesh.

        Raises:
            InputError: the file cannot be read, or says no sizes, or cuts the model beside data.
            MeshError: it shards over a group of ranks that is none of the mesh's.
        """
        from zeromesh.planner.foreign import sharding_options

        return cls(**sharding_options(Path(path), options.pop("mesh", None)) | options)

    def on(self, device_type: str) -> Sharding:
        """With torch's own mesh of all ranks of the job, which call this together; its groups are made here.

        Args:
            device_type: of the mesh, where only its sizes were given: "cpu", "cuda", ...

        Raises:
            MeshError: the mesh has another number of ranks than the job.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.require_ranks(dist.get_world_size() if dist.is_initialized() else 1)
        if not isinstance(self.mesh, tuple):
            return self
        if not dist.is_initialized():  # one process; the strategy then names the axes
            return replace(self, mesh=None)
        names, counts = zip(*self.mesh, strict=True)
        return replace(self, mesh=init_device_mesh(device_type, counts, mesh_dim_names=names))

    def require_ranks(self, world: int) -> None:
        """Raises MeshError unless the mesh has all of `world` ranks."""
        if self.mesh is None:
            if world > 1:
                raise MeshError(
                    f"the job has {world} ranks and Sharding(strategy={str(self.strategy)!r}) no mesh: give sizes by "
                    f"name, outermost first, whose product is {world}, such as mesh={{'node': {world}}}"
                )
            return
        sizes = self.mesh if isinstance(self.mesh, tuple) else None
        size = prod(count for _, count in sizes) if sizes else self.mesh.size()  # type: ignore[union-attr]
        if size != world:
            shown = ", ".join(f"{name}={count}" for name, count in sizes) if sizes else str(self.mesh)
            raise MeshError(
                f"the mesh ({shown}) has {size} ranks and the job {world}: give sizes whose product is the number of "
                f"processes, such as {{'cluster': nodes, 'node': processes on each}}, and start as many with torchrun"
            )

    def shard(self, model: ModelT) -> ModelT:
        """`zm.shard` of `model` with all of this; all ranks call it together. A mesh of sizes is made on the machine's
        accelerator, where it has one: `on` says another."""
        if isinstance(self.mesh, tuple):
            import torch

            found = torch.accelerator.current_accelerator(check_available=True)  # not what torch was built for
            return self.on(found.type if found else "cpu").shard(model)
        return _shard(model, self.mesh, self.strategy, self, self.cluster, self.workload)  # type: ignore[arg-type]


def _layouts_of(strategy: Strategy, parts: Parts, mesh: Sizes) -> Iterable[Layout]:
    """Layouts of the model and of parts on its mesh."""
    named = {part_name(key): part for key, part in parts.items()}
    elsewhere = {name for name, part in named.items() if part.mesh is not None}
    here = {name: part for name, part in named.items() if name not in elsewhere}
    whole = with_given(strategy, here, {name: [axis for axis, _ in mesh] for name in here})
    known = whole.with_parts({name: own for name, own in whole.parts if name not in elsewhere})
    return layouts_of(known, mesh, {}).values()


def _require_sizes(mesh: Sizes) -> None:
    names = [name for name, _ in mesh]
    if not mesh or len(set(names)) != len(names) or not all(type(size) is int and size > 0 for _, size in mesh):
        raise InputError(
            f"a mesh is sizes by name, outermost first, each 1 or more: {{'cluster': 2, 'node': 8}}; got {dict(mesh)}"
        )
