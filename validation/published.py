"""Search spaces and objectives of earlier planners, so that their choices can be compared with ours.

- AMSP (arXiv 2311.00257v2, section IV): degrees (s_p, s_g, s_os) with s_p <= s_g <= s_os, and s_g one of the other two.
  A state crosses nodes only when it fills the node. Memory: 2 Psi/s_p + 2 Psi/s_g + 12 Psi/s_os + activations +
  temporaries. Objective: the smallest sum of communication, without overlap.
- PaRO (arXiv 2310.06003): 14 strategies; each of p, g, os is not sharded, or sharded inside the group or globally.
  Memory: only model states. Objective: max(communication, computation), from its closed forms.
- MiCS (arXiv 2205.00119): everything is sharded in one group of contiguous ranks. Objective: the smallest group that
  fits.

Open points of the papers are in `Assumptions`, with one value for all models of a space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod

from zeromesh.cluster.catalogue import preset
from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.collective import Operation
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.model.presets import preset as model_preset
from zeromesh.model.spec import DTYPE_BYTES, ModelSpec, Recomputation, UnitKind
from zeromesh.planner.bounds import Bounds
from zeromesh.planner.space import divisors
from zeromesh.planner.workload import Workload
from zeromesh.strategy import Axis, Layout
from zeromesh.strategy.presets import PARO


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Assumptions about points that a paper leaves open.

    AMSP takes activations and temporaries from "existing methodologies", and cites ZeRO (arXiv 1910.02054). That
    paper's section 3.2 has both. Without recomputation there are 12 values of two bytes per token, hidden element and
    layer. And all gradients are fused into one fp32 buffer to be all-reduced; in AMSP, those of a rank's parameters.

    Args:
        activation_bytes: per token, hidden element and layer, if a workload leaves recomputation open. If not, this
            package's own model gives the activations.
        temporary_bytes: per trainable parameter among a rank's parameters.
        bucket_bytes: bytes of gradients in one all-reduce. InternEvo's configurations of AMSP's models have 512 MiB.
    """

    activation_bytes: float = 24.0
    temporary_bytes: float = 4.0
    bucket_bytes: int = 512 * 2**20


STATES_ALONE = Assumptions(activation_bytes=0.0, temporary_bytes=0.0)
"""PaRO's formula counts only states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One strategy of a published space."""

    name: str
    strategy: str
    objective_s: float
    memory_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    model: ModelSpec
    cluster: Cluster
    workload: Workload
    assumptions: Assumptions
    micro_batch: int
    micro_batches: int

    def bounds(self) -> Bounds:
        return Bounds(model=self.model, cluster=self.cluster, workload=self.workload, constants=default_constants())

    def activation_bytes(self) -> float:
        """Bytes per device."""
        if self.workload.recomputation is not None:
            return self.bounds().activation_bytes(self.micro_batch, self.workload.recomputation)
        tokens = self.micro_batch * self.workload.seq_len
        return self.assumptions.activation_bytes * tokens * self.model.hidden * self.model.num_layers


def search_published(
    space: str, model: ModelSpec, cluster: Cluster, workload: Workload, *, assumptions: Assumptions | None = None
) -> list[Ranked]:
    """Returns the strategies of a paper's space: those that fit by its objective, then the others by memory, smallest
    first.

    The space is amsp, paro or mics; each has its own assumptions. The cluster has the two levels that the papers use.
    An open micro-batch is 1; for open recomputation see `Assumptions`.
    """
    assumptions = assumptions or (STATES_ALONE if space == "paro" else Assumptions())
    micro_batch, micro_batches = next(workload.splits(cluster.world))
    setup = _Setup(
        model=model,
        cluster=cluster,
        workload=workload,
        assumptions=assumptions,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
    )
    names, objective = _SPACES[space](setup)
    rows = [_ranked(setup, name, strategy, objective) for name, strategy in names]
    return sorted(rows, key=lambda row: (not row.fits, row.objective_s if row.fits else row.memory_bytes))


CHOICES = (
    ("amsp", "llama-7b", 8, None, "(1,1,8)"),
    ("amsp", "llama-13b", 8, None, "(4,4,8)"),
    ("amsp", "amsp-30b", 32, None, "(8,8,32)"),
    ("mics", "llama-7b", 1024, None, "group of 8"),
    ("mics", "llama-13b", 1024, None, "group of 8"),
    ("mics", "amsp-30b", 1024, None, "group of 16"),
    ("paro", "llama-65b", 32, Recomputation.FULL, "IIG"),
)
"""(space, model, devices, recomputation, choice). AMSP's are from its Table IV, with the fewest devices of its
experiments (8, 32, 128, 512, 1024) on which each model fits. MiCS's are the groups in which that paper ran it. PaRO's
is the fastest that it measured."""


