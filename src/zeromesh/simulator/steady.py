"""Finds repeated states in a step, so that a long row of equal blocks need not be simulated completely.

[Note: Rows] In a row of equal blocks, a phase (one micro-batch's forward or backward) returns to an earlier state. All
that is in flight, that lies in slots and that is known of nearby units is the same as some blocks ago, seen from the
running block. Equal states have equal futures, so further blocks repeat the ones in between. A few blocks are simulated
and searched for such a state in every phase. If each phase has one, the step with all blocks is theirs plus that many
repetitions, exactly. Slots take turns, so states can only be equal if the same slots are next (`period`). If a queue
grows from block to block, no state returns, and all blocks have to be simulated.

The first forward is different, since refreshes are in flight as it begins. If all units have refreshes in flight, more
blocks change the traffic beside the first blocks. Then the first forward is simulated with all blocks, and must reach
the same state as with few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from zeromesh.schedule.interpreter import Interpreter, UnitState
from zeromesh.schedule.state import GradState
from zeromesh.simulator.clock import ClockBackend
from zeromesh.simulator.network import Job


@dataclass(slots=True)
class Repeats:
    row: range  # the blocks, by unit
    period: int  # blocks after which the same slots are next
    # Seconds of `period` further blocks in all finished phases except the first; None if a phase did not repeat.
    seconds: float | None = 0.0
    # States and times at the start of the first forwards, up to the last block's.
    first: list[tuple[object, float]] = field(default_factory=list)
    _phases: dict[bool, list[tuple[object, float]]] = field(default_factory=lambda: {True: [], False: []})
    _last_s: float = 0.0

    def enter(self, unit: int, *, forward: bool, interpreter: Interpreter[Job], backend: ClockBackend) -> None:
        """Notes that the unit's forward or backward begins."""
        if unit not in self.row or self.seconds is None:
            return
        marks = self.first if len(self.first) < len(self.row) else self._phases[forward]
        marks.append((self._state(unit, interpreter, backend), backend.now_s))

    def end_micro_batch(self, times: int = 1) -> None:
        """Ends `times` equal micro-batches."""
        found = [self.repetition_s(marks) for marks in self._phases.values() if marks]
        for marks in self._phases.values():
            marks.clear()
        if found:
            self._last_s = 0.0 if None in found else sum(filter(None, found))
        if None in found:
            self.seconds = None
        if self.seconds is not None:
            self.seconds += times * self._last_s

    def repetition_s(self, marks: Sequence[tuple[object, float]]) -> float | None:
        """Seconds of `period` blocks in the phase of these marks; None if it does not repeat."""
        for (state, earlier_s), (later, later_s) in reversed(list(zip(marks, marks[self.period :], strict=False))):
            if state == later:
                return later_s - earlier_s
        return None

    def _state(self, unit: int, interpreter: Interpreter[Job], backend: ClockBackend) -> object:
        """Returns everything that the future depends on. Units of the row are named by their distance."""

        def name(other: int) -> object:
            if other in self.row:
                return other - unit
            return ("before", other) if other < self.row.start else ("after", other - self.row.stop)

        known = [_Known.of(state) for state in interpreter.states]
        lead_s, lanes = backend.signature(name)
        return (
            lead_s,
            [(lane, _queue(jobs, self.row[-1] - unit)) for lane, jobs in lanes],
            _runs(known[other] for other in range(unit, self.row.stop)),
            _runs(known[other] for other in range(unit, self.row.start - 1, -1)),
            [known[other] for other in range(len(known)) if other not in self.row],
            # Only reduce slots that are still read count: the owners of others make no difference.
            [name(owner) for owner in interpreter.reduce_slots if owner is not None and known[owner].taking],
        )


def _queue(jobs: Sequence[tuple[object, ...]], last: int) -> list[object]:
    """Returns the jobs that wait in a lane, with runs of consecutive blocks shortened."""
    found: list[object] = []
    for _, equal in groupby(enumerate(jobs), key=lambda each: (_less(each[1][0], each[0]), each[1][1:])):
        run = [job for _, job in equal]
        found += [(run[0], "and on")] if run[-1][0] == last else run
    return found


def _less(distance: object, position: int) -> object:
    return distance - position if isinstance(distance, int) else distance


def _runs(known: Iterable[_Known]) -> list[tuple[_Known, int]]:
    """Groups equal neighbours, with their number. The last group may have any number, unless it waits for something
    that is done once for each: deferred reductions, which are in no lane yet."""
    runs = [(value, len(list(same))) for value, same in groupby(known)]
    last, count = runs[-1]
    return [*runs[:-1], (last, count if last.taking or last.reducing else 0)]


class _Known(NamedTuple):
    """The state of a unit by which the interpreter decides."""

    full: bool
    kept: bool
    refreshed: bool
    in_use: bool
    grad: GradState
    gathering: bool
    refreshing: bool
    taking: bool
    reducing: bool

    @classmethod
    def of(cls, state: UnitState[Job]) -> _Known:
        tickets = state.ticket, state.refreshing, state.taking, state.reducing
        return cls(
            state.full == state.generation,
            state.kept == state.generation,
            state.refreshed == state.generation,
            state.in_use,
            state.grad,
            *(ticket is not None and ticket.done_s is None for ticket in tickets),
        )
