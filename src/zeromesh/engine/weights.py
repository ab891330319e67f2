"""Weights of micro-batches: their sum over a step and all ranks, and the unit in which they are counted.

A gradient is multiplied by its micro-batch's weight when it is collected, and the sum is divided by all ranks' weights
at the boundary.

Weights are numbers of tokens, say, so on the way a sum is thousands of times the gradient: more than fp16 can hold.
And what error feedback carries on from one step's sum to the next step's is divided by the next step's weights. So
there a weight counts in the mean weight of a rank in the last step (before there is one: in the first micro-batch),
rounded to a power of two. Gradients are the same to the bit in any such unit, but for what overflows.

What is owed on axes that are reduced at the boundary is exact, since it is carried after the division. On those that
are reduced with each micro-batch nobody knows the step's weights yet: they are taken to be the last step's, unless the
step's first weight is another by more than a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from zeromesh.engine.backend import DeviceBackend
from zeromesh.engine.control import Control
from zeromesh.errors import ModelError

COMPARABLE = 2.0
"""Weights of micro-batches of one size differ by less, as their padding does; those of a short last batch by more."""


class StepWeights:
    """The weights of the step under way. A micro-batch that was opened counts once a backward has run in it.

    Args:
        backend: told of the weight to multiply by and the scale to divide by.
        control: all ranks; each of them weighs its micro-batches.
    """

    def __init__(self, backend: DeviceBackend, control: Control) -> None:
        self._backend = backend
        self._control = control
        self._unit = WeightUnit(backend, control)
        self._sum: float | None = None  # on this rank, with the micro-batch that was opened last; None without weights
        self._sum_before: float | None = None  # without that one
        self._opened_at = -1  # the backwards that had ended when it was opened
        self._backwards = 0
        self._total: Callable[[], Tensor] | None = None  # over all ranks, once the step's last backward has begun

    def open(self, weight: float | None, *, partial: bool) -> float | None:
        """A micro-batch begins; returns its weight in the step's unit.

        Args:
            partial: gradients of the step's micro-batches wait to be reduced.

        Raises:
            ModelError: a negative weight, or one where others of the step have none (or the other way round).
        """
        if weight is not None and not weight >= 0:
            raise ModelError(
                f"the weight of a micro-batch must be zero or more (its number of tokens, say); got {weight}"
            )
        if self._unused:
            self._sum = self._sum_before
        if (weight is None and self._sum is not None) or (weight is not None and partial and self._sum is None):
            raise ModelError(
                "either every micro-batch of a step has a weight or none; this step has some with and some without"
            )
        if weight is not None:
            weight = self._unit.of(weight, begins=self._sum is None)
        self._sum_before, self._opened_at = self._sum, self._backwards
        if weight is not None:
            self._sum = (self._sum or 0.0) + weight
        return weight

    @property
    def _unused(self) -> bool:
        """Whether no backward has followed the weight that was given last."""
        return self._backwards == self._opened_at

    def close(self) -> None:
        """The micro-batch has ended."""
        if self._total is not None:  # the step's last backward has run; others inside had its scale
            self._forget()

    def give_up(self) -> None:
        """The micro-batch has raised."""
        if self._total is not None:
            self._forget()
        elif self._unused:  # nothing of it is in the sums
            self._sum = self._sum_before

    def discard(self) -> None:
        """All gradients are dropped; what counts is the micro-batch that is open, if one is."""
        self._forget()
        self._sum = self._backend.weight

    def _forget(self) -> None:
        self._sum = self._sum_before = self._total = self._backend.final_scale = None

    def require_open(self) -> None:
        """Raises ModelError for a backward outside the block that gives its weight."""
        if (self._sum is None) != (self._backend.weight is None):
            raise ModelError(
                "the backward of a micro-batch with a weight must run inside its zm.accumulate(model, weight=...)"
            )

    def require_weighable(self, *, last: bool, shown: bool) -> None:
        """A micro-batch is divided by the step's weights at the boundary; what joins gradients that have passed it
        (`shown`), and is not the last, would never be: raises ModelError."""
        if self._sum is not None and not last and shown:
            raise ModelError(
                "a micro-batch with a weight that is not the last, zm.accumulate(model, last=False, weight=...), came "
                "on top of gradients of a step that ended: drop those first (optimizer.zero_grad()), or give no weights"
            )

    def begin_backward(self, *, last: bool) -> None:
        """When a last backward starts, all ranks' weights are known; the first boundary reduction needs their sum."""
        if self._sum is None or not last or self._total is not None:
            return
        words = self._control.words([self._sum], torch.float64)
        # Begun here, where all ranks come in the program's order: in a lane its place among other collectives of the
        # same group (the user's, another model's) would depend on timing.
        self._total = total = self._control.reducing(words)
        size = self._control.size

        def final_scale() -> Tensor:
            # Chains average over ranks; the mean over weights is ranks / total of that. A step without any weight is 0.
            # Not a number of Python's: whoever issues reductions to a device would wait there.
            summed = total()
            return torch.where(summed > 0, size / summed, 0.0)

        self._backend.final_scale = final_scale

    def count_backward(self) -> None:
        """A backward has ended: what is open counts."""
        self._backwards += 1

    def end_step(self) -> None:
        """The last backward's reductions are under way."""
        if self._total is not None:
            self._unit.ended(self._total)


class WeightUnit:
    """The unit in which weights are counted where their size matters.

    Args:
        backend: whose buffers say whether the size of weights matters to them.
        control: all ranks.
    """

    def __init__(self, backend: DeviceBackend, control: Control) -> None:
        self._backend = backend
        self._control = control
        self._matters = any(buffer.placed.narrow for unit in backend.units for buffer in unit.buffers)
        self._unit: float | None = None
        self._total: float | None = None
        self._own: list[float] = []

    def of(self, weight: float, *, begins: bool) -> float:
        """`weight` in the unit of its step, which `begins` with it; on all ranks alike, in the program's order."""
        if not self._matters:
            return weight
        if begins:
            self._begin(weight)
        self._own.append(weight)
        return weight / (self._unit or 1.0)

    def ended(self, total: Callable[[], Tensor]) -> None:
        """The step's weights over all ranks, in its unit."""
        if self._matters:
            self._total = float(total())

    def _begin(self, weight: float) -> None:
        if self._unit is None:
            words = self._control.words([weight], torch.float64)
            self._unit = self._round(float(self._control.reduce(words)))
        elif self._total is not None:
            new = self._unit * (self._round(self._total) or 1.0)
            mean = sum(self._own) / len(self._own)
            change = weight / mean if weight and mean else 1.0  # one without a weight says nothing of the others
            comparable = 1 / COMPARABLE <= change <= COMPARABLE
            self._backend.rescale_owed(self._unit / new * (1.0 if comparable else change))
            self._unit, self._total = new, None
        self._own.clear()

    def _round(self, total: float) -> float | None:
        """The mean of a rank, to a power of two; None if nobody has a weight."""
        return float(2.0 ** round(math.log2(total / self._control.size))) if total > 0 else None