def answer(
    space: str,
    model: str,
    devices: int,
    recomputation: Recomputation | None = None,
    assumptions: Assumptions | None = None,
) -> list[Ranked]:
    """The ranking of a space on its paper's cluster and batch; for MiCS, as run in AMSP's paper."""
    if space == "paro":
        cluster, seq_len, micro_batch, sequences = preset("a100-8x-100g"), 512, 4, 4 * 10 * devices
    else:
        cluster, seq_len, micro_batch, sequences = preset("a800-8x-hdr"), 4096, 1, 1024
    workload = Workload(
        seq_len=seq_len,
        global_batch_tokens=seq_len * sequences,
        micro_batch=micro_batch,
        recomputation=recomputation,
    )
    return search_published(space, model_preset(model), cluster.take(devices), workload, assumptions=assumptions)


def _ranked(setup: _Setup, name: str, strategy: str, objective: Callable[[Layout], float]) -> Ranked:
    layout = Layout.of(strategy, setup.cluster.axes)
    trainable, by_param = setup.model.num_trainable, layout.degree(layout.param_axes)
    state = 2 * setup.model.num_params / by_param + 2 * trainable / layout.degree(layout.grad_axes)
    state += 12 * trainable / layout.degree(layout.significant)
    memory = state + setup.assumptions.temporary_bytes * trainable / by_param + setup.activation_bytes()
    return Ranked(
        name=name,
        strategy=str(layout.strategy),
        objective_s=objective(layout),
        memory_bytes=memory,
        fits=memory <= setup.cluster.device.memory_bytes,
    )


_Named = Sequence[tuple[str, str]]
_Objective = Callable[[Layout], float]


# AMSP ---------------------------------------------------------------------------------------------------------------


def _amsp(setup: _Setup) -> tuple[_Named, _Objective]:
    return list(_amsp_space(setup.cluster)), lambda layout: _communication(setup, layout)


def _amsp_space(cluster: Cluster) -> Iterator[tuple[str, str]]:
    inner, outer = cluster.levels
    degrees = [*divisors(inner.size), *(inner.size * size for size in divisors(outer.size)[1:])]
    for states in degrees:
        for params in (degree for degree in degrees if states % degree == 0):
            for grads in sorted({params, states}):
                yield f"({params},{grads},{states})", degrees_as_strategy(cluster, params, grads, states)


