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
from zeromesh.model.parallel import WHOLE, Parallel
from zeromesh.planner.bounds import Bounds
from zeromesh.planner.time_bound import Known
from zeromesh.planner.workload import Workload
from zeromesh.simulator import Mechanics, Simulation, find_engine
from zeromesh.simulator.division import Division
from zeromesh.simulator.owned import by_owners
from zeromesh.simulator.run import simulate_divided, static_memory
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
    parallel: Parallel = WHOLE
    bound_s: float = 0.0

    @property
    def named(self) -> str:
        """Its degrees, where the model is cut, and its strategy."""
        return " ".join(text for text in (str(self.parallel), str(self.strategy)) if text)

    def __str__(self) -> str:
        return f"{self.named}, micro-batch {self.micro_batch}, recomputation {self.recomputation.value}"


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
        model, cluster, workload: what is planned; the cluster that of the world in use, whatever takes part of it.
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
    _divisions: dict[Parallel, Division] = field(default_factory=dict, init=False)
    _bounds: dict[tuple[tuple[str, ...], str, Parallel], tuple[Bounds, Bounds]] = field(
        default_factory=dict, init=False
    )
    _known: Known = field(default_factory=Known, init=False)
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

    def division(self, parallel: Parallel) -> Division:
        """Model and cluster, cut.

        Raises:
            InputError: a degree does not divide what it cuts.
        """
        if parallel not in self._divisions:
            self._divisions[parallel] = Division.of(self.model, self.cluster, parallel, seq_len=self.workload.seq_len)
        return self._divisions[parallel]

    def bounds(
        self, wires: tuple[str, ...] = (), collective: str = AUTO, parallel: Parallel | None = None
    ) -> tuple[Bounds, Bounds]:
        """The bounds for wires by level, lossless ones if none are given, and a strategy's collectives: of time and of
        memory, which differ in a pipeline: its slowest kind of rank, and the first, which holds most."""
        parallel = parallel or WHOLE
        key = (wires or ("",) * len(self.cluster.levels), collective, parallel)
        if key not in self._bounds:
            division = self.division(parallel)
            every = [
                Bounds(
                    part.model,
                    division.cluster,
                    self.workload,
                    self.constants,
                    *key[:2],
                    self.mechanics,
                    division if parallel.cuts else None,
                    index,
                    self._known,
                )
                for index, part in enumerate(division.parts)
            ]
            slowest = every[0]
            if len(every) > 1:
                slowest = max(every, key=lambda bounds: bounds.micro_batch_s(1, Recomputation.NONE).total)
            self._bounds[key] = slowest, every[0]
        return self._bounds[key]

    def static_bytes(self, strategy: Strategy, parallel: Parallel) -> float:
        """What every choice with `strategy` needs beside activations."""
        work = self.workload.fixed(1, Recomputation.NONE, parallel)
        division = self.division(parallel)
        return static_memory(division, strategy, work, engine=self.engine, constants=self.constants).total

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
            self._simulations[key] = self._simulate(self.division(candidate.parallel), candidate, record=record)
        return self._simulations[key]

    def _estimate(self, candidate: Candidate) -> Estimate:
        """From few blocks; from all where units are joined, or owners share what all blocks have."""
        division = self.division(candidate.parallel)
        counts = _few_blocks(division)
        owned = by_owners(self.workload.optimizer, self.workload.ownership, self.mechanics)
        if counts is None or owned or self._joins(candidate):
            return self.measured(candidate)
        few, more, all_of_them = counts
        low = self._simulate(_with_blocks(division, few), candidate)
        high = self._simulate(_with_blocks(division, more), candidate)
        times = (all_of_them - more) / (more - few)
        return Estimate(
            candidate=candidate,
            step_s=high.step_s + times * (high.step_s - low.step_s),
            memory_bytes=high.memory.total + times * (high.memory.total - low.memory.total),
        )

    def _joins(self, candidate: Candidate) -> bool:
        """Whether blocks are joined, so that one more does not add the same."""
        layout = Layout.of(candidate.strategy, self.division(candidate.parallel).cluster.axes)
        return layout.degree(layout.param_axes) == 1 and self.bounds(parallel=candidate.parallel)[0].joins

    def _simulate(self, division: Division, candidate: Candidate, *, record: bool = False) -> Simulation:
        return simulate_divided(
            division,
            candidate.strategy,
            self.workload.fixed(candidate.micro_batch, candidate.recomputation, candidate.parallel),
            engine=self.engine,
            constants=self.constants,
            memory_margin=self.memory_margin,
            record=record,
        )


def _few_blocks(division: Division) -> tuple[int, int, int] | None:
    """The two small numbers of blocks and the real one; None where the model has no single long row of blocks."""
    rows = {tuple(u.count for u in part.model.units if u.kind is UnitKind.BLOCK) for part in division.parts}
    counts = rows.pop()
    if rows or len(counts) != 1 or counts[0] <= _FEW + 4:
        return None
    few = _FEW + counts[0] % 2
    return few, few + 2, counts[0]


def _with_blocks(division: Division, count: int) -> Division:
    parts = [replace(part, model=_of_blocks(part.model, count)) for part in division.parts]
    return replace(division, parts=tuple(parts))


def _of_blocks(model: ModelSpec, count: int) -> ModelSpec:
    units = tuple(replace(unit, count=count) if unit.kind is UnitKind.BLOCK else unit for unit in model.units)
    return replace(model, units=units)
