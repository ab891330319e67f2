"""The share of a computing device that a collective takes.

[Note: Channels] A collective runs as a kernel with one block for each of its channels. Each block has a multiprocessor
to itself while it runs (NVIDIA/nccl#689: "NCCL CTAs won't share an SM with compute kernels"). Inside a node a ring has
as many channels as it takes to fill the links: 24 on A100 and H100. Over a network it has two for each card that it
uses (NVIDIA/nccl#438); a single rank per node uses one card. So with m multiprocessors a second of computation takes

    1 / (1 - channel_share * channels / m)        channels of all collectives that run

seconds. If computation were spread evenly, `channel_share` would be 1. A product whose blocks fill the device in whole
waves loses more (one of 132 blocks on 132 multiprocessors takes two waves of 108). So the constant is fitted to a
product that runs beside an all-reduce, and its range spans the values seen on whole models.

[Note: Memory] A byte that a rank sends is stored and read back, and read from the user's data or written there. So it
passes through the device's memory three times inside a node (NVIDIA/nccl#1428). Over a network, a card reads and stores
it, which makes two more. Work that waits for memory, elementwise kernels and copies, loses as much of each second as
the collectives have of the memory's rate. On A100 with NVLink that is 39 % in addition to the 11 % of the channels, so
that such a kernel takes twice as long. Measured there: .02 ms without and .05 ms beside a gather (the same source).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.constants import Constants
from zeromesh.cost.group import INSIDE_A_NODE, Group
from zeromesh.strategy import Axis

MOST_TAKEN = 0.9
"""Largest share of the device that collectives can take: the scheduler still lets computation in."""


def taken_share(cluster: Cluster, axes: Sequence[Axis], constants: Constants) -> float:
    """The share of the device's rate lost while a collective over the group of `axes` runs. It is 0 if processor cores
    communicate, since the network model divides these."""
    if cluster.device.cores is not None:
        return 0.0
    of_device = cluster.device.multiprocessors or constants.multiprocessors
    return constants.channel_share * _channels(cluster, axes, constants) / of_device


def memory_passes(group: Group, constants: Constants) -> float:
    """How often a byte that a rank of `group` sends passes through a device's memory: [Note: Memory]. In a ring over
    several nodes, one rank of each node sends over the network."""
    outer = any(hop.outer for hop in group.hops)
    inside = prod(hop.size for hop in group.hops if not hop.outer)
    return constants.node_passes + outer * (constants.card_passes - constants.node_passes) / inside


def slowdown(taken: float) -> float:
    """Seconds that a second of computation takes if collectives take the share `taken` of the device."""
    return 1.0 / (1.0 - min(taken, MOST_TAKEN))


def _channels(cluster: Cluster, axes: Sequence[Axis], constants: Constants) -> float:
    sizes = {axis.mesh_axis: 1 for axis in axes}
    for axis in axes:
        sizes[axis.mesh_axis] *= axis.size
    channels, inside = constants.node_channels, 1
    for index, level in enumerate(cluster.levels):
        size = sizes.get(level.name, 1)
        if size > 1 and cluster.link_kind(index) not in INSIDE_A_NODE:
            channels = min(channels, constants.card_channels * min(level.ports or inside, inside))
        inside *= size
    return channels
