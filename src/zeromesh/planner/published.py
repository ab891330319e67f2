"""The search spaces and objectives of earlier planners, so that their choices can be compared with ours.

- AMSP (arXiv 2311.00257): degrees (s_p, s_g, s_os) with s_p <= s_g <= s_os, s_g one of the other two; a state crosses
  nodes only once it fills the node. Memory 2 Psi/s_p + 2 Psi/s_g + 12 Psi/s_os + activations + temporaries. Objective:
  the smallest sum of communication, none of it overlapped.
- PaRO (arXiv 2310.06003): 14 strategies, each of p, g, os sharded not at all, inside the group or globally. Memory
  without activations as above. Objective: max(communication, computation), from its closed forms.
- MiCS (arXiv 2205.00119): everything sharded in one group of contiguous ranks; objective: the smallest group that fits.

What the papers leave open is an `Assumptions` value, and printed with every answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from zeromesh.cluster import Cluster
from zeromesh.cost import ComputeModel, Constants, default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.errors import InputError
from zeromesh.model import ModelSpec, Recomputation
from zeromesh.planner.bounds import Bounds
from zeromesh.planner.memory import model_state
from zeromesh.planner.space import divisors
from zeromesh.planner.workload import Workload
from zeromesh.schedule import Role, Schedule
from zeromesh.simulator import find_engine
from zeromesh.simulator.chains import Chains
from zeromesh.simulator.units import schedule_units
from zeromesh.strategy import Layout
from zeromesh.strategy.presets import PARO

SPACES = ("amsp", "paro", "mics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What a paper does not say.

    Args:
        usable_share: of a device's memory, for model state and activations.
        temporary_bytes: per parameter of the optimizer's shard: the fp32 gradient that the optimizer step makes.
        reserved_bytes: for all other temporaries; the papers give no figure.
    """

    usable_share: float = 1.0
    temporary_bytes: float = 4.0
    reserved_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One strategy of a published space."""

    name: str
    strategy: str
    objective_s: float
    memory_bytes: float
    fits: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "strategy": self.strategy,
            "objective_s": self.objective_s,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """A published planner's answer: strategies that fit by objective, then those that do not, smallest first."""

    space: str
    objective: str
    micro_batch: int
    micro_batches: int
    recomputation: str
    limit_bytes: float
    rows: tuple[Ranked, ...]

    @property
    def best(self) -> Ranked | None:
        return self.rows[0] if self.rows and self.rows[0].fits else None

    def to_json(self) -> dict[str, Any]:
        return {
            "space": self.space,
            "objective": self.objective,
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "recomputation": self.recomputation,
            "memory_limit_bytes": self.limit_bytes,
            "best": self.best.to_json() if self.best else None,
            "candidates": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    model: ModelSpec
    cluster: Cluster
    workload: Workload
    constants: Constants
    micro_batch: int
    micro_batches: int
    recomputation: Recomputation

    def bounds(self) -> Bounds:
        return Bounds(self.model, self.cluster, self.workload, self.constants, ("",) * len(self.cluster.levels))


def search_published(
    space: str,
    model: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    *,
    assumptions: Assumptions | None = None,
    constants: Constants | None = None,
) -> Ranking:
    """What the planner of `space` would choose.

    Args:
        space: one of `SPACES`.
        workload: micro-batch 1 and no recomputation where they are open, as in the papers' set-ups.

    Raises:
        InputError: the cluster has not the two levels that the papers know.
    """
    if len(cluster.levels) != 2:
        raise InputError(f"the space {space} has two levels, and {cluster.name} has {len(cluster.levels)}")
    assumptions = assumptions or Assumptions()
    micro_batch = workload.micro_batch or 1
    share = workload.sequences_per_device(cluster.world)
    setup = _Setup(
        model=model,
        cluster=cluster,
        workload=workload,
        constants=constants or default_constants(),
        micro_batch=micro_batch,
        micro_batches=max(1, share // micro_batch),
        recomputation=workload.recomputation or Recomputation.NONE,
    )
    names, objective, text = _SPACES[space](setup)
    limit = cluster.device.memory_bytes * assumptions.usable_share - assumptions.reserved_bytes
    rows = [_ranked(setup, name, strategy, objective, limit, assumptions) for name, strategy in names]
    rows.sort(key=lambda row: (not row.fits, row.objective_s if row.fits else row.memory_bytes))
    return Ranking(
        space=space,
        objective=text,
        micro_batch=micro_batch,
        micro_batches=setup.micro_batches,
        recomputation=setup.recomputation.value,
        limit_bytes=limit,
        rows=tuple(rows),
    )


def _ranked(
    setup: _Setup,
    name: str,
    strategy: str,
    objective: Callable[[Layout], float],
    limit: float,
    assumptions: Assumptions,
) -> Ranked:
    layout = Layout.of(strategy, setup.cluster.axes)
    state = model_state(layout, setup.model.num_params, setup.model.num_trainable, grad_dtype="bf16")
    temporary = assumptions.temporary_bytes * setup.model.num_trainable / layout.degree(layout.significant)
    memory = state.total + temporary + setup.bounds().activation_bytes(setup.micro_batch, setup.recomputation)
    return Ranked(
        name=name,
        strategy=str(layout.strategy),
        objective_s=objective(layout),
        memory_bytes=memory,
        fits=memory <= limit,
    )


_Named = Sequence[tuple[str, str]]
_Objective = Callable[[Layout], float]


# AMSP ---------------------------------------------------------------------------------------------------------------


def _amsp(setup: _Setup) -> tuple[_Named, _Objective, str]:
    return (
        list(_amsp_space(setup.cluster)),
        lambda layout: _communication(setup, layout),
        "sum of communication, not overlapped",
    )


def _amsp_space(cluster: Cluster) -> Iterator[tuple[str, str]]:
    inner, outer = cluster.levels
    degrees = [*divisors(inner.size), *(inner.size * size for size in divisors(outer.size)[1:])]
    for states in degrees:
        for params in (degree for degree in degrees if states % degree == 0):
            for grads in sorted({params, states}):
                yield f"({params},{grads},{states})", degrees_as_strategy(cluster, params, grads, states)


def degrees_as_strategy(cluster: Cluster, params: int, grads: int, states: int) -> str:
    """AMSP's (s_p, s_g, s_os) in the notation, on a cluster of two levels."""
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
    """Seconds of all collectives of a step one after the other, with AMSP's mechanics.

    Gradients are all-reduced over whoever holds the same parameters and dropped where not owned: every micro-batch
    where they are sharded further than the parameters, else once; updated parameters are broadcast by their owners.
    """
    units, _ = schedule_units(setup.model, setup.workload.fixed(setup.micro_batch, setup.recomputation))
    schedule = Schedule.of(layout, units)
    compute = ComputeModel(device=setup.cluster.device, constants=setup.constants)
    transfers = TransferModel(setup.cluster, setup.constants, compute)
    chains = Chains(schedule, find_engine("amsp"), transfers)
    wire = setup.workload.wire_dtype
    three = [axis for axis in layout.param_axes if axis.size > 1]
    two = [axis for axis in layout.grad_axes if axis.size > 1 and axis not in three]
    micro = step = 0.0
    for index, unit in enumerate(units):
        gathers = 2 if unit.role is Role.BLOCK else 1
        numel = sum(buffer.numel for buffer in unit.buffers)
        micro += gathers * sum(work.cost.seconds for work in chains.unshard(index, from_kept=False))
        if three:
            micro += transfers.joint(three, "reduce_scatter", numel, wire).seconds
        if two:
            micro += transfers.joint(two, "all_reduce", -(-numel // layout.degree(three)), wire).seconds
        works = (*chains.reduce_boundary(index), *chains.refresh(index))
        step += sum(work.cost.seconds for work in works)
    return setup.micro_batches * micro + step


# PaRO ---------------------------------------------------------------------------------------------------------------


def _paro(setup: _Setup) -> tuple[_Named, _Objective, str]:
    inner, outer = setup.cluster.levels
    names = [(name, f"{inner.name}={a},{outer.name}={b}") for name, (a, b) in PARO.items()]
    return names, lambda layout: _paro_seconds(setup, layout), "max(communication, computation) in closed form"


def _paro_seconds(setup: _Setup, layout: Layout) -> float:
    """T = max(t_comm, t_comp), t_comm = (t_param + t_grad) * M + t_sync_g + t_sync_p."""
    name = next(key for key, pair in PARO.items() if pair == _pair(layout))
    communication = _PaRO.of(setup).seconds(name, setup.micro_batches)
    one = setup.bounds().micro_batch_s(setup.micro_batch, setup.recomputation)
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
        """t_comm of strategy `name`, of p, g, os in that order."""
        p, g, states = tuple(name)
        micro = 2 * self._gather(p, self.params_bytes) + self._gather(g, self.grads_bytes)
        return (
            micro_batches * micro
            + self._sync(g, states, self.grads_bytes, reduce=True)
            + self._sync(p, states, self.params_bytes, reduce=False)
        )

    def _gather(self, extent: str, volume: float) -> float:
        """Over the group (I) or all devices (G); a reduce-scatter takes as long."""
        inside = (self.inner - 1) / self.inner * volume / self.inside_bytes_per_s
        world = self.inner * self.groups
        return {"N": 0.0, "I": inside, "G": (world - 1) / world * volume / self.between_bytes_per_s}[extent]

    def _sync(self, extent: str, states: str, volume: float, *, reduce: bool) -> float:
        """From the extent of gradients to that of states, or back for parameters."""
        between = (self.groups - 1) / self.groups * volume / self.between_bytes_per_s
        if extent == states:
            # sharded alike: gradients still have to be summed over all who hold the same shard
            whole = {"N": 2 * self._gather("G", volume), "I": 2 * between, "G": 0.0}
            return whole[states] if reduce else 0.0
        if (extent, states) == ("N", "I"):
            return self._gather("I", volume) + (2 * between if reduce else 0.0)
        return self._gather("G", volume) if extent == "N" else between


# MiCS ---------------------------------------------------------------------------------------------------------------


def _mics(setup: _Setup) -> tuple[_Named, _Objective, str]:
    inner, outer = setup.cluster.levels
    degrees = [*divisors(inner.size), *(inner.size * size for size in divisors(outer.size)[1:])]
    names = [(f"group of {d}", degrees_as_strategy(setup.cluster, d, d, d)) for d in degrees]
    return names, _group_size, "the smallest group that fits"


def _group_size(layout: Layout) -> float:
    return float(prod(axis.size for axis in layout.param_axes))


_SPACES: dict[str, Callable[[_Setup], tuple[_Named, _Objective, str]]] = {"amsp": _amsp, "paro": _paro, "mics": _mics}