def degrees_as_strategy(cluster: Cluster, params: int, grads: int, states: int) -> str:
    """Returns AMSP's (s_p, s_g, s_os) in the notation, on a cluster with two levels."""
    inner, outer = cluster.levels
    cuts = [(min(d, inner.size), max(1, d // inner.size)) for d in (1, params, grads, states)]
    cuts.append((inner.size, outer.size))
    terms = []
    for position, level in enumerate((inner, outer)):
        sizes = [later[position] // earlier[position] for earlier, later in pairwise(cuts)]
        parts = [f"{level.name}[{n}]={stage}" for stage, n in zip("3210", sizes, strict=True) if n > 1]
        terms += parts or [f"{level.name}=0"]
    return ",".join(terms)


def _communication(setup: _Setup, layout: Layout) -> float:
    """T_p + T_g + T_os0 + T_os1 of the paper's section IV-C: all collectives of a step one after the other, in seconds.

    Parameters are gathered, and their gradients reduced, module by module. Gradients are all-reduced in buckets over
    all ranks with the same parameters, and dropped by ranks that do not own them. If they are sharded further than the
    parameters, this also happens after every micro-batch except the last. Each owner broadcasts its updated parameters.
    """
    compute = ComputeModel(device=setup.cluster.device, constants=default_constants())
    transfers = TransferModel.of(setup.cluster, default_constants(), compute)
    wire, trainable = setup.workload.wire_dtype, setup.model.num_trainable
    three = layout.param_axes
    shards, owners = layout.degree(three), layout.degree(layout.significant)

    def seconds(operation: Operation, numel: float, axes: Sequence[Axis]) -> float:
        group = [axis for axis in axes if axis.size > 1]
        return transfers.joint(group, operation, max(1, round(numel)), wire).seconds if group else 0.0

    def others(axes: Sequence[Axis]) -> list[Axis]:
        return [axis for axis in axes if axis not in three]

    gathered = sum(
        count * (2 * seconds("all_gather", numel, three) + seconds("reduce_scatter", trained, three))
        for count, numel, trained in _modules(setup.model)
    )
    bucket = setup.assumptions.bucket_bytes / DTYPE_BYTES[wire]
    calls = trainable / shards / bucket
    accumulated = calls * seconds("all_reduce", bucket, others(layout.grad_axes))
    synchronised = calls * seconds("all_reduce", bucket, others(layout.axes))
    updated = owners / shards * seconds("broadcast", trainable / owners, others(layout.significant))
    return setup.micro_batches * gathered + (setup.micro_batches - 1) * accumulated + synchronised + updated


def _modules(model: ModelSpec) -> Iterator[tuple[int, int, int]]:
    """Yields (count, parameters, trainable parameters) of the layers' modules. Equal layers are counted."""
    for unit in model.units:
        if unit.kind is UnitKind.BLOCK:
            for _, tensors in groupby(unit.tensors, key=lambda tensor: tensor.name.rpartition(".")[0]):
                sizes = [(tensor.num_elements, tensor.trainable) for tensor in tensors]
                yield unit.count, sum(n for n, _ in sizes), sum(n for n, trainable in sizes if trainable)


# PaRO ---------------------------------------------------------------------------------------------------------------


def _paro(setup: _Setup) -> tuple[_Named, _Objective]:
    inner, outer = setup.cluster.levels
    names = [(name, f"{inner.name}={a},{outer.name}={b}") for name, (a, b) in PARO.items()]
    return names, lambda layout: _paro_seconds(setup, layout)


def _paro_seconds(setup: _Setup, layout: Layout) -> float:
    """T = max(t_comm, t_comp), t_comm = (t_param + t_grad) * M + t_sync_g + t_sync_p."""
    name = next(key for key, pair in PARO.items() if pair == _pair(layout))
    communication = _PaRO.of(setup).seconds(name, setup.micro_batches)
    one = setup.bounds().micro_batch_s(setup.micro_batch, setup.workload.recomputation or Recomputation.NONE)
    return max(communication, setup.micro_batches * one.total)


def _pair(layout: Layout) -> tuple[str, ...]:
    return tuple(axis.stage.value for axis in layout.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PaRO:
    """PaRO's symbols: volumes in bytes, B between groups per node, B' inside per device."""

    params_bytes: float
    grads_bytes: float
    inner: int
    groups: int
    inside_bytes_per_s: float
    between_bytes_per_s: float

    @classmethod
    def of(cls, setup: _Setup) -> _PaRO:
        inside, between = setup.cluster.levels
        return cls(
            params_bytes=2.0 * setup.model.num_params,
            grads_bytes=2.0 * setup.model.num_trainable,
            inner=inside.size,
            groups=between.size,
            inside_bytes_per_s=inside.bandwidth_bytes_per_s,
            between_bytes_per_s=between.bandwidth_bytes_per_s,
        )

    def seconds(self, name: str, micro_batches: int) -> float:
        """t_comm of strategy `name`, which has letters for p, g and os."""
        p, g, states = tuple(name)
        micro = 2 * self._gather(p, self.params_bytes) + self._gather(g, self.grads_bytes)
        return (
            micro_batches * micro
            + self._sync(g, states, self.grads_bytes, reduce=True)
            + self._sync(p, states, self.params_bytes, reduce=False)
        )

    def _gather(self, extent: str, volume: float) -> float:
        """Seconds of a gather over the group (I) or all devices (G). A reduce-scatter takes as long."""
        inside = (self.inner - 1) / self.inner * volume / self.inside_bytes_per_s
        world = self.inner * self.groups
        return {"N": 0.0, "I": inside, "G": (world - 1) / world * volume / self.between_bytes_per_s}[extent]

    def _sync(self, extent: str, states: str, volume: float, *, reduce: bool) -> float:
        """Seconds from the extent of gradients to that of states, or back for parameters."""
        between = (self.groups - 1) / self.groups * volume / self.between_bytes_per_s
        if extent == states:
            # equal extents: gradients still have to be summed over all ranks with the same shard
            whole = {"N": 2 * self._gather("G", volume), "I": 2 * between, "G": 0.0}
            return whole[states] if reduce else 0.0
        if (extent, states) == ("N", "I"):
            return self._gather("I", volume) + (2 * between if reduce else 0.0)
        return self._gather("G", volume) if extent == "N" else between


# MiCS ---------------------------------------------------------------------------------------------------------------


def _mics(setup: _Setup) -> tuple[_Named, _Objective]:
    inner, outer = setup.cluster.levels
    degrees = [*divisors(inner.size), *(inner.size * size for size in divisors(outer.size)[1:])]
    names = [(f"group of {d}", degrees_as_strategy(setup.cluster, d, d, d)) for d in degrees]
    return names, _group_size


def _group_size(layout: Layout) -> float:
    return float(prod(axis.size for axis in layout.param_axes))


_SPACES: dict[str, Callable[[_Setup], tuple[_Named, _Objective]]] = {"amsp": _amsp, "paro": _paro, "mics": _mics}
