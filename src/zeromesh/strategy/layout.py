"""A strategy on a mesh of known sizes, and the shard arithmetic: which slice of a flat buffer lives where.

[Note: Significance] Sharded axes are ordered stage 3, then 2 or 3d, then 1, innermost first within each. A flat buffer
is cut into chunks over that order, the first axis most significant. Parameters are sharded over a prefix of the order,
gradients over a prefix, optimizer states over all of it. So each shard is one contiguous range, the state shard lies
inside the other two, and each one-axis collective works on one contiguous region::

    node=3,cluster=1 on 2 x 2, a buffer of 8 elements       rank = (cluster, node)
    params, grads   [0 1 2 3 | 4 5 6 7]                     node 0 | node 1
    states          [0 1 | 2 3 | 4 5 | 6 7]                 (0,0) | (1,0) | (0,1) | (1,1)

[Note: Padding] A buffer's length is padded to a multiple of 8 elements for each rank, under all stages (codes of one
byte: of 16): so all chunks of a collective are equally long and begin at multiples of `CHUNK_BYTES`
(docs/decisions/0020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod

from zeromesh.errors import MeshError, NotationError, nearest
from zeromesh.strategy.collective import Collective, find_collective
from zeromesh.strategy.stage import HOST, Stage, Wire
from zeromesh.strategy.strategy import AxisStage, Strategy

CHUNK_BYTES = 16
"""Width of a vectorised load or store on a GPU: [Note: Padding]."""

COMPUTED_BYTES = 2
"""Bytes of an element of the narrowest compute dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a layout: a mesh axis, or a part of one."""

    # Unique label: the mesh axis's name, and the size if that axis is split, as in ``node[2]`` (a second part of this
    # size is ``node[2]#2``). In the layout of a part of the model, the part's name comes first.
    name: str
    mesh_axis: str
    size: int
    stride: int  # distance, along the mesh axis, between neighbours on this axis
    stage: Stage
    wire: Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A strategy resolved on a mesh."""

    strategy: Strategy  # in normal form
    mesh: tuple[tuple[str, int], ...]  # (name, size) of each mesh axis, innermost first
    axes: tuple[Axis, ...]  # the strategy's axes with sizes, innermost first
    part: str = ""  # the part of the model that has this layout; "" for the modules outside of all parts
    feeders: int | None = None  # how many ranks' losses its gradients are the mean of; None for the ranks of the mesh
    # The sharded axes, most significant first ([Note: Significance]), and the prefixes that shard parameters, and
    # gradients between micro-batches. Kept, since sorting at each use was half of a simulation.
    significant: tuple[Axis, ...] = field(init=False, compare=False, repr=False)
    param_axes: tuple[Axis, ...] = field(init=False, compare=False, repr=False)
    grad_axes: tuple[Axis, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        sharded = [axis for axis in self.axes if axis.stage.shards_states]
        order = tuple(sorted(sharded, key=lambda axis: axis.stage.significance))
        object.__setattr__(self, "significant", order)
        object.__setattr__(self, "param_axes", tuple(axis for axis in order if axis.stage.shards_params))
        object.__setattr__(self, "grad_axes", tuple(axis for axis in order if axis.stage.shards_grads))

    @classmethod
    def of(
        cls, strategy: Strategy | str, mesh: Sequence[tuple[str, int]], *, part: str = "", feeders: int | None = None
    ) -> Layout:
        """Resolves `strategy` on mesh axes given innermost first, for the whole model or a part of it.

        Raises:
            NotationError: the text does not parse, or has parts: `zeromesh.strategy.parts` has a layout for each.
            MeshError: an axis of several ranks is missing, or one is unknown or out of order, or a split does not
                divide its axis.
        """
        names = [name for name, _ in mesh]
        if HOST in names:
            raise MeshError(f"the mesh has a dimension named {HOST!r}, which stands for the host's memory: rename it")
        parsed = Strategy.parse(strategy, names)
        if parsed.parts:
            raise NotationError(
                f"strategy {parsed} has parts of the model, which only zm.shard takes; give one strategy for the whole "
                f"model here, without {', '.join(part for part, _ in parsed.parts)}"
            )
        parsed = _with_lone_axes(parsed, mesh)
        _check_names(parsed, names)
        parts = {name: list(axes) for name, axes in groupby(parsed.axes, key=lambda axis: axis.name)}
        axes = tuple(axis for name, size in mesh for axis in _split(parts[name], size))
        if part:
            axes = tuple(replace(axis, name=f"{part}:{axis.name}") for axis in axes)
        return cls(strategy=parsed, mesh=tuple((n, s) for n, s in mesh), axes=axes, part=part, feeders=feeders)

    @property
    def collective(self) -> Collective:
        return find_collective(self.strategy.collective)

    @property
    def world(self) -> int:
        return prod(size for _, size in self.mesh)

    @property
    def share(self) -> float:
        """Weight of the mean over the mesh's ranks in a mean over all ranks that feed it."""
        return self.world / (self.feeders or self.world)

    @property
    def gathers(self) -> bool:
        """Whether parameters are brought to the device for each use: from other ranks, or from the host."""
        return self.degree(self.param_axes) > 1 or self.strategy.host.shards_params

    @property
    def replica_axes(self) -> tuple[Axis, ...]:
        """Axes over which everything is replicated (stage 0), innermost first."""
        return tuple(axis for axis in self.axes if not axis.stage.shards_states)

    def require_runnable(self) -> None:
        """Raises NotationError for a layout that can be predicted and not run."""
        if not self.collective.by_level:
            name = self.collective.name
            raise NotationError(
                f"collective={name} can only be simulated. The engine uses one axis at a time, which sends fewer bytes "
                "over slow axes: give collective=hierarchical or ho_ring, or join the axes in one dimension of the mesh"
            )

    @property
    def scattered_replicas(self) -> tuple[Axis, ...]:
        """Those of the replica axes, innermost first, over which a sum is scattered and then gathered again:
        [Note: By level] of `zeromesh.schedule.buffer_layout`. Where a collective takes two levels at once, scatters
        pair with scatters and gathers with gathers."""
        axes = tuple(axis for axis in self.replica_axes if axis.size > 1)
        if len(axes) < 2 or not self.collective.by_level or any(axis.wire.quantised for axis in axes[:-1]):
            return ()
        whole = not self.collective.pairs or axes[-1].wire.quantised
        return axes[:-1] if whole else axes

    def above(self, axis: Axis) -> tuple[Axis, ...]:
        """The axes that divide the region on which a collective over `axis` works: the more significant ones if it is
        sharded, else all sharded axes."""
        order = self.significant
        return order[: order.index(axis)] if axis in order else order

    def degree(self, axes: Sequence[Axis]) -> int:
        return prod(axis.size for axis in axes)

    def padded(self, numel: int, item_bytes: int = COMPUTED_BYTES) -> int:
        """`numel` rounded up: [Note: Padding]."""
        multiple = self.world * (CHUNK_BYTES // min(item_bytes, COMPUTED_BYTES))
        return -(-numel // multiple) * multiple

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index of `rank` along each axis of the layout; rank numbers grow innermost axis fastest."""
        if not 0 <= rank < self.world:
            raise MeshError(f"rank must be 0 to {self.world - 1} on this mesh; got {rank}")
        coordinates = {}
        for axis in self.axes:
            rank, coordinates[axis.name] = divmod(rank, axis.size)
        return coordinates

    def shard(self, padded: int, axes: Sequence[Axis], coordinates: dict[str, int]) -> slice:
        """The contiguous range that a rank holds of a buffer of `padded` elements sharded over `axes`, a prefix of
        `significant`. The product of their sizes divides `padded`."""
        index = 0
        for axis in axes:
            index = index * axis.size + coordinates[axis.name]
        length = padded // self.degree(axes)
        return slice(index * length, (index + 1) * length)


def _with_lone_axes(strategy: Strategy, mesh: Sequence[tuple[str, int]]) -> Strategy:
    """The strategy with stage 0 for axes of one rank that it leaves out: no stage shards anything over them."""
    terms, named = list(strategy.axes), strategy.names
    for index, (name, size) in enumerate(mesh):
        if size == 1 and name not in named:
            inside = {inner for inner, _ in mesh[:index]}
            terms.insert(sum(term.name in inside for term in terms), AxisStage(name=name, stage=Stage.ZERO))
    # In nearly all cases nothing was added, and a search makes thousands of layouts.
    return strategy if len(terms) == len(strategy.axes) else replace(strategy, axes=tuple(terms))


def _check_names(strategy: Strategy, names: Sequence[str]) -> None:
    for name in strategy.names:
        if name not in names:
            raise MeshError(
                f"the mesh has no axis {name!r} (it has, innermost first: {', '.join(names)}): {nearest(name, names)}"
            )
    for name in names:
        if name not in strategy.names:
            raise MeshError(
                f"strategy {strategy} gives no stage to mesh axis {name!r}; add {name}=0 to replicate over it"
            )
    if tuple(names) != strategy.names:
        raise MeshError(
            f"a strategy names axes innermost first; for this mesh that is {', '.join(names)}; got "
            f"{', '.join(strategy.names)}"
        )


def _split(parts: Sequence[AxisStage], size: int) -> list[Axis]:
    name = parts[0].name
    fixed = prod(part.split for part in parts if isinstance(part.split, int))
    whole = len(parts) == 1 and parts[0].split is None
    if whole and parts[0].spelt not in (None, size):
        raise MeshError(
            f"{name}[{parts[0].spelt}]={parts[0].stage.value} covers {parts[0].spelt} ranks of {name}, but this mesh "
            f"has {size}: write {name}={parts[0].stage.value} for all of them, or add a stage for {name}[*]"
        )
    rest = any(part.split == "*" for part in parts)
    if not whole and (size % fixed if rest else size != fixed):
        need = f"a multiple of {fixed}" if rest else f"{fixed}"
        raise MeshError(f"{','.join(map(str, parts))} needs {name} to have {need} ranks; this mesh has {size}")
    axes, stride = list[Axis](), 1
    for part in parts:
        length = part.split if isinstance(part.split, int) else size // fixed
        same = sum(axis.size == length for axis in axes)
        label = name if whole else f"{name}[{length}]" + f"#{same + 1}" * (same > 0)
        axes.append(Axis(name=label, mesh_axis=name, size=length, stride=stride, stage=part.stage, wire=part.wire))
        stride *= length
    return axes
