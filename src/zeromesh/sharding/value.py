"""The arguments of `zm.shard` as one value."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from zeromesh.errors import InputError, MeshError, short_repr
from zeromesh.options import Options
from zeromesh.sharding import ModelT, require_plannable, shard_with
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.parts import Parts, layouts_of, part_name, with_given
from zeromesh.strategy.plan import Plan
from zeromesh.strategy.stage import DTYPE_FIELDS, dtype_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from zeromesh.cluster.cluster import Cluster
    from zeromesh.planner.workload import Workload

Sizes = tuple[tuple[str, int], ...]


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
        """Calls `zm.shard` of `model` with all of this; all ranks call it together. A mesh given by sizes is made on
        the machine's accelerator, if it has one; use `on` for another device."""
        if isinstance(self.mesh, tuple):
            import torch

            found = torch.accelerator.current_accelerator(check_available=True)  # not the one that torch was built for
            return self.on(found.type if found else "cpu").shard(model)
        return shard_with(model, self.mesh, self.strategy, self, self.cluster, self.workload)  # type: ignore[arg-type]


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
