"""A schedule on the simulator's clock, with seconds of units that were measured. Torch-free.

`zeromesh simulate` makes the schedule from a model's description and takes seconds from the cost model. Here both are
given: the schedule that the engine has run, and what each unit was measured to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeromesh.cluster import Cluster
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.errors import InputError
from zeromesh.schedule import FlatBuffer, Interpreter, Role, Schedule, Unit
from zeromesh.schedule.step import Phase, run_micro_batch
from zeromesh.simulator.chains import Chains
from zeromesh.simulator.clock import ClockBackend
from zeromesh.simulator.mechanics import find_engine
from zeromesh.simulator.network import Job
from zeromesh.strategy import Strategy, layouts_of
from zeromesh.trace import Trace

JOINED = " to "
"""Between the first and the last name of units that the engine has joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Seconds of one rank.

    Args:
        forward, backward: of one micro-batch, by unit, in the order in which the model registers them.
        optimizer_s: of a step over all `elements`.
        elements: of the model.
        agreement_s: in which all ranks agree, at the end of a step, on which parameters had gradients; nobody waits for
            that where no parameters are sharded.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    optimizer_s: float
    elements: int
    agreement_s: float = 0.0

    def seconds(self, phase: Phase, name: str) -> float:
        """Of what was measured under this name.

        Raises:
            InputError: it is recomputed.
        """
        if phase == "recompute":
            raise InputError("seconds of units were measured without activation checkpointing")
        return (self.forward if phase == "forward" else self.backward)[name]

    def parts(self, schedule: Schedule) -> dict[str, int]:
        """By what was measured, root first, the unit of `schedule` that holds it: its own, or one of several that the
        engine has joined; the root has whatever no other unit names.

        Raises:
            InputError: a unit has not been measured.
        """
        unit_of = dict.fromkeys(self.forward, 0)
        for index, unit in enumerate(schedule.units):
            if unit.name:
                unit_of |= dict.fromkeys(self._members(unit.name), index)
        return dict(sorted(unit_of.items(), key=lambda part: (part[0] != "", schedule.order.index(part[1]))))

    def _members(self, unit: str) -> Sequence[str]:
        names = list(self.forward)
        first, _, last = unit.partition(JOINED)
        if first not in names or (last or first) not in names:
            raise InputError(
                f"unit {unit!r} has not been measured; known: {', '.join(name or 'root' for name in names)}"
            )
        return names[names.index(first) : names.index(last or first) + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One step as the simulator sees it; bytes are a rank's, by axis."""

    step_s: float
    compute_s: float
    exposed_s: float
    sent_bytes: Mapping[str, float]
    trace: Trace


def replay(schedule: Schedule, cluster: Cluster, compute: Compute, *, micro_batches: int) -> Replayed:
    """Runs a steady step of `schedule` on a virtual clock.

    Args:
        schedule: of the engine, in the order that its first step has shown.
        cluster: its levels are the axes of the schedule's mesh.
        compute: seconds of its units.
        micro_batches: of the step.
    """
    constants, mechanics = default_constants(), find_engine("zeromesh")
    transfers = TransferModel.of(cluster, constants, ComputeModel(device=cluster.device, constants=constants))
    names = tuple(unit.name for unit in schedule.units)
    chains = Chains(schedule, mechanics, transfers)
    clock = ClockBackend(chains, mechanics, names, record=True, cores=cluster.device.cores)
    interpreter: Interpreter[Job] = Interpreter(schedule=schedule, backend=clock)

    parts = compute.parts(schedule)
    measured = list(parts)

    def computed(phase: Phase, part: int) -> None:
        name = measured[part]
        clock.compute(phase, parts[name], compute.seconds(phase, name))

    interpreter.stepped(range(len(names)))
    for micro in range(micro_batches):
        clock.micro_batch = micro
        last = micro == micro_batches - 1
        run_micro_batch(interpreter, last=last, compute=computed, parts=list(parts.values()))
    clock.drain()
    clock.micro_batch = -1
    share = schedule.layout.degree(schedule.layout.significant)
    clock.compute("optimizer", -1, compute.optimizer_s / share)
    totals = clock.totals
    return Replayed(
        # The engine's few words between the last reduction and the optimizer; no schedule has them.
        step_s=clock.now_s + (compute.agreement_s if schedule.shards_params else 0.0),
        compute_s=totals.compute_s,
        exposed_s=sum(totals.exposed_s.values()),
        sent_bytes={axis.name: totals.sent_bytes[axis.name] for axis in schedule.axes},
        trace=Trace(
            label=f"{schedule.strategy} on {cluster.name} (predicted)",
            events=tuple(sorted(clock.events, key=lambda event: (event.start_s, event.resource))),
        ),
    )


def schedule_json(schedule: Schedule) -> dict[str, Any]:
    """A schedule for a result file; `read_schedule` is its inverse, but for the collectives' workspace."""
    return {
        "strategy": str(schedule.strategy),
        "mesh": list(schedule.layout.mesh),
        "parts": {part: list(layout.mesh) for part, layout in schedule.parts.items()},
        "order": list(schedule.order),
        "units": [
            {"name": unit.name, "role": unit.role.value, "buffers": [_buffer_json(buffer) for buffer in unit.buffers]}
            for unit in schedule.units
        ],
    }


def read_schedule(data: Mapping[str, Any]) -> Schedule:
    """The schedule that `schedule_json` has written."""
    units = [
        Unit(
            name=unit["name"],
            role=Role(unit["role"]),
            buffers=tuple(FlatBuffer(**buffer) for buffer in unit["buffers"]),
        )
        for unit in data["units"]
    ]
    sizes = {part: [(name, size) for name, size in mesh] for part, mesh in data.get("parts", {}).items()}
    layouts = layouts_of(Strategy.parse(data["strategy"]), [(name, size) for name, size in data["mesh"]], sizes)
    return Schedule.of(layouts.pop(""), units, parts=layouts).reordered(data["order"])


def _buffer_json(buffer: FlatBuffer) -> dict[str, Any]:
    names = ("numel", "param_dtype", "master_dtype", "grad_dtype", "reduce_dtype", "part")
    return {name: getattr(buffer, name) for name in names}
