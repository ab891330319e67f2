"""The device and links that a rehearsal is timed on, and the size of the device's memory."""

from __future__ import annotations

from collections.abc import Sequence

from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.collective import FREE, CollectiveCost, Operation
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants
from zeromesh.cost.memory import overhead_bytes
from zeromesh.cost.transfer import TransferModel
from zeromesh.errors import InputError
from zeromesh.rehearsal.kernels import KernelModel
from zeromesh.simulator.run import DEFAULT_MARGIN
from zeromesh.strategy import Axis

_WORD_BYTES = 4


class Hardware:
    """A cluster, whose levels are the mesh's axes, with the shipped constants, with which plans are made: times of
    kernels, and of collectives (`transfers`)."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.constants = cluster, default_constants().on(cluster)
        compute = ComputeModel(device=cluster.device, constants=self.constants)
        self.kernels = KernelModel(compute=compute)
        self.transfers = TransferModel.of(cluster, self.constants, compute)

    @property
    def limit_bytes(self) -> float:
        """A device's memory less the margin that plans leave."""
        return self.cluster.device.memory_bytes * (1 - DEFAULT_MARGIN)

    def overhead_bytes(self, communicators: int) -> float:
        """Memory of a process besides its tensors; the allocator's loss is part of reserved memory."""
        return overhead_bytes(
            self.constants, messages=self.cluster.messages, communicators=communicators, dynamic_bytes=0.0
        )

    def require_levels(self, axes: Sequence[Axis]) -> None:
        """Raises InputError for an axis, of the mesh of a part say, that is no level of the cluster."""
        levels = [level.name for level in self.cluster.levels]
        for axis in axes:
            if axis.mesh_axis not in levels:
                raise InputError(
                    f"axis {axis.name} is none of the levels of {self.cluster.name}, {', '.join(levels)}, so that it "
                    f"has no time: give the part a slice of the mesh, as mesh['{levels[-1]}'], or no cluster"
                )

    def collective(self, axes: Sequence[Axis], operation: Operation, full_bytes: float) -> CollectiveCost:
        """One collective of a whole buffer of `full_bytes` on the wire, over the group of `axes`."""
        axes = [axis for axis in axes if axis.size > 1]
        if not axes or full_bytes <= 0:
            return FREE
        return self.transfers.joint(axes, operation, max(1, round(full_bytes / _WORD_BYTES)), "fp32")
