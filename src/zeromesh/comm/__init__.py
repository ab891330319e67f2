"""Collectives over the axes of a mesh, and the lanes they run on."""

from zeromesh.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max,
    reduce_scatter,
    sums_in_place,
    workspace_bytes,
)
from zeromesh.comm.groups import AxisGroup, Sent, make_groups, mesh_group
from zeromesh.comm.lane import Lane, Ticket
from zeromesh.comm.quantised import (
    check_quantisable,
    noise_generator,
    quantised_all_gather,
    quantised_all_reduce,
    quantised_reduce_scatter,
    restore_kept,
)

__all__ = [
    "AxisGroup",
    "Lane",
    "Sent",
    "Ticket",
    "all_gather",
    "all_reduce",
    "all_reduce_max",
    "check_quantisable",
    "make_groups",
    "mesh_group",
    "noise_generator",
    "quantised_all_gather",
    "quantised_all_reduce",
    "quantised_reduce_scatter",
    "reduce_scatter",
    "restore_kept",
    "sums_in_place",
    "workspace_bytes",
]
