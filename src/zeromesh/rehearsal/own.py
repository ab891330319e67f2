"""`zm.rehearse`: runs a user's own loop on the virtual device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeromesh.cluster.catalogue import find_cluster
from zeromesh.cluster.cluster import Cluster
from zeromesh.rehearsal.result import Rehearsal, failures_of
from zeromesh.rehearsal.show import rehearsal_page
from zeromesh.rehearsal.steps import Stage
from zeromesh.rehearsal.virtual import virtual_rank
from zeromesh.report.notebook import framed

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


# Only for IPython.
Rehearsal._repr_html_ = lambda self: framed(rehearsal_page([self], failures_of([self])))  # type: ignore[attr-defined]


def rehearse(
    step: Callable[[ModelT, OptimizerT], object],
    build: Callable[[DeviceMesh], tuple[ModelT, OptimizerT]],
    *,
    mesh: Mapping[str, int],
    rank: int = 0,
    cluster: Cluster | str | None = None,
) -> Rehearsal:
    """Rehearses your training step as one rank of any number, without a GPU and without other ranks.

    The real engine runs on a virtual device that reserves memory without touching it. Kernels only compute shapes, and
    collectives are counted. Values read from the device are 0. The device stays this process's accelerator, so rehearse
    in a separate process.

    Args:
        step: function of one whole step: forward, backward, clipping and the optimizer's step. It is called a few
            times. Make its tensors on ``mesh.device_type`` of the mesh that `build` gets.
        build: function that makes the model, shards it over the given mesh, and makes its optimizer. Make large models
            under ``torch.device("meta")``, since values are not needed.
        mesh: sizes by axis name, outermost first.
        rank: the rank to rehearse.
        cluster: a description, a preset's name or a TOML file, whose levels are the mesh's axes. It gives the time of a
            step and the memory of a device.

    Returns:
        The figures: `.memory`, `.axes`, `.launches_per_unit()`, `.host_reads`, `.failures`, `.trace`, `.to_json()`.

    Raises:
        MeshError: the mesh has no such rank.
        ClusterError: the cluster cannot be read, or has other levels.
        InputError: there is no compiler for the device, or the process already has another process group.
    """
    found = find_cluster(cluster) if isinstance(cluster, str) else cluster
    hardware = None if found is None else found.sized(mesh)
    with virtual_rank(mesh, rank) as made:
        stage = Stage(hardware)
        stage.places.go("shard")
        model, optimizer = build(made)
        return stage.take(lambda: step(model, optimizer), model, optimizer, rank=rank)
