"""The interpreter's state: of units, of the forward and of the backward; and the back end that it drives.

Notes that are not defined here are in `zeromesh.schedule.interpreter`.

[Note: Reverse] Autograd runs nodes that are ready in the reverse of the order in which they were recorded. So a
backward goes through the marks of a forward in reverse. Past the end of a call, that call is entered; past its
beginning, it is left, and the gradients of its parameters are there. Calls that autograd skips are passed in their
turn: docs/decisions/0003.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class GradState(enum.Enum):
    """[Note: Gradient states]."""

    EMPTY = "empty"
    PARTIAL = "partial"
    REDUCED = "reduced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How to reduce the gradients that autograd has left of a unit."""

    micro: bool = True  # reduce them over the axes of `grad_axes`, into the accumulator
    accumulate: bool  # add to the accumulator; else overwrite it
    boundary: bool  # go on to the state shard: the gradient that the optimizer sees
    add: bool  # the state shard already holds a reduced gradient of this step; add to it
    scale: float | None = None  # factor of this rank's own gradients; None is 1
    stale: int | None = None  # the oldest generation of parameters that the unit was computed with; None is that of now

    @property
    def alone(self) -> bool:
        """Whether nothing is added to them before the boundary: [Note: Alone] of `zeromesh.schedule.buffer_layout`."""
        return self.micro and self.boundary and not self.accumulate


@dataclass(frozen=True, slots=True)
class Reducing(Generic[T]):
    """A reduction that was issued, as tickets; None where there is nothing to wait for."""

    taken: T | None  # the collected gradients have been read: their slot may be filled again
    done: T | None  # the sums are where they are to be


class Backend(Protocol[T]):
    """Runs the operations: on devices, on a virtual clock, or only counting. Calls return before the work is done, with
    a ticket for `wait`, or None if there was nothing to do."""

    def refresh(self, unit: int) -> T | None:
        """Bring the parameter shard up to date with the state shards."""

    def unshard(self, unit: int, *, from_kept: bool, after: T | None) -> T | None:
        """Gather the unit's parameters into its slot, from the kept copy if that is valid; `after` their refresh."""

    def reduce(self, unit: int, reduction: Reduction) -> Reducing[T]:
        """Reduce the gradients that autograd has left of the unit; zeros where there are none."""

    def wait(self, ticket: T) -> None:
        """Make the computation wait for the ticket's work."""

    def use(self, unit: int) -> None:
        """The unit's gathered parameters are there: point the model at them."""

    def unuse(self, unit: int) -> None:
        """The unit's gathered parameters may go: point the model away from them."""

    def has_grads(self, unit: int) -> bool:
        """Whether autograd has left gradients of the unit that were not handed to `reduce`."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Forward:
    """An outermost forward: no other one of its model encloses it. Calls that wait for a backward keep it alive."""

    number: int  # grows with each forward
    # Beginnings (False) and ends (True) of calls of units, in order; None for calls that no backward comes back to.
    marks: list[tuple[int, bool] | None] = field(default_factory=list)
    # Calls under way, innermost last: the place of the call's beginning among `marks`, and its unit.
    running: list[tuple[int, int]] = field(default_factory=list)
    calls: Counter[int] = field(default_factory=Counter)  # how many of the marked calls each unit has
    hidden: set[int] = field(default_factory=set)  # units that returned nothing at which a gradient is seen to arrive
    repeats: bool = False  # it began inside a backward
    over: bool = False  # it has ended, and a backward has come back to it and dropped its graph, so no other one will
    # Units that are open because another one's forward has read their parameters; they end with the outermost.
    read: list[int] = field(default_factory=list)

    def begin(self, unit: int, *, read: bool = False) -> None:
        # A unit that was read outlives the calls that are under way inside the outermost one.
        self.running.insert(1 + len(self.read) if read else len(self.running), (len(self.marks), unit))
        self.marks.append(None)
        if read:
            self.read.append(unit)

    def reads_until(self, unit: int) -> Iterator[int]:
        """The units that were read and must end before this call of `unit` does, the last first; none unless it is the
        outermost call."""
        while self.read and next(at for at in reversed(range(len(self.running))) if self.running[at][1] == unit) == 0:
            yield self.read.pop()

    def end(self, unit: int, *, backward: bool) -> int | None:
        """The place of the call's end among the marks; None if no backward will come back to it."""
        # An interrupt that a forward has caught leaves calls inside of it without an end.
        while self.running and self.running[-1][1] != unit:
            self.running.pop()
        begun, _ = self.running.pop()
        if not backward:
            return None
        self.marks[begun] = (unit, False)
        self.marks.append((unit, True))
        self.calls[unit] += 1
        return len(self.marks) - 1

    def runs(self, unit: int) -> bool:
        return any(running == unit for _, running in self.running)


@dataclass(frozen=True, slots=True)
class Call:
    """One forward of a unit, as its backward will know it."""

    forward: Forward  # the outermost one around it
    unit: int
    end: int  # the place of its end among the forward's marks
    generation: int  # of the unit's parameters at that time


@dataclass(slots=True, eq=False)
class Backward:
    """One run of autograd: [Note: Reverse]. Or the second half of a split one, which computes the gradients of
    parameters: pipelines fill bubbles with these, and no hook of autograd tells how far they are."""

    task: int = 0  # autograd's number of this run
    # Weak reference to autograd's callback at its end; dead once that was called, or never will be.
    ended: Callable[[], object] = lambda: None
    last: bool = True  # its micro-batch is the last before the optimizer's step
    scale: float | None = None  # factor of this rank's own gradients; None is 1
    # Units that were computed with parameters of an older generation than now, and the oldest of those.
    stale: dict[int, int] = field(default_factory=dict)
    inputs_only: bool = False  # the gradients of parameters come in another one, so nothing is reduced
    retains: bool = False  # autograd keeps its graphs for another one
    # Called with a unit before it is left for good. A second half computes the gradients of its parameters here.
    bring: Callable[[int], None] = lambda unit: None
    reached: dict[Forward, int] = field(default_factory=dict)  # how many marks of each are still to be passed
    left: Counter[tuple[Forward, int]] = field(default_factory=Counter)  # how many calls of the unit have been left
    reduced: set[int] = field(default_factory=set)  # units whose gradients were handed on
    turn: int = 0  # how many units, from the end of the shared order, have been reduced or skipped

    def reach(self, forward: Forward) -> None:
        """The backward has come to a forward."""
        self.reached[forward] = len(forward.marks)
        forward.over = not (self.inputs_only or self.retains or forward.running)

    def take_turn(self) -> None:
        """One more unit has been reduced or skipped."""
        self.turn += 1

    def has_left(self, forward: Forward, unit: int) -> bool:
        return self.left[forward, unit] == forward.calls[unit]
