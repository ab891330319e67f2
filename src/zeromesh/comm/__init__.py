"""Collectives over the axes of a mesh, and the lanes they run on."""

from zeromesh.comm.collectives import all_gather, all_reduce, all_reduce_max, reduce_scatter, workspace_bytes
from zeromesh.comm.exchange import AxisGroup, Chain, Message, Sent, Step
from zeromesh.comm.groups import axis_ranks, group_of, make_groups, make_line, mesh_group
from zeromesh.comm.lane import Lane, Ticket
from zeromesh.comm.transport import pass_on

__all__ = [
    "AxisGroup",
    "Chain",
    "Lane",
    "Message",
    "Sent",
    "Step",
    "Ticket",
    "all_gather",
    "all_reduce",
    "all_reduce_max",
    "axis_ranks",
    "group_of",
    "make_groups",
    "make_line",
    "mesh_group",
    "pass_on",
    "reduce_scatter",
    "workspace_bytes",
]
