"""Collectives over the axes of a mesh, and the lanes they run on."""

from zeromesh.comm.collectives import all_gather, all_reduce, reduce_scatter, workspace_bytes
from zeromesh.comm.groups import AxisGroup, Sent, make_groups
from zeromesh.comm.lane import Lane, Ticket

__all__ = [
    "AxisGroup",
    "Lane",
    "Sent",
    "Ticket",
    "all_gather",
    "all_reduce",
    "make_groups",
    "reduce_scatter",
    "workspace_bytes",
]
