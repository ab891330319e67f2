"""The unit in which micro-batches' weights are counted where their size matters.

A gradient is multiplied by its micro-batch's weight when it is collected, and the sum is divided by all ranks' weights
at the boundary. Weights are numbers of tokens, say, so on the way a sum is thousands of times the gradient: more than
fp16 can hold. And what error feedback carries on from one step's sum to the next step's is divided by the next step's
weights.

So there a weight counts in the mean weight of a rank in the last step (before there is one: in the first micro-batch),
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

COMPARABLE = 2.0
"""Weights of micro-batches of one size differ by less, as their padding does; those of a short last batch by more."""


class WeightUnit:
    """See the module.

    Args:
        backend: whose buffers say whether the size of weights matters to them.
        control: all ranks; each of them weighs its micro-batches.
    """

    def __init__(self, backend: DeviceBackend, control: Control) -> None:
        self._backend = backend
        self._control = control
        self._matters = any(buffer.narrow for unit in backend.units for buffer in unit.buffers)
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
