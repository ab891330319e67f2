"""Checks which machine each rank of a mesh is on, before anything is measured. If an inner axis joins machines and an
outer one stays inside them, a probe of the mesh describes no cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from torch._C._distributed_c10d import Store

from zeromesh.errors import MeshError
from zeromesh.files import machine_id
from zeromesh.launch.device import fault_of


def require_places(mesh: Mapping[str, int], store: Store, rank: int, world: int, *, machine: str | None = None) -> None:
    """Compares the ranks' meshes (sizes by axis name, outermost first) with each other, and with the machines that the
    ranks are on. Collective, over a store for this start only. Raises MeshError on every rank if they do not agree."""
    own = list(mesh.items()), machine or machine_id()

    def judge(said: Sequence[Any]) -> str:
        meshes, machines = zip(*said, strict=True)
        return _other_mesh(meshes) or wrong_order(mesh, machines)

    if wrong := fault_of(store, "places", rank, world, own, judge):
        raise MeshError(wrong)


def _other_mesh(meshes: Sequence[Sequence[Sequence[object]]]) -> str:
    for rank, mesh in enumerate(meshes):
        if mesh != meshes[0]:
            first, other = (",".join(f"{name}={size}" for name, size in one) for one in (meshes[0], mesh))
            return (
                f"all ranks must have one mesh; rank 0 has {first}, rank {rank} has {other}: give --mesh, or start as "
                f"many ranks on each machine"
            )
    return ""


def wrong_order(mesh: Mapping[str, int], machines: Sequence[str]) -> str:
    """Returns an error text if an axis joins machines, given by rank, while an outer one joins ranks of one machine;
    else ""."""
    joins: dict[str, set[bool]] = defaultdict(set)
    inner_first = list(mesh.items())[::-1]
    for index, (name, size) in enumerate(inner_first):
        below = prod(count for _, count in inner_first[:index])
        for rank in range(len(machines)):
            if rank // below % size:
                joins[name].add(machines[rank] != machines[rank - below])
    names = [name for name, _ in inner_first if joins[name]]
    for inner, outer in pairwise(names):
        if True in joins[inner] and False in joins[outer]:
            text = ",".join(f"{name}={size}" for name, size in mesh.items())
            return (
                f"in mesh {text} axis {inner} joins machines, and axis {outer}, outside of it, ranks of one machine: "
                f"name the axis of a machine's ranks last, and number ranks machine by machine (torchrun does; srun -m "
                f"block)"
            )
    return ""
