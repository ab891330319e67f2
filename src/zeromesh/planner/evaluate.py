"""Simulated step time and memory of candidates: from a few blocks if all others repeat them (`simulate_few`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.constants import Constants
from zeromesh.errors import short_repr
from zeromesh.model.spec import ModelSpec, Recomputation
from zeromesh.parallel import WHOLE, Parallel
from zeromesh.planner.bounds import Bounds
from zeromesh.planner.time_bound import Shared
from zeromesh.planner.workload import Workload
from zeromesh.simulator.division import Division
from zeromesh.simulator.few import peak_bytes, simulate_few
from zeromesh.simulator.mechanics import Mechanics, find_engine
from zeromesh.simulator.result import Simulation
from zeromesh.simulator.run import Setups, setups_of, setups_with, simulate_divided
from zeromesh.strategy import Stage, Strategy
from zeromesh.strategy.collective import AUTO
from zeromesh.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the search space; `bound_s` is the lower bound on its step time."""

    strategy: Strategy
    micro_batch: int
    micro_batches: int
    recomputation: Recomputation
    parallel: Parallel = WHOLE
    bound_s: float = field(default=0.0, compare=False)

    __repr__ = short_repr

    @property
    def named(self) -> str:
        """Its degrees of parallelism, if any, and its strategy."""
        return " ".join(text for text in (str(self.parallel), str(self.strategy)) if text)

    def __str__(self) -> str:
        return f"{self.named}, micro-batch {self.micro_batch}, recomputation {self.recomputation.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    candidate: Candidate
    step_s: float
    memory_bytes: float
    host_memory_bytes: float

    def differs(self, other: Estimate) -> bool:
        """Whether it is 1 % slower or faster, or a tenth smaller: smaller differences are not worth listing."""
        return abs(self.step_s / other.step_s - 1) > 0.01 or self.memory_bytes < 0.9 * other.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    candidate: Candidate
    simulation: Simulation

    __repr__ = short_repr

    def __str__(self) -> str:
        return f"{self.candidate}: {format_seconds(self.simulation.step_s)} a step, {self.simulation.memory_text}"

    def to_json(self) -> dict[str, Any]:
        """The output of `simulate --json`, with the choices besides the strategy."""
        return self.simulation.to_json() | {
            "micro_batch": self.candidate.micro_batch,
            "recomputation": self.candidate.recomputation.value,
        }


