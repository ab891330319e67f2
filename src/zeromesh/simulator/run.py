"""Simulates one training step: drives the engine's schedule point by point on a virtual clock.

Micro-batches repeat: if the traffic in flight is the same at the end of two micro-batches in a row, all later ones are
alike. Then only the last is simulated (it reduces to the state shard). This is exact: equal states have equal futures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from zeromesh.cluster.cluster import Cluster
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import Constants, default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.errors import InputError, NotationError
from zeromesh.model.spec import ModelSpec, UnitSpec
from zeromesh.schedule.bucket import Bucket, BucketSteps
from zeromesh.schedule.interpreter import Interpreter
from zeromesh.schedule.lanes import lent_axes
from zeromesh.schedule.program import Schedule
from zeromesh.schedule.step import Phase, run_forward, run_micro_batch
from zeromesh.schedule.transfer import COPIES, HOST_AXIS
from zeromesh.simulator.chains import Chains
from zeromesh.simulator.clock import ABREAST, ClockBackend, HostSeconds, Totals
from zeromesh.simulator.computation import Computation, MicroBatchSeconds, collecting_seconds, held_bytes, idle_seconds
from zeromesh.simulator.division import Division, Part
from zeromesh.simulator.mechanics import Mechanics, find_engine
from zeromesh.simulator.memory import (
    MOMENTS,
    Activations,
    MemoryBytes,
    host_bytes,
    optimizer_bytes,
    state_elements,
    streamed_bytes,
    unreduced_bytes,
)
from zeromesh.simulator.network import Job
from zeromesh.simulator.owned import OwnedTensors, owned_tensors
from zeromesh.simulator.result import AxisTraffic, PipelineRank, Simulation
from zeromesh.simulator.steady import Repeats
from zeromesh.simulator.units import schedule_units
from zeromesh.simulator.workload import FixedWorkload
from zeromesh.strategy import Layout, Strategy
from zeromesh.strategy.parts import layouts_of
from zeromesh.strategy.stage import HOST
from zeromesh.trace import Trace

T = TypeVar("T")

DEFAULT_MARGIN = 0.08


def simulate(
    model: ModelSpec,
    cluster: Cluster,
    strategy: Strategy | str,
    workload: FixedWorkload,
    *,
    engine: str | Mechanics = "zeromesh",
    constants: Constants | None = None,
    memory_margin: float = DEFAULT_MARGIN,
    record: bool = False,
) -> Simulation:
    """Simulates one step in steady state.

    Args:
        cluster: the ranks in use (`Cluster.take`); its levels are the mesh axes.
        engine: a name in `ENGINES`, or other mechanics.
        constants: the cost model's constants. Default: the shipped ones.
        memory_margin: share of the device's memory to leave free.
        record: simulate every micro-batch and keep a `Trace`.

    Raises:
        MeshError: the strategy does not fit the cluster's levels.
        ConfigError: the engine is unknown, or the batch does not divide.
    """
    division = Division.of(model, cluster, workload.parallel, seq_len=workload.seq_len)
    setups = setups_of(division, strategy, workload, engine, constants)
    return simulate_divided(setups, memory_margin=memory_margin, record=record)


Setups = Sequence[tuple["Setup", float]]
"""Setup and idle seconds of each kind of pipeline rank; one pair if there is no pipeline."""


def simulate_divided(setups: Setups, *, memory_margin: float = DEFAULT_MARGIN, record: bool = False) -> Simulation:
    """`simulate` for parts that are divided already. Each kind of pipeline rank is simulated separately.

    A rank is idle for the time of one micro-batch on all other ranks (`Parallel.bubble_s`). With equal ranks this is
    the figure in the schedules' papers. With unequal ranks all wait for the slowest, whose step is (m - 1) * longest +
    sum of all.
    """
    found = []
    for setup, idle_s in setups:
        step = Step(setup, record, idle_s)
        found.append(_result(setup, step, step.run(), memory_margin))
    division = setups[0][0].division
    if len(found) == 1 and division.parallel.pp == 1:
        return found[0]
    slowest, fullest = max(found, key=lambda one: one.step_s), max(found, key=lambda one: one.memory.total)
    ranks = tuple(
        PipelineRank(rank=part.rank, count=part.count, step_s=one.step_s, memory_bytes=one.memory.total)
        for part, one in zip(division.parts, found, strict=True)
    )
    return replace(slowest, memory=fullest.memory, ranks=ranks)


def setups_of(
    division: Division,
    strategy: Strategy | str,
    workload: FixedWorkload,
    engine: str | Mechanics = "zeromesh",
    constants: Constants | None = None,
) -> Setups:
    """Returns the setups of a step, as in `simulate`, for parts that are divided already."""
    return _with_idle(division, [Setup.of(division, p, strategy, workload, engine, constants) for p in division.parts])


def setups_with(setups: Setups, workload: FixedWorkload) -> Setups:
    """Returns the setups with another micro-batch or recomputation. Schedules do not depend on these."""
    return _with_idle(setups[0][0].division, [replace(setup, workload=workload) for setup, _ in setups])


def _with_idle(division: Division, setups: Sequence[Setup]) -> Setups:
    if division.parallel.pp == 1:  # no others to wait for; a search comes here thousands of times
        return [(setup, 0.0) for setup in setups]
    return list(zip(setups, idle_seconds(division, [setup.micro_batch_s() for setup in setups]), strict=True))


def _lent(layouts: Iterable[Layout]) -> dict[str, str]:
    return lent_axes(layouts, lambda _, axis: (axis.mesh_axis, axis.size, axis.stride))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    division: Division
    part: Part
    workload: FixedWorkload
    mechanics: Mechanics
    strategy: Strategy  # as given; the schedule's is the engine's
    constants: Constants
    compute: ComputeModel
    transfers: TransferModel
    schedule: Schedule
    specs: tuple[tuple[UnitSpec, ...], ...]  # of each unit of the schedule
    owned: tuple[OwnedTensors, ...]  # of each optimizer that steps by owners

    @classmethod
    def of(
        cls,
        division: Division,
        part: Part,
        strategy: Strategy | str,
        workload: FixedWorkload,
        engine: str | Mechanics,
        constants: Constants | None,
    ) -> Setup:
        mechanics, model, cluster = find_engine(engine), part.model, division.cluster
        constants = (constants or default_constants()).on(cluster)
        mechanics.check_products(model)
        asked = Strategy.parse(strategy, [name for name, _ in cluster.axes])
        _require_on_device(asked, mechanics, workload)
        _require_parts(asked, workload, mechanics)
        layouts = layouts_of(mechanics.carried_out(asked), cluster.axes, {})
        whole = not any(layout.gathers for layout in layouts.values())
        layout = layouts.pop("")
        shares = {"": asked.percent} if asked.percent < 100 else {}
        units, specs = schedule_units(model, workload, mechanics.bucket_bytes if whole else 0, tuple(layouts), shares)
        dtype = cluster.device.compute_dtype(workload.param_dtype)
        compute = ComputeModel(device=cluster.device, constants=constants, dtype=dtype)
        messages = cluster.messages if mechanics.workspace else None
        parts = layouts | division.layouts(layout)
        lent = _lent((layout, *parts.values()))
        schedule = Schedule.of(layout, units, parts=parts, messages=messages, lent=lent)
        owned = owned_tensors(schedule, specs, compute, workload, mechanics)
        for each in owned:
            schedule = schedule.with_owned(each.buckets)
        return cls(
            division=division,
            part=part,
            workload=workload,
            mechanics=mechanics,
            strategy=asked,
            constants=constants,
            compute=compute,
            transfers=TransferModel.of(cluster, constants, compute),
            schedule=schedule,
            specs=specs,
            owned=owned,
        )

    @property
    def model(self) -> ModelSpec:
        return self.part.model

    @property
    def cluster(self) -> Cluster:
        """The cluster that remains for data parallelism."""
        return self.division.cluster

    @property
    def micro_batches(self) -> int:
        return self.workload.micro_batches(self.cluster.world)

    @property
    def host(self) -> HostSeconds:
        """The host's times. If the processor computes itself, collectives include its calls."""
        if self.cluster.device.cores is not None:
            return ABREAST
        return HostSeconds(self.constants.host_issue_s, self.constants.host_ahead_s)

    def memory(self, dynamic_bytes: float) -> MemoryBytes:
        """Memory of one device, given the peak of dynamic memory."""
        axes = sum(axis.size > 1 for axis in self.schedule.axes) - len(_lent(self.schedule.layouts))
        axes += len(self.division.groups)
        overhead = self.constants.overhead_bytes(
            messages=self.cluster.messages,
            communicators=self.mechanics.communicators * axes,
            dynamic_bytes=dynamic_bytes,
        )
        # The rank that holds most of owned tensors has these instead of AdamW's states for their slices.
        most = max(map(sum, zip(*(each.held_bytes for each in self.owned), strict=True)), default=0.0)
        owned = most - sum(each.sliced_bytes for each in self.owned)
        plan = self.schedule.memory
        return MemoryBytes(
            params=float(plan.params_bytes) + self.model.whole_bytes,
            grads=float(plan.grads_bytes),
            optimizer=optimizer_bytes(self.schedule) + owned,
            # Reduce buffers that are allocated for each backward are part of dynamic memory.
            buffers=float(plan.buffers_bytes - (0 if self.mechanics.planned else plan.reduce.total_bytes)),
            activations=dynamic_bytes,
            overhead=overhead,
        )

    @property
    def room_bytes(self) -> float:
        """Peak temporary memory of a step by owners. Optimizers step one after the other."""
        return max((room for each in self.owned for room in each.room_bytes), default=0.0)

    def parts(self) -> tuple[UnitSpec, ...]:
        """The computing parts in order; one unit of the schedule may have several."""
        return tuple(spec for specs in self.specs for spec in specs)

    def by_part(self, values: Sequence[T]) -> tuple[T, ...]:
        """Repeats values by unit for each of the unit's parts."""
        return tuple(value for value, specs in zip(values, self.specs, strict=True) for _ in specs)

    def computations(self, collecting: Sequence[float]) -> list[Computation]:
        """Returns the computation of each part, given the seconds for collecting its gradients."""
        pairs, known = list(zip(self.parts(), collecting, strict=True)), dict[tuple[int, float], Computation]()
        for spec, later in pairs:
            if (id(spec), later) not in known:
                one = Computation.of(spec, self.division, self.compute, self.transfers, self.workload)
                known[id(spec), later] = one.collecting(later)
        return [known[id(spec), later] for spec, later in pairs]

    def collecting(self) -> list[tuple[float, float]]:
        """Returns, by part, the seconds of collecting gradients from autograd: first micro-batch, and later ones."""
        if not self.mechanics.collects:
            return [(0.0, 0.0)] * len(self.parts())
        kinds = {tuple(map(id, placed)): placed for placed in self.schedule.placed}  # equal units share a key
        alone = self.micro_batches == 1
        known = {kind: collecting_seconds(placed, self.compute, alone=alone) for kind, placed in kinds.items()}
        found = []
        for placed, specs in zip(self.schedule.placed, self.specs, strict=True):
            first, later = known[tuple(map(id, placed))]
            trained = max(1, sum(spec.num_trainable for spec in specs))
            found += [(first * share, later * share) for share in (spec.num_trainable / trained for spec in specs)]
        return found

    def micro_batch_s(self) -> MicroBatchSeconds:
        """Seconds of this rank in every micro-batch except a step's first."""
        return MicroBatchSeconds.of((1, one) for one in self.computations([later for _, later in self.collecting()]))

    def activations(self, *, record: bool = False) -> Activations:
        """Returns the activations before the step."""
        held = held_bytes(self.part, self.division.parallel, self.workload, self.micro_batches)
        return Activations(
            self.parts(),
            self.workload.micro_batch_tokens,
            self.workload.seq_len,
            self.workload.recomputation,
            self.by_part(unreduced_bytes(self.schedule, self.specs, planned=self.mechanics.planned)),
            record=record,
            now=held,
            peak=held,
        )

    def peak_memory(self, activations: Activations) -> MemoryBytes:
        stepping = max(self.mechanics.step_bytes * state_elements(self.schedule), self.room_bytes)
        return self.memory(max(activations.peak, stepping + streamed_bytes(self.schedule)))

    def optimizer_seconds(self) -> float:
        """Seconds of the optimizer's step on the device."""
        layout = self.schedule.layout
        owned = sum(each.numel for each in self.owned) / layout.degree(layout.significant)
        return self.compute.optimizer(sum(self._sliced(on_host=False)) - owned)

    def host_steps(self) -> list[tuple[float, float]]:
        """Returns, by unit, seconds and bytes of work beside the next forward. Seconds are for the step on the host, in
        memory that a machine's devices share, and for copies of a step on the device. Bytes are those of the copies."""
        steps = []
        for numel, unit in zip(self._sliced(on_host=True), self.schedule.placed, strict=True):
            copies = [copy for placed in unit for copy in placed.stream(MOMENTS)]
            ways = [sum(c.sent_bytes for c in copies if c.operation == way) for way in COPIES]
            seconds = self.compute.host_step(numel, self.cluster.machine_devices)
            seconds += max(ways) / self.compute.constants.host_copy_bytes_per_s
            steps.append((seconds, float(sum(ways))))
        return steps

    def _sliced(self, *, on_host: bool) -> list[float]:
        """Returns, by unit, trained elements of a rank's state shards stepped on in one place, without padding."""
        return [
            sum(
                each.buffer.numel / each.layout.degree(each.layout.significant)
                for each in unit
                if each.buffer.trainable and ("master" in each.on_host_kinds and not each.streamed) == on_host
            )
            for unit in self.schedule.placed
        ]


