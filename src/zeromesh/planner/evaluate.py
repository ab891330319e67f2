"""Simulated step time and memory of a candidate, at the price of a few blocks.

A model of equal blocks repeats itself: from some block on, one more adds the same seconds and bytes. So a candidate is
estimated from simulations of two small numbers of blocks, continued. The numbers have the parity of the real one, since
the gather slots and the reduce slots are two each and take turns. Where compute is the bound this is exact; where a
queue keeps growing over many blocks it has been seen 3 % off. So estimates only choose what is simulated whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from zeromesh.cluster import Cluster
from zeromesh.cost import Constants
from zeromesh.model import ModelSpec, Recomputation, UnitKind
from zeromesh.planner.bounds import Bounds
from zeromesh.planner.workload import Workload
from zeromesh.simulator import Mechanics, Simulation, find_engine, simulate, static_memory
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.collective import AUTO

_FEW = 6
"""Blocks of the smaller simulation: more than are in flight at once, prefetched, computing and being reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the search space; `bound_s` is its step time's bound from below."""

    strategy: Strategy
    micro_batch: int
    micro_batches: int
    recomputation: Recomputation
    bound_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.strategy}, micro-batch {self.micro_batch}, recomputation {self.recomputation.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Step time and peak memory; `whole` if all blocks were simulated, else continued from a few."""

    candidate: Candidate
    step_s: float
    memory_bytes: float
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A candidate with its whole simulation."""

    candidate: Candidate
    simulation: Simulation

    def to_json(self) -> dict[str, Any]:
        """What `simulate --json` prints, and the choices beside the strategy."""
        return self.simulation.to_json() | {
            "micro_batch": self.candidate.micro_batch,
            "recomputation": self.candidate.recomputation.value,
        }


@dataclass(slots=True)
class Evaluator:
    """Simulates candidates and remembers them.

    Args:
        model, cluster, workload: what is planned; the cluster cut to the world in use.
        engine: whose mechanics.
        constants: of the cost model.
        memory_margin: share of the device's memory to leave free.
    """

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    engine: str | Mechanics
    constants: Constants
    memory_margin: float
    _bounds: dict[tuple[tuple[str, ...], str], Bounds] = field(default_factory=dict, init=False)
    _estimates: dict[Candidate, Estimate] = field(default_factory=dict, init=False)
    _simulations: dict[Candidate, Simulation] = field(default_factory=dict, init=False)

    @property
    def mechanics(self) -> Mechanics:
        return find_engine(self.engine)

    @property
    def limit_bytes(self) -> float:
        """Of a device, the margin off."""
        return self.cluster.device.memory_bytes * (1 - self.memory_margin)

    @property
    def evaluated(self) -> list[Estimate]:
        return list(self._estimates.values())

    def bounds(self, wires: tuple[str, ...] = (), collective: str = AUTO) -> Bounds:
        """The bounds for wires by level, lossless ones if none are given, and a strategy's collectives."""
        key = (wires or ("",) * len(self.cluster.levels), collective)
        if key not in self._bounds:
            planned = self.mechanics.planned
            self._bounds[key] = Bounds(self.model, self.cluster, self.workload, self.constants, *key, planned)
        return self._bounds[key]

    def static_bytes(self, strategy: Strategy) -> float:
        """What every choice with `strategy` needs beside activations."""
        work = self.workload.fixed(1, Recomputation.NONE)
        return static_memory(
            self.model, self.cluster, strategy, work, engine=self.engine, constants=self.constants
        ).total

    def estimate(self, candidate: Candidate) -> Estimate:
        """Step time and memory of `candidate`."""
        key = replace(candidate, bound_s=0.0)
        if key not in self._estimates:
            self._estimates[key] = self._estimate(candidate)
        return self._estimates[key]

    def step_s(self, candidate: Candidate) -> float:
        """Of its estimate."""
        return self.estimate(candidate).step_s

    def measured(self, candidate: Candidate) -> Estimate:
        """Step time and memory of a whole simulation."""
        key = replace(candidate, bound_s=0.0)
        whole = self.simulation(candidate)
        self._estimates[key] = Estimate(
            candidate=candidate, step_s=whole.step_s, memory_bytes=whole.memory.total, whole=True
        )
        return self._estimates[key]

    def simulation(self, candidate: Candidate, *, record: bool = False) -> Simulation:
        """All blocks of `candidate`; with a trace if `record`."""
        key = replace(candidate, bound_s=0.0)
        if record or key not in self._simulations:
            self._simulations[key] = self._simulate(self.model, candidate, record=record)
        return self._simulations[key]

    def _estimate(self, candidate: Candidate) -> Estimate:
        """From few blocks; from all where units are joined, or owners share what all blocks have."""
        counts = _few_blocks(self.model)
        by_owners = self.workload.optimizer == "muon" or self.workload.ownership == "owners"
        if counts is None or by_owners or self._joins(candidate):
            return self.measured(candidate)
        few, more, all_of_them = counts
        low = self._simulate(_with_blocks(self.model, few), candidate)
        high = self._simulate(_with_blocks(self.model, more), candidate)
        times = (all_of_them - more) / (more - few)
        return Estimate(
            candidate=candidate,
            step_s=high.step_s + times * (high.step_s - low.step_s),
            memory_bytes=high.memory.total + times * (high.memory.total - low.memory.total),
        )

    def _joins(self, candidate: Candidate) -> bool:
        """Whether blocks are joined, so that one more does not add the same."""
        layout = Layout.of(candidate.strategy, self.cluster.axes)
        return layout.degree(layout.param_axes) == 1 and self.bounds().joins

    def _simulate(self, model: ModelSpec, candidate: Candidate, *, record: bool = False) -> Simulation:
        return simulate(
            model,
            self.cluster,
            candidate.strategy,
            self.workload.fixed(candidate.micro_batch, candidate.recomputation),
            engine=self.engine,
            constants=self.constants,
            memory_margin=self.memory_margin,
            record=record,
        )


def _few_blocks(model: ModelSpec) -> tuple[int, int, int] | None:
    """The two small numbers of blocks and the real one; None where the model has no single long row of blocks."""
    counts = [unit.count for unit in model.units if unit.kind is UnitKind.BLOCK]
    if len(counts) != 1 or counts[0] <= _FEW + 4:
        return None
    few = _FEW + counts[0] % 2
    return few, few + 2, counts[0]


def _with_blocks(model: ModelSpec, count: int) -> ModelSpec:
    units = tuple(replace(unit, count=count) if unit.kind is UnitKind.BLOCK else unit for unit in model.units)
    return replace(model, units=units)
