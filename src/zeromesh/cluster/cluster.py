"""A cluster: equal devices, and the levels that join them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zeromesh.cluster.device import Device
from zeromesh.cluster.level import Level
from zeromesh.errors import ClusterError, nearest, short_repr

HOST_SHARE = 0.95
"""Share of a machine's memory that shards of its ranks may take. The system and the processes themselves need the
rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal devices joined by levels of network, innermost (fastest) first.

    Rates of the host's memory are None if they were not measured; then the cost model's constants are used.
    """

    name: str  # for reports
    device: Device  # all devices are of this kind
    levels: tuple[Level, ...]  # at least one, innermost first, with distinct names
    host_memory_bytes: float | None = None  # of one machine, shared by its devices' processes; None if unknown
    host_copy_bytes_per_s: float | None = None  # between each device and that memory, in both directions at once
    host_step_bytes_per_s: float | None = None  # of that memory, for optimizer steps of all its ranks
    description: str = ""  # one line for `zeromesh clusters`
    sources: tuple[tuple[str, str], ...] = ()  # (key as in the file, such as "level.node.latency"; source of its value)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not self.levels:
            raise ClusterError(f"cluster {self.name!r}: at least one level is required")
        names = [level.name for level in self.levels]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ClusterError(
                f"cluster {self.name!r}: levels must have distinct names, {', '.join(twice)} stands twice"
            )
        if self.host_memory_bytes is not None and self.host_memory_bytes <= 0:
            raise ClusterError(f"cluster {self.name!r}: host_memory must be positive, got {self.host_memory_bytes}")

    @property
    def world(self) -> int:
        """Devices in the whole cluster; if it is divided (`cut`), data-parallel ranks."""
        return math.prod(level.size for level in self.levels)

    @property
    def devices(self) -> int:
        """Devices in the whole cluster, also if it is divided."""
        return math.prod(level.members for level in self.levels)

    @property
    def machine_devices(self) -> int:
        """Devices of one machine: of the level called `node`, else of the innermost level."""
        names = [level.name for level in self.levels]
        return self.members_below(names.index("node") + 1 if "node" in names else 1)

    @property
    def host_limit_bytes(self) -> float:
        """Memory of a machine that shards of its ranks may take; infinite if unknown."""
        return math.inf if self.host_memory_bytes is None else self.host_memory_bytes * HOST_SHARE

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of each level, innermost first."""
        return tuple((level.name, level.size) for level in self.levels)

    @property
    def messages(self) -> bool:
        """Whether processor cores move the bytes, as messages. If not, devices do, with their own collectives."""
        return self.device.cores is not None

    def level(self, name: str) -> Level:
        """Returns the level called `name`. Raises ClusterError if there is none."""
        for level in self.levels:
            if level.name == name:
                return level
        known = [level.name for level in self.levels]
        raise ClusterError(f"cluster {self.name!r} has no level {name!r}; {nearest(name, known)}")

    def link_kind(self, index: int) -> str:
        """Returns the kind of the links of level `index`. "auto" is a network on the outermost of several levels, else
        NVLink-like.

        Example: in a file of two levels "node" and "cluster" without kinds, these are NVLink and InfiniBand.
        """
        kind = self.levels[index].kind
        if kind != "auto":
            return kind
        return "infiniband" if 0 < index == len(self.levels) - 1 else "nvlink"

    def members_below(self, index: int) -> int:
        """Devices in one member of level `index`: 1 for the innermost."""
        return math.prod(level.members for level in self.levels[:index])

    def cut(self, *, inner: int = 1, outer: int = 1) -> Cluster:
        """Returns the cluster as data parallelism sees it if the `inner` innermost and `outer` outermost ranks belong
        to one data-parallel rank. All devices still share the links.

        Raises:
            ClusterError: `inner` or `outer` does not divide the levels.

        Example: 16 nodes of 8, `cut(inner=4, outer=2)` is 8 nodes of 2.
        """
        levels = list(self.levels)
        for name, wanted, order in (("inner", inner, range(len(levels))), ("outer", outer, range(len(levels))[::-1])):
            left = wanted
            for index in order:
                level = levels[index]
                taken = math.gcd(left, level.size)
                if taken not in (left, level.size):
                    sizes = ", ".join(f"{each.name} {each.members}" for each in self.levels)
                    raise ClusterError(
                        f"{wanted} ranks are no part of cluster {self.name!r} ({sizes}): level {level.name}"
                    )
                levels[index] = replace(level, size=level.size // taken, **{name: getattr(level, name) * taken})
                left //= taken
            if left > 1:
                raise ClusterError(f"cluster {self.name!r} has {self.world} devices, of which {wanted} are no part")
        return replace(self, levels=tuple(levels))

    def sized(self, mesh: Mapping[str, int]) -> Cluster:
        """Returns the cluster with the sizes of a mesh, outermost axis first. Raises ClusterError unless the mesh's
        axes are the cluster's levels."""
        levels = [level.name for level in self.levels]
        if levels != list(mesh)[::-1]:
            raise ClusterError(
                f"the mesh's axes must be the levels of cluster {self.name!r}, outermost first "
                f"{', '.join(reversed(levels))}; the mesh has {', '.join(mesh)}"
            )
        return replace(self, levels=tuple(replace(level, size=mesh[level.name]) for level in self.levels))

    def take(self, world: int) -> Cluster:
        """Returns the first `world` devices as a cluster with smaller sizes. Inner levels are filled first; levels
        above keep size 1. Raises ClusterError if there are fewer, or a group of some level would be partly filled.

        Example: 12 nodes of 8, `take(4)` is a node of 4 and 1 node, `take(32)` is 4 nodes of 8.
        """
        if world < 1:
            raise ClusterError(f"a world has at least 1 device, got {world}")
        if world > self.world:
            raise ClusterError(
                f"cluster {self.name!r} has {self.world} devices, {world} were asked for; "
                f"raise the size of level {self.levels[-1].name!r} in its file if there are more"
            )
        left = world
        taken: list[Level] = []
        for level in self.levels:
            size = min(left, level.size)
            if left % size:
                inner = self.members_below(len(taken)) * level.size
                low, high = world // inner * inner, (world // inner + 1) * inner
                raise ClusterError(
                    f"{world} devices leave a {level.name!r} of cluster {self.name!r} partly filled: take {low} or "
                    f"{high}"
                )
            taken.append(replace(level, size=size))
            left //= size
        return replace(self, levels=tuple(taken))
