"""The objects that live for a step or a backward, and which copies have to follow their masters.

[Note: Lifetimes] Each phase is an object, and ends when that object is dropped:

    Step            from the first backward after a step's gradients were shown to the end of its last backward
    Backward        the interpreter's: one run of autograd, with those that it starts inside (reentrant checkpointing);
                    both runs, where gradients of inputs and of parameters come in two
    Forward         the interpreter's; as long as a graph may come back to it

A forward that ends with an exception (Ctrl-C too) tells the engine. A backward that raises tells nobody; the next call
finds it. Either is dropped with all its state (`Engine.fail`), and the next begins anew. Where a torn micro-batch is in
the sums of earlier ones, every call raises until `zm.zero_grad(model)`.

[Note: Refreshes] A unit's compute copy is brought up to date with its masters once a step: after the last optimizer
that steps on the unit. The engine waits for an optimizer while a parameter on which it has stepped before shows a
gradient that nobody has stepped on. All ranks show the same gradients, so all wait for the same optimizers. The copy
follows when that optimizer steps, when the gradient is dropped (a `GradScaler` has skipped the step, say), or at the
latest when the next forward begins, on all ranks. Writes by hand are brought to copies when the next forward begins.

[Note: Weights] The weight of a micro-batch multiplies this rank's gradients, not its loss. Experts get tokens from
ranks with different weights, so there the loss carries the weight: docs/decisions/0029.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor

from zeromesh.comm.lane import Ticket
from zeromesh.engine.backend import DeviceBackend, UnitShards
from zeromesh.engine.calls import as_python
from zeromesh.engine.control import Control
from zeromesh.engine.param import ShardedParameter
from zeromesh.errors import MismatchError
from zeromesh.schedule.interpreter import Interpreter


class Step(enum.Enum):
    """How far the step is whose gradients are being accumulated: [Note: Lifetimes]."""

    SHOWN = "its last backward has ended, and the next begins another step"
    BEGUN = "its first backward runs"
    HELD = "whole micro-batches are summed"
    TORN = "a backward that did not end has left a part of its micro-batch in sums of others"


class Changes:
    """Changes of one model's parameters, and the copies that have to follow: [Note: Refreshes]."""

    def __init__(self, interpreter: Interpreter[Ticket], units: Sequence[UnitShards]) -> None:
        self.interpreter = interpreter
        self.units = units
        self.by_hand: set[ShardedParameter] = set()  # that somebody has written to, outside of any optimizer's step
        self.waiting: Set[int] = frozenset()  # units whose copies have yet to follow their masters
        self._stepped: set[ShardedParameter] = set()  # since gradients were last shown

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
            self.units[unit].accept()
        for param in params:
            param.change(self.interpreter.states[param.unit].generation, by)

    def dropped(self, param: ShardedParameter) -> None:
        """Nobody will step on the gradient that `param` has shown."""
        if param.unit in self.waiting and not self._awaits(param.unit):
            self._refresh({param.unit})

    def apply(self) -> None:
        """Brings copies up to date with writes by hand, and with steps that have waited until now."""
        if self.by_hand:
            self.loaded(list(self.by_hand))
        elif self.waiting:
            self._refresh(self.waiting)

    def loaded(self, params: Sequence[ShardedParameter]) -> None:
        """A load has changed `params`, or somebody by hand."""
        for unit in {param.unit for param in params}:
            self.units[unit].written()
        self.stepped(params, None)

    def made_by(self, param: ShardedParameter) -> object:
        """The optimizer that wrote its present values; None if a load or a user did."""
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


_PRIME = 2**31 - 1


class Agreement:
    """The ranks' agreement at the end of each step of one model: on the parameters of `backend` that are used, and on
    the order of units, which `interpreter` adopts once all ranks have the same."""

    def __init__(self, interpreter: Interpreter[Ticket], backend: DeviceBackend, control: Control) -> None:
        self._interpreter = interpreter
        self._backend = backend
        self._control = control
        self._ordered = False  # whether all ranks have the same order of units
        self._said: Ticket | None = None  # of the last exchange beside the computation

    def used(self) -> Sequence[int]:
        """Whether any rank has had a gradient of each parameter, in the order of units; collective.

        Raises:
            MismatchError: on all ranks, where parameters are sharded and units were called in different orders.
        """
        used = [flag for unit in self._backend.units for flags in unit.used for flag in flags]
        if self._ordered and not self._interpreter.schedule.shards_params:
            return self._beside(used)
        order = zlib.crc32(repr(self._interpreter.seen).encode()) % _PRIME
        calls = self._interpreter.digest % _PRIME
        words = [*map(int, used), order, -order, calls, -calls]
        *flags, high_order, low_order, high_calls, low_calls = self._control.agree(words)
        self._learn(high_order == -low_order, high_calls == -low_calls)
        return flags

    def _beside(self, used: list[bool]) -> list[bool]:
        """As `used`, where nothing else is compared: there are no gathers, and all ranks have learnt the order. A rank
        that has used all parameters knows the answer and does not wait for the others."""
        if self._control.group is None:
            return used
        if self._said is not None:
            self._said.wait()  # the last step's, long done; its words must live so long
        words = self._control.words(used, torch.int32)
        self._said = self._backend.agree(words)
        if all(used):
            return used
        self._said.wait()
        return [bool(word) for word in words.tolist()]

    def _learn(self, same_order: bool, same_gathers: bool) -> None:
        schedule, seen = self._interpreter.schedule, self._interpreter.seen
        if schedule.shards_params and not (same_order and same_gathers):
            names = [self._backend.units[unit].name or "(root)" for unit in seen]
            raise MismatchError(
                "all ranks must call the units in the same order while parameters are sharded; in this step they did "
                f"not: on rank {self._control.rank} the order was {', '.join(names)}. Gradients of this step are not "
                "valid. Run every unit on every rank (on dummy data if need be), or shard no parameters (stages 0, 1, "
                "2)"
            )
        if not self._ordered and same_order:
            self._ordered = True
            self._interpreter.adopt(schedule.reordered([*seen, *(u for u in schedule.order if u not in seen)]))


class Weight:
    """The weight of one micro-batch on this rank. Called with the loss it weighs the loss; else the gradients."""

    def __init__(self, scale: float | None) -> None:
        self.scale = scale  # factor of a gradient, given that reductions average over ranks; None is 1
        self._weighed: int | None = None  # autograd's number of the backward that came through a weighed loss

    def __call__(self, loss: Tensor) -> Tensor:
        """The loss that counts so; a backward through it leaves gradients as they come."""
        if self.scale is None:
            return loss
        weighed = loss * self.scale
        if weighed.requires_grad:
            weighed.register_hook(self._reached)  # type: ignore[no-untyped-call]  # torch leaves it so
        return weighed

    @as_python
    def _reached(self, grad: Tensor) -> None:
        self._weighed = torch._C._current_graph_task_id()

    @property
    def in_loss(self) -> bool:
        """Whether the backward that runs has come through a loss that is weighed."""
        return self._weighed == torch._C._current_graph_task_id()

    @property
    def of_grads(self) -> float | None:
        """The factor of the running backward's gradients. 0 also where the loss was: its gradient may be NaN,
        of a mean over no tokens."""
        return None if self.in_loss and self.scale else self.scale
