"""Step time and memory from a few of a model's blocks: [Note: Rows] of `zeromesh.simulator.steady`."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from zeromesh.model.spec import UnitKind
from zeromesh.schedule.memory import reduce_slots
from zeromesh.schedule.program import PointKind
from zeromesh.simulator.memory import host_bytes
from zeromesh.simulator.run import Setup, Setups, Step
from zeromesh.simulator.steady import Repeats

FEW_BLOCKS = 8
"""More blocks than are prefetched, computed and reduced at once, and than it takes to reach a steady state."""


def simulate_few(setups: Setups) -> tuple[float, float, float] | None:
    """Returns the results of `simulate_divided`: seconds of the step, bytes of memory, and bytes on the host. None if a
    few blocks do not determine them."""
    found = []
    for setup, idle_s in setups:
        step_s = _step_s(setup, idle_s)
        if step_s is None:
            return None
        found.append((step_s, *peak_bytes(setup)))
    step_s, memory, on_host = map(max, zip(*found, strict=True))
    return step_s, memory, on_host


def peak_bytes(setup: Setup) -> tuple[float, float]:
    """Peak bytes of memory, and bytes on the host. Neither depends on timing."""
    activations = setup.activations()
    activations.pass_through()
    return setup.peak_memory(activations).total, host_bytes(setup.schedule)


def _step_s(setup: Setup, idle_s: float) -> float | None:
    row = _row(setup)
    prefetch = setup.schedule.layout.strategy.prefetch
    period = lcm(prefetch + 1, reduce_slots(prefetch))
    few = FEW_BLOCKS + (len(row) - FEW_BLOCKS) % period
    if few + period > len(row):
        return None
    less = len(row) - few  # a block that is joined with the root is in no row
    units = [replace(u, count=u.count - less) if u.kind is UnitKind.BLOCK else u for u in setup.part.model.units]
    part = replace(setup.part, model=replace(setup.part.model, units=tuple(units)))
    short = Setup.of(setup.division, part, setup.strategy, setup.workload, setup.mechanics, setup.constants)
    of_few = Repeats(row=row[:few], period=period)
    step = Step(short, False, idle_s, of_few)
    step.run()
    if of_few.seconds is None:
        return None
    times = (len(row) - few) // period
    again_s = of_few.repetition_s(of_few.first) if _starts_alike(setup, short) else None
    first_s = _more_of_first_s(setup, of_few, row) if again_s is None else times * again_s
    if first_s is None:
        return None
    return step.step_s + first_s + times * of_few.seconds + setup.optimizer_seconds() - short.optimizer_seconds()


def _starts_alike(setup: Setup, short: Setup) -> bool:
    """Whether a step begins with the same refreshes in flight for any number of blocks."""
    every = [len(each.schedule.ops(PointKind.STEPPED)) for each in (setup, short)]
    return setup.mechanics.windowed and setup.schedule.memory.host is None and every[0] == every[1]


def _more_of_first_s(setup: Setup, of_few: Repeats, row: range) -> float | None:
    """Seconds that the first forward takes longer with all blocks (`row`)."""
    of_all = Repeats(row=row, period=of_few.period)
    Step(setup, False, 0.0, of_all).run_first_forward()
    (state, first_s), (short_state, short_first_s) = of_all.first[-1], of_few.first[-1]
    return first_s - short_first_s if state == short_state else None


def _row(setup: Setup) -> range:
    """Returns the blocks, by unit, if they are equal units in one row; else an empty range."""
    blocks = [index for index, specs in enumerate(setup.specs) if specs[0].kind is UnitKind.BLOCK]
    row = range(blocks[0], blocks[-1] + 1) if blocks else range(0)
    equal = len({id(setup.specs[index][0]) for index in row}) == 1
    joined = any(len(setup.specs[index]) > 1 for index in row)
    alike = not (joined or setup.owned or setup.strategy.parts) and setup.strategy.percent == 100
    return row if equal and alike else range(0)
