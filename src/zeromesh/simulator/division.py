"""A model and a cluster as the data-parallel ranks see them when other parallelisms divide both.

The simulator runs one rank's part of the model on its part of the cluster. The strategy's stages lie over the
data-parallel ranks (cp among them, [Note: Mesh] of `zeromesh.parallel`), and the units' computation waits for the
collectives of the other axes. So no second simulator is needed, and with every degree 1 nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.group import INSIDE_A_NODE
from zeromesh.errors import ClusterError, InputError
from zeromesh.model.spec import DTYPE_BYTES, ActivationSpec, CollectiveSpec, ModelSpec, PerToken, UnitKind, UnitSpec
from zeromesh.model.trainable import with_trainable
from zeromesh.model.transformer import build
from zeromesh.parallel import Parallel
from zeromesh.strategy import Axis, Layout, Stage, Wire

EXPERTS = "experts"
"""The part of a model that gets its own layout if ep divides it."""

NOTHING = UnitSpec(
    name="",
    kind=UnitKind.ROOT,
    tensors=(),
    activations=ActivationSpec(output=0.0, saved_none=PerToken(), saved_selective=PerToken(), saved_full=PerToken()),
)
"""The root of a model whose parameters are all in other units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Pipeline ranks that hold equal parts: the first of them, and their number."""

    rank: int
    count: int
    model: ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    parallel: Parallel
    whole: ModelSpec
    parts: tuple[Part, ...]  # one for each kind of pipeline rank, by rank; a single one without a pipeline
    cluster: Cluster  # the part that remains for data parallelism
    groups: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]  # by parallelism, the ranks on each level

    @classmethod
    def of(cls, model: ModelSpec, cluster: Cluster, parallel: Parallel, *, seq_len: int) -> Division:
        """Divides both. Raises InputError if a degree does not divide its dimension, or the shape is not known."""
        if not parallel.cuts:
            part = Part(rank=0, count=1, model=model)
            return cls(parallel=parallel, whole=model, parts=(part,), cluster=cluster, groups=())
        _check(model, parallel, seq_len)
        rest = _rest(cluster, parallel)
        inner = tuple((level.name, level.inner) for level in rest.levels if level.inner > 1)
        found = {
            "tp": inner,
            "cp": _innermost(rest, "cp", parallel.cp),
            "ep": _innermost(rest, "ep", parallel.ep),
            # The next stage is as far away as possible.
            "pp": tuple((level.name, 2) for level in rest.levels if level.outer > 1)[-1:],
        }
        groups = tuple((name, spans) for name, spans in found.items() if spans)
        local = _with_context(_of_one_rank(model, parallel), parallel.cp)
        return cls(parallel=parallel, whole=model, parts=tuple(_parts(local, parallel)), cluster=rest, groups=groups)

    def layouts(self, layout: Layout) -> dict[str, Layout]:
        """Returns the layouts of parts that have their own: the experts'. It covers the data-parallel ranks that hold
        the same experts; each axis is divided by the innermost ranks."""
        left, axes = self.parallel.ep, []
        if left == 1:
            return {}
        for axis in layout.axes:
            taken = math.gcd(left, axis.size)
            if taken not in (left, axis.size):
                raise InputError(
                    f"ep={self.parallel.ep} must take whole parts of the innermost axes of {layout.strategy}, or a "
                    f"divisor of one, got {axis.size} ranks of {axis.name}: take other splits"
                )
            left //= taken
            axes.append(replace(axis, name=f"{EXPERTS}:{axis.name}", size=axis.size // taken))
        sizes = {name: 1 for name, _ in layout.mesh}
        for axis in axes:
            sizes[axis.mesh_axis] *= axis.size
        mesh = tuple(sizes.items())
        return {EXPERTS: replace(layout, mesh=mesh, axes=tuple(axes), part=EXPERTS, feeders=layout.world)}

    @property
    def splits_freely(self) -> bool:
        """Whether ep takes whole parts of the innermost axes, however levels are split."""
        sizes = dict(self.cluster.axes)
        return all((n & (n - 1)) == 0 for level, size in dict(self.groups).get("ep", ()) for n in (sizes[level], size))

    def axes(self, name: str) -> tuple[Axis, ...]:
        """The ranks of a parallelism, as axes for its collectives."""
        return tuple(
            Axis(name=name, mesh_axis=level, size=size, stride=1, stage=Stage.ZERO, wire=Wire())
            for level, size in dict(self.groups)[name]
        )


def _check(model: ModelSpec, parallel: Parallel, seq_len: int) -> None:
    built, name = model.built_from, model.name
    if built is None and (parallel.tp > 1 or parallel.ep > 1):
        raise InputError(
            f"tp and ep cut a transformer of known shape, got {parallel} for {name}, which is none: name a preset or "
            "the model's config.json"
        )
    wanted: list[tuple[str, int, str, int]] = []
    if built is not None:
        shape = built.shape
        numbers = (("heads", shape.heads), ("key and value heads", shape.kv_heads), ("feed-forward size", shape.ffn))
        wanted += [("tp", parallel.tp, what, number) for what, number in (*numbers, ("vocabulary", shape.vocab))]
        wanted.append(("ep", parallel.ep, "experts", shape.experts))
    spread = parallel.tp if parallel.sequence_parallel else 1
    if parallel.tp > 1 and spread > 1:
        wanted.append(("tp", spread, "sequence length (with sequence parallelism)", seq_len))
    if parallel.cp > 1:  # to balance causal attention, torch gives each rank two pieces
        wanted.append(("2 * cp", 2 * parallel.cp, "sequence length", seq_len))
    for degree, size, what, number in wanted:
        if size > 1 and not number:
            raise InputError(f"{degree}={size} cuts {what}, of which {name} has none: leave {degree} at 1")
        if number % size:
            nearest = [n for n in range(1, number + 1) if number % n == 0 and n <= 2 * size]
            raise InputError(
                f"{degree} must divide the {what} of {name}, {number}; got {size}: take "
                f"{' or '.join(map(str, nearest[-2:]))}"
            )
    layers = sum(unit.count for unit in model.units if unit.kind is UnitKind.BLOCK)
    stages = parallel.pp * parallel.pp_chunks
    if stages > max(1, layers):
        raise InputError(
            f"a pipeline of {parallel.pp} ranks with {parallel.pp_chunks} stages each needs {stages} layers, and "
            f"{name} has {layers}: take fewer"
        )
    if parallel.pp > 1 and any(unit.kind is UnitKind.ROOT and unit.matmuls for unit in model.units):
        raise InputError(
            f"{name} ties its embedding to its head, which are on the first and the last rank of a pipeline: leave pp "
            "at 1, or untie them"
        )


def _rest(cluster: Cluster, parallel: Parallel) -> Cluster:
    taken = {level.name for level in cluster.levels} & {"tp", "cp", "ep", "pp"}
    if taken:
        raise InputError(f"levels of a cluster that is cut need other names than the degrees', got {', '.join(taken)}")
    try:
        rest = cluster.cut(inner=parallel.tp)
    except ClusterError as error:
        raise InputError(f"tp={parallel.tp} must take a part of the innermost ranks: {error}") from error
    wide = [i for i, level in enumerate(rest.levels) if level.inner > 1 and i > 0]
    if any(cluster.link_kind(index) not in INSIDE_A_NODE for index in wide):
        first = cluster.levels[0]
        raise InputError(
            f"tp={parallel.tp} is wider than {first.name}, which has {first.size}: each layer would wait for the "
            f"network eight times a micro-batch; take {first.size} or less, and pp or the strategy for the rest"
        )
    try:
        return rest.cut(outer=parallel.pp)
    except ClusterError as error:
        raise InputError(f"pp={parallel.pp} must take a part of the outermost ranks: {error}") from error


def _innermost(rest: Cluster, name: str, degree: int) -> tuple[tuple[str, int], ...]:
    """Returns the innermost `degree` of the data-parallel ranks, by level."""
    try:
        levels = rest.cut(inner=degree).levels if rest.world % degree == 0 else None
    except ClusterError:
        levels = None
    if levels is None:
        sizes = ", ".join(f"{level.name} {level.size}" for level in rest.levels)
        raise InputError(
            f"{name}={degree} must take a part of the innermost data-parallel ranks, which are {sizes}: take a divisor "
            "of the innermost, or that times one of the next"
        )
    pairs = zip(levels, rest.levels, strict=True)
    return tuple((old.name, old.size // new.size) for new, old in pairs if old.size > new.size)


def _of_one_rank(model: ModelSpec, parallel: Parallel) -> ModelSpec:
    built = model.built_from
    if built is None or (parallel.tp == 1 and parallel.ep == 1):
        return model
    local = build(built.shape, dtype=model.dtype, kernels=built.kernels, parallel=parallel)
    return with_trainable(local, built.trainable)


def _with_context(model: ModelSpec, cp: int) -> ModelSpec:
    """Adds the gathers of keys and values, as torch's context_parallel does them by default: before attention, and
    again in its backward, which scatters their gradients. Selective recomputation keeps attention, so it adds none.
    """

    def gathered(unit: UnitSpec) -> UnitSpec:
        if unit.attention is None or cp == 1:
            return unit
        elements = 2.0 * cp * unit.attention.layers * unit.attention.kv_heads * unit.attention.head_dim
        found = tuple(
            CollectiveSpec(axis="cp", operation=operation, elements=elements, backward=backward, kept=True)
            for operation, backward in (("all_gather", False), ("all_gather", True), ("reduce_scatter", True))
        )
        return replace(unit, collectives=(*unit.collectives, *found))

    return replace(model, units=tuple(gathered(unit) for unit in model.units))


# Pipelines ------------------------------------------------------------------------------------------------------------


def _parts(model: ModelSpec, parallel: Parallel) -> Iterator[Part]:
    """Yields one part for each kind of rank. Middle ranks have equal parts if the blocks are equal."""
    if parallel.pp == 1:
        yield Part(rank=0, count=1, model=model)
        return
    parts = [(rank, _of_pipeline_rank(model, parallel, rank)) for rank in range(parallel.pp)]
    for units, same in groupby(parts, key=lambda part: part[1].units):
        ranks = list(same)
        yield Part(rank=ranks[0][0], count=len(ranks), model=replace(model, units=units))


def _of_pipeline_rank(model: ModelSpec, parallel: Parallel, rank: int) -> ModelSpec:
    """Returns the model of a rank: its chunks of the blocks, and the embedding on the first rank, the last norm and the
    head on the last. Stages share blocks as evenly as they divide, later ones with more."""
    blocks = [replace(u, count=1) for u in model.units if u.kind is UnitKind.BLOCK for _ in range(u.count)]
    stages = parallel.pp * parallel.pp_chunks
    ends = [len(blocks) * stage // stages for stage in range(stages + 1)]
    own = [blocks[i] for stage in range(rank, stages, parallel.pp) for i in range(ends[stage], ends[stage + 1])]
    merged = [replace(block, count=len(list(same))) for block, same in groupby(own)]
    first, last = rank == 0, rank == parallel.pp - 1
    spread = parallel.tp if parallel.sequence_parallel else 1
    # Stages hand over the blocks' outputs, and their gradients in return, and a rank waits for them.
    message = CollectiveSpec(axis="pp", operation="broadcast", elements=model.hidden / spread, times=parallel.pp_chunks)
    roots = [_root_of(unit, first, last) for unit in model.units if unit.kind is UnitKind.ROOT] or [NOTHING]
    roots[0] = replace(roots[0], collectives=(*roots[0].collectives, message, replace(message, backward=True)))
    # A stage keeps its output for its backward (torch/distributed/pipelining/stage.py, fwd_cache).
    kept = DTYPE_BYTES[model.dtype] * model.hidden / spread * (parallel.pp_chunks - last)
    roots[0] = replace(roots[0], activations=roots[0].activations.keeping(kept))
    embedding = [unit for unit in model.units if unit.kind is UnitKind.EMBEDDING and first]
    head = [unit for unit in model.units if unit.kind is UnitKind.HEAD and last]
    return replace(model, units=(*roots, *embedding, *merged, *head))


def _root_of(root: UnitSpec, first: bool, last: bool) -> UnitSpec:
    """The first rank has the root's looked-up positions. The last has the rest, which computes after the last block."""
    tensors = tuple(tensor for tensor in root.tensors if (first if tensor.lookup else last))
    return replace(root, tensors=tensors) if last else replace(NOTHING, tensors=tensors)
