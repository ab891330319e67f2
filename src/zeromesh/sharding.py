"""How to shard, as one value: what integrations with training libraries take in the place of `zm.shard`'s arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from zeromesh.api import require_plannable, shard
from zeromesh.errors import InputError, MeshError
from zeromesh.schedule import BUCKET_BYTES
from zeromesh.strategy import Layout, Plan, Strategy, layouts_of, part_name
from zeromesh.strategy.parts import with_given
from zeromesh.strategy.plan import DTYPE_FIELDS, dtype_name

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from zeromesh.cluster import Cluster
    from zeromesh.engine.parts import Parts
    from zeromesh.engine.units import UnitClasses
    from zeromesh.planner import Workload

ModelT = TypeVar("ModelT", bound="nn.Module")

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A strategy, a mesh and the options of `zm.shard`, said once and used by whatever makes the model.

    Nothing is sent, and torch is not imported, before `on` or `shard`; what is wrong in it raises here.

    Args:
        strategy: as `zm.shard` takes it; "auto" plans, for `cluster` and `workload`.
        mesh: sizes by name, outermost first (``{"cluster": 2, "node": 8}``), from which torch's mesh of all ranks is
            made; or torch's own; None for a single process.
        param_dtype, reduce_dtype, grad_dtype, master_dtype, units, resident, init, bucket_bytes, register, debug,
            parts, cluster, workload: as `zm.shard` takes them.

    Raises:
        InputError: "auto" without mesh, cluster or workload, or either of the last two without "auto"; or a dtype that
            no model computes in.
        NotationError, MeshError: the strategy does not parse, or does not fit the sizes.

    Examples:
        >>> import zeromesh as zm
        >>> zm.Sharding(strategy="node=3,cluster=1", mesh={"cluster": 2, "node": 8}).mesh
        (('cluster', 2), ('node', 8))
    """

    strategy: str | Strategy | Plan
    mesh: Mapping[str, int] | Sizes | DeviceMesh | None = None
    param_dtype: torch.dtype | str | None = None
    reduce_dtype: torch.dtype | str | None = None
    grad_dtype: torch.dtype | str | None = None
    master_dtype: torch.dtype | str | None = None
    units: UnitClasses | None = None
    resident: Sequence[str] = ()
    init: Callable[[nn.Module], None] | None = None
    bucket_bytes: int = BUCKET_BYTES
    register: bool | None = None
    debug: bool | None = None
    parts: Parts | None = field(default=None, hash=False)
    cluster: Cluster | str | None = None
    workload: Workload | None = None

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
        options: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return shard(model, options.pop("mesh"), options.pop("strategy"), **options)


def _layouts_of(strategy: Strategy, parts: Parts, mesh: Sizes) -> Iterable[Layout]:
    """Of the model, and of parts that are on its mesh."""
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
