"""What a micro-batch counts by.

[Note: Weights] A rank's own gradients can be multiplied when they are there, whatever losses they come of. Those of
experts that other ranks send tokens to cannot: they are sums over ranks whose weights differ. There the loss carries
the weight, so that what reaches experts is weighed already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeromesh.engine.hooks import as_python


class Weight:
    """Of one micro-batch on this rank: called with its loss, in that; else in its gradients.

    Args:
        scale: what a gradient counts by, where reductions average over ranks; None is 1.
    """

    def __init__(self, scale: float | None) -> None:
        self.scale = scale
        self._weighed: int | None = None

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
        """What the running backward's gradients are multiplied by. 0 also where the loss was: its gradient may be NaN,
        of a mean over no tokens."""
        return None if self.in_loss and self.scale else self.scale