def _require_on_device(strategy: Strategy, mechanics: Mechanics, workload: FixedWorkload) -> None:
    """Raises NotationError for shards on the host together with a feature that supports none."""
    named = [*without_host(workload, mechanics), *(["a pipeline"] if workload.parallel.pp > 1 else [])]
    shares = any(each.percent < 100 for each in (strategy, *dict(strategy.parts).values()))
    named += ["parts, for a share of the tensors"] if shares and strategy.parts else []
    if strategy.hosted and named:
        raise NotationError(
            f"{strategy} keeps shards in the host's memory, which is not predicted for {' and '.join(named)}: leave "
            f"{HOST}= and h out"
        )


def without_host(workload: FixedWorkload, mechanics: Mechanics) -> list[str]:
    """Names an engine or optimizers for which parts and shards on the host are not predicted."""
    found = {
        f"engine {mechanics.name}": mechanics.name != "zeromesh",
        "optimizers that step by owners": workload.optimizer == "muon" or workload.ownership == "owners",
    }
    return [name for name, there in found.items() if there]


def _require_parts(strategy: Strategy, workload: FixedWorkload, mechanics: Mechanics) -> None:
    """Raises InputError for parts with their own layout if a feature needs one layout for all."""
    cut = [f"a model that is cut by {workload.parallel}"] if workload.parallel.cuts else []
    named = [*without_host(workload, mechanics), *cut]
    if strategy.parts and named:
        raise InputError(
            f"strategy {strategy} has strategies for parts of the model, which cannot be predicted beside "
            f"{', '.join(named)}: leave {', '.join(part for part, _ in strategy.parts)} out, or that"
        )


