"""What the interpreter knows of units, and what it asks of a back end.

The notes that are referred to are `zeromesh.schedule.interpreter`'s.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from zeromesh.schedule.program import Op

T = TypeVar("T")


class GradState(enum.Enum):
    """[Note: Gradient states]."""

    EMPTY = "empty"
    PARTIAL = "partial"
    REDUCED = "reduced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What to do with the gradients that autograd has left of a unit.

    Args:
        micro: reduce them over the axes of `grad_axes`, into the accumulator.
        accumulate: add to what the accumulator holds (else overwrite it).
        boundary: go on to the state shard: the gradient the optimizer sees.
        add: the state shard already holds a reduced gradient of this step; add to it.
    """

    micro: bool = True
    accumulate: bool
    boundary: bool
    add: bool

    @property
    def alone(self) -> bool:
        """Whether nothing is added to them before the boundary: [Note: Alone] of `zeromesh.schedule.placed`."""
        return self.micro and self.boundary and not self.accumulate


@dataclass(frozen=True, slots=True)
class Reducing(Generic[T]):
    """A reduction that was issued, as tickets; None where there is nothing to wait for.

    Args:
        taken: what was collected has been read: its slot may be filled again.
        done: the sums are where they are to be.
    """

    taken: T | None
    done: T | None


class Backend(Protocol[T]):
    """What runs the ops: on devices, on a virtual clock, or only counting. Calls return before the work is done; the
    ticket is for `wait`, None if there was nothing to do."""

    def refresh(self, unit: int) -> T | None:
        """Bring the parameter shard up to date with the state shards."""

    def unshard(self, unit: int, *, from_kept: bool, after: T | None) -> T | None:
        """Gather the unit's parameters into its slot, from the kept copy if that is valid; `after` their refresh."""

    def reduce(self, unit: int, reduction: Reduction) -> Reducing[T]:
        """Reduce the gradients that autograd has left of the unit; zeros where there are none."""

    def wait(self, ticket: T, op: Op) -> None:
        """Make the computation wait for the ticket's work, on behalf of `op`."""

    def use(self, unit: int) -> None:
        """The unit's gathered parameters are there: point the model at them."""

    def unuse(self, unit: int) -> None:
        """The unit's gathered parameters may go: point the model away from them."""

    def has_grads(self, unit: int) -> bool:
        """Whether autograd has left gradients of the unit that were not handed to `reduce`."""

    def collect(self, bucket: int) -> T | None:
        """Bring a bucket's gradients and values to the owners of its tensors."""

    def update(self, bucket: int) -> T | None:
        """Step on those of its tensors that this rank owns, and bring their values back to the state shards."""


@dataclass(slots=True)
class UnitState(Generic[T]):
    """What is known of one unit; generations count from 1, so 0 is never valid.

    Args:
        generation: of its masters; a step or a load raises it.
        refreshed: the generation that its compute copy was made of.
        full: the generation in its gather slot.
        kept: the generation of its secondary copy.
        in_use: the model is pointed at what was gathered.
        ticket: of a gather under way.
        refreshing: of a refresh under way.
        taking: of what still reads the reduce slot.
        reducing: of a reduction under way.
        grad: what its accumulator holds of this step.
    """

    generation: int = 1
    refreshed: int = 1
    full: int = 0
    kept: int = 0
    in_use: bool = False
    ticket: T | None = None
    refreshing: T | None = None
    taking: T | None = None
    reducing: T | None = None
    grad: GradState = GradState.EMPTY