@dataclass(slots=True)
class Evaluator:
    """Simulates candidates and remembers them. The cluster is cut to the world in use; `memory_margin` is the share of
    the device's memory to leave free."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    engine: str | Mechanics
    constants: Constants
    memory_margin: float
    _divisions: dict[Parallel, Division] = field(default_factory=dict, init=False)
    _bounds: dict[tuple[tuple[str, ...], str, Parallel, Stage], tuple[Bounds, Bounds]] = field(
        default_factory=dict, init=False
    )
    _known: Shared = field(default_factory=Shared, init=False)
    _estimates: dict[Candidate, Estimate] = field(default_factory=dict, init=False)
    _simulations: dict[Candidate, Simulation] = field(default_factory=dict, init=False)
    # The last layout's: it is asked for with one choice after another, and making its schedule takes long.
    _last: tuple[tuple[Strategy, Parallel], Setups] | None = field(default=None, init=False)

    @property
    def mechanics(self) -> Mechanics:
        return find_engine(self.engine)

    @property
    def limit_bytes(self) -> float:
        """A device's memory less the margin."""
        return self.cluster.device.memory_bytes * (1 - self.memory_margin)

    @property
    def host_limit_bytes(self) -> float:
        """A device's share of its machine's usable memory."""
        return self.cluster.host_limit_bytes / self.cluster.machine_devices

    def fits(self, estimate: Estimate) -> bool:
        return self._within(estimate.memory_bytes, estimate.host_memory_bytes)

    def has_room(self, candidate: Candidate) -> bool:
        """Whether its estimate `fits`, found without simulating a step."""
        return all(self._within(*peak_bytes(setup)) for setup, _ in self._setups(candidate))

    def _within(self, memory_bytes: float, host_memory_bytes: float) -> bool:
        return memory_bytes <= self.limit_bytes and host_memory_bytes <= self.host_limit_bytes

    @property
    def evaluated(self) -> list[Estimate]:
        return list(self._estimates.values())

    def division(self, parallel: Parallel) -> Division:
        """Model and cluster, cut. Raises InputError if a degree does not divide a size that it cuts."""
        if parallel not in self._divisions:
            self._divisions[parallel] = Division.of(self.model, self.cluster, parallel, seq_len=self.workload.seq_len)
        return self._divisions[parallel]

    def bounds(
        self,
        wires: tuple[str, ...] = (),
        collective: str = AUTO,
        parallel: Parallel = WHOLE,
        host: Stage = Stage.ZERO,
    ) -> tuple[Bounds, Bounds]:
        """Bounds on time and on memory, for wires by level (default: lossless) and a strategy's collectives. In a
        pipeline they are of different ranks: time of the slowest kind, memory of the first, which holds most."""
        key = (wires or ("",) * len(self.cluster.levels), collective, parallel, host)
        if key not in self._bounds:
            division = self.division(parallel)
            every = [
                Bounds(
                    model=part.model,
                    cluster=division.cluster,
                    workload=self.workload,
                    constants=self.constants,
                    wires=key[0],
                    collective=collective,
                    mechanics=self.mechanics,
                    division=division if parallel.cuts else None,
                    part=index,
                    known=self._known,
                    host=host,
                )
                for index, part in enumerate(division.parts)
            ]
            slowest = every[0]
            if len(every) > 1:
                slowest = max(every, key=lambda bounds: bounds.micro_batch_s(1, Recomputation.NONE).total)
            self._bounds[key] = slowest, every[0]
        return self._bounds[key]

    def static_bytes(self, strategy: Strategy, parallel: Parallel) -> float:
        """Memory of every choice with `strategy`, without activations, on the first rank of a pipeline."""
        work = self.workload.fixed(1, Recomputation.NONE, parallel)
        setups = setups_of(self.division(parallel), strategy, work, self.engine, self.constants)
        return setups[0][0].memory(0.0).total

    def _setups(self, candidate: Candidate) -> Setups:
        work = self.workload.fixed(candidate.micro_batch, candidate.recomputation, candidate.parallel)
        layout = candidate.strategy, candidate.parallel
        if self._last is not None and self._last[0] == layout:
            return setups_with(self._last[1], work)
        setups = setups_of(self.division(candidate.parallel), candidate.strategy, work, self.engine, self.constants)
        self._last = layout, setups
        return setups

    def estimate(self, candidate: Candidate) -> Estimate:
        if candidate not in self._estimates:
            found = simulate_few(self._setups(candidate))
            if found is None:
                whole = self.simulation(candidate)
                found = whole.step_s, whole.memory.total, whole.host_memory_bytes
            step_s, memory_bytes, host_bytes = found
            self._estimates[candidate] = Estimate(
                candidate=candidate, step_s=step_s, memory_bytes=memory_bytes, host_memory_bytes=host_bytes
            )
        return self._estimates[candidate]

    def estimate_steps(self, candidate: Candidate, *, streamed: bool) -> Estimate:
        """As `estimate`. With states on the host, and if they may be `streamed`, for the better place of the step."""
        found = [self.estimate(candidate)]
        if streamed and candidate.strategy.host.shards_states:
            found.append(self.estimate(replace(candidate, strategy=replace(candidate.strategy, step="device"))))
        return min(found, key=lambda estimate: (not self.fits(estimate), estimate.step_s))

    def choice(self, candidate: Candidate, *, record: bool = False) -> Choice:
        return Choice(candidate=candidate, simulation=self.simulation(candidate, record=record))

    def simulation(self, candidate: Candidate, *, record: bool = False) -> Simulation:
        """Everything about `candidate`; with a trace if `record`."""
        if record or candidate not in self._simulations:
            self._simulations[candidate] = simulate_divided(
                self._setups(candidate), memory_margin=self.memory_margin, record=record
            )
        return self._simulations[candidate]
