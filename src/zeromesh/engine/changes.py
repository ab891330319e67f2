"""Whose values have changed, and which units' copies have yet to follow.

[Note: Refreshes] What a unit computes with is brought up to date with its masters once a step: when the last of the
optimizers that step there has stepped. One is waited for while a parameter that it has stepped on before shows a
gradient that nobody has stepped on. All ranks show the same gradients, so all wait for the same. The unit follows as
that optimizer steps, as the gradient is dropped (by a `GradScaler` that has skipped the step, say), or at the latest as
the next forward begins: with all ranks, as in any forward that parameters which were written to by hand bring up to
date.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from zeromesh.comm import Ticket
from zeromesh.engine.backend import UnitShards
from zeromesh.engine.param import ShardedParameter
from zeromesh.schedule import Interpreter


class Changes:
    """Of one model's parameters: [Note: Refreshes].

    Args:
        interpreter: of the model's schedule.
        units: in the schedule's order.

    Attributes:
        by_hand: parameters that somebody has written to, outside of any optimizer's step.
        waiting: units that have yet to be brought up to date with their masters.
    """

    def __init__(self, interpreter: Interpreter[Ticket], units: Sequence[UnitShards]) -> None:
        self.interpreter = interpreter
        self.units = units
        self.by_hand: set[ShardedParameter] = set()
        self.waiting: Set[int] = frozenset()
        self._stepped: set[ShardedParameter] = set()

    def began(self) -> None:
        """Gradients of another step are shown."""
        self._stepped.clear()

    def stepped(self, params: Sequence[ShardedParameter], by: Callable[[], object] | None) -> None:
        """The optimizer to which `by` refers weakly has changed `params`. None: somebody else has, and copies follow at
        once, those of all that has waited too."""
        units = {param.unit for param in params}
        self.by_hand.difference_update(params)
        self._stepped.update(params)
        self.waiting = self.waiting | units
        ready = self.waiting if by is None else {unit for unit in self.waiting if not self._awaits(unit)}
        self._refresh(ready, changed=units)
        for unit in units:
            self.units[unit].accepted = True
        for param in params:
            param.changed, param.changed_by = self.interpreter.states[param.unit].generation, by

    def dropped(self, param: ShardedParameter) -> None:
        """Nobody will step on the gradient that `param` has shown."""
        if param.unit in self.waiting and not self._awaits(param.unit):
            self._refresh({param.unit})

    def apply(self) -> None:
        """What users have written reaches the copies that units compute with, and what has waited until now."""
        if self.by_hand:
            self.loaded(list(self.by_hand))
        elif self.waiting:
            self._refresh(self.waiting)

    def loaded(self, params: Sequence[ShardedParameter]) -> None:
        """A load has changed `params`, or somebody by hand."""
        for unit in {param.unit for param in params}:
            self.units[unit].forget_owed()
        self.stepped(params, None)

    def made_by(self, param: ShardedParameter) -> object:
        """The optimizer that made its values what they are; None if somebody else did."""
        return None if param in self.by_hand or param.changed_by is None else param.changed_by()

    def _awaits(self, unit: int) -> bool:
        return any(
            param.grad is not None and param not in self._stepped and self.made_by(param) is not None
            for buffer in self.units[unit].trained
            for param in buffer.optimizer_params
        )

    def _refresh(self, units: Set[int], changed: Set[int] = frozenset()) -> None:
        self.waiting = self.waiting - units
        self.interpreter.stepped(changed, refresh=units)