class Step:
    """One step, from one optimizer step to the next. In between, only updated parameters are in flight."""

    def __init__(self, setup: Setup, record: bool, idle_s: float, repeats: Repeats | None = None) -> None:
        self.setup, self.record, self.idle_s, self.repeats = setup, record, idle_s, repeats
        self.backend = ClockBackend(
            Chains(setup.schedule, setup.mechanics, setup.transfers),
            record=record,
            host=setup.host,
            steps=() if setup.schedule.memory.host is None else setup.host_steps(),
        )
        self.interpreter: Interpreter[Job] = Interpreter(schedule=setup.schedule, backend=self.backend)
        self.activations = setup.activations(record=record)
        collecting = setup.collecting()
        self.computations = setup.computations([later for _, later in collecting])
        self.saved_s = [later - first for first, later in collecting]
        self.units = setup.by_part(range(len(setup.specs)))
        parts, recomputation = list(enumerate(setup.parts())), setup.workload.recomputation
        self.recomputed = {index for index, part in parts if part.recomputes(recomputation)}
        self.returned = {index for index, part in parts if part.returned}
        self.step_s = 0.0
        self._entered: dict[int, float] = {}

    def run(self) -> Totals:
        """Runs the step. The clock ends at `step_s` less the skipped seconds."""
        self._updated()
        skipped_s, skipped = self._micro_batches()
        for buckets in self.setup.schedule.buckets:
            BucketSteps[Bucket, Job]().step(self.backend, buckets)
        self.backend.compute("optimizer", -1, self.setup.optimizer_seconds())
        self.step_s = self.backend.now_s + skipped_s
        totals = self.backend.totals
        for later, earlier, times in skipped:
            totals.add_difference(later, earlier, times)
        return totals

    def run_first_forward(self) -> None:
        self._updated()
        self.backend.micro_batch = 0
        run_forward(self.interpreter, compute=self._compute, returned=self.returned.__contains__, parts=self.units)

    def _updated(self) -> None:
        self.backend.begin_step()
        self.interpreter.stepped(range(len(self.setup.schedule.units)))
        if not self.setup.mechanics.windowed:
            self.interpreter.catch_up()
        if not self.setup.mechanics.overlap_refresh:
            self.backend.drain()

    def _micro_batches(self) -> tuple[float, list[tuple[Totals, Totals, int]]]:
        """Runs all micro-batches, or skips those that are alike. Returns the seconds and totals of those skipped."""
        count = self.setup.micro_batches
        before: object = None
        done = 0
        while done < count - 1:
            start_s, start = self.backend.now_s, self.backend.totals.copy()
            self._micro_batch(done, last=False)
            if done == 0:
                # The first rank of a pipeline ends last. It waits between its first forward and its last backward.
                self.backend.idle("pp", "bubble", self.idle_s)
            done += 1
            after = self.backend.signature()
            if after == before and not self.record:
                alike = count - 1 - done
                skipped = (self.backend.totals.copy(), start, alike)
                duration = self.backend.now_s - start_s
                if self.repeats is not None:
                    self.repeats.end_micro_batch(alike)
                self._micro_batch(count - 1, last=True)
                return alike * duration, [skipped]
            before = after
        self._micro_batch(count - 1, last=True)
        return 0.0, []

    def _micro_batch(self, index: int, *, last: bool) -> None:
        self.backend.micro_batch = index
        run_micro_batch(
            self.interpreter,
            last=last,
            compute=self._compute,
            recompute=self.recomputed.__contains__,
            returned=self.returned.__contains__,
            parts=self.units,
        )
        self.backend.end_micro_batch()
        if self.repeats is not None:
            self.repeats.end_micro_batch()
        if last:
            self.backend.drain()
        self.backend.micro_batch = -1

    def _compute(self, phase: Phase, part: int) -> None:
        backend, activations, unit = self.backend, self.activations, self.units[part]
        if part not in self._entered:
            forward = phase == "forward"
            if self.repeats is not None:
                self.repeats.enter(unit, forward=forward, interpreter=self.interpreter, backend=backend)
            if not forward:
                self._entered[part] = activations.now
                activations.enter_backward(part, backend.now_s)
        computation = self.computations[part]
        saved_s = self.saved_s[part] if phase == "backward" and backend.micro_batch == 0 else 0.0
        backend.compute(phase, unit, computation.compute_s(phase) - saved_s, computation.seconds.moving)
        backend.communicate(unit, computation.within[phase])
        if phase == "forward":
            activations.forward(part, backend.now_s)
        elif phase == "backward":
            activations.leave_backward(part, self._entered.pop(part), backend.now_s)


def _result(setup: Setup, step: Step, totals: Totals, memory_margin: float) -> Simulation:
    workload, cluster = setup.workload, setup.cluster
    tokens_per_s = workload.global_batch_tokens / step.step_s / cluster.devices
    memory = setup.peak_memory(step.activations)
    axes = [(axis.name, axis.size, axis.stage.value) for axis in setup.schedule.axes]
    if setup.schedule.memory.host is not None:
        axes.append((HOST_AXIS.name, HOST_AXIS.size, setup.strategy.host.value))
    axes += [(name, getattr(setup.division.parallel, name), "") for name, _ in setup.division.groups]
    exposed = sorted(((axes, name, s) for (axes, name), s in totals.exposed_s.items()), key=lambda item: -item[2])
    return Simulation(
        strategy=str(setup.strategy),
        engine=setup.mechanics.name,
        world=cluster.devices,
        micro_batches=setup.micro_batches,
        step_s=step.step_s,
        tokens_per_s_per_device=tokens_per_s,
        mfu=tokens_per_s
        * setup.division.whole.model_flops_per_token(workload.seq_len)
        / cluster.device.peak(setup.compute.dtype),
        compute_s=totals.compute_s,
        exposed_comm_s=sum(s for _, _, s in exposed),
        exposed=tuple(exposed),
        memory=memory,
        memory_limit_bytes=cluster.device.memory_bytes * (1 - memory_margin),
        host_memory_bytes=host_bytes(setup.schedule),
        machine_devices=cluster.machine_devices,
        machine_limit_bytes=cluster.host_limit_bytes,
        axes=tuple(
            AxisTraffic(axis=name, size=size, stage=stage, bytes_sent_per_device=totals.sent_bytes[name])
            for name, size, stage in axes
        ),
        parallel=setup.division.parallel,
        owners=tuple(each.share for each in setup.owned),
        trace=_trace(setup, step, memory.total - memory.activations) if step.record else None,
    )


def _trace(setup: Setup, step: Step, static_bytes: float) -> Trace:
    names = (setup.model.name, str(setup.strategy), str(setup.division.parallel))
    return Trace(
        label=f"{' '.join(filter(None, names))} on {setup.cluster.name} ({setup.mechanics.name}, simulated)",
        events=tuple(sorted(step.backend.events, key=lambda event: (event.start_s, event.resource))),
        memory=tuple((at, size + static_bytes) for at, size in [(0.0, 0.0), *step.activations.changes]),
    )
