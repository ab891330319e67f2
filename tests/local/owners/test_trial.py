"""Facts about an optimizer's class that a trial finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from tests.dist.owners.optimizers import LAMB
from zeromesh.errors import OptimizerError
from zeromesh.owners.trial import require_tensorwise


class Adapting(optim.SGD):
    """Keeps a distance over all tensors, and has it in its rate when that has grown enough, as D-Adaptation does."""

    def __init__(self, params: Any, *, held: str) -> None:
        super().__init__(params, lr=1e-3)
        self.held = held
        self.distance = 0.0
        self.param_groups[0]["distance"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        more = sum(float(p.grad.sign().abs().sum()) for group in self.param_groups for p in group["params"])
        if self.held == "self":
            self.distance += more
        else:
            self.param_groups[0]["distance"] += more
        if self.distance > 1e9:
            self.param_groups[0]["lr"] *= 2
        return found


@pytest.mark.parametrize("held", ["self", "group"])
def test_what_is_kept_for_all_tensors_is_found_before_it_shows(held: str) -> None:
    words = r"each tensor by itself; Adapting makes .* gradients too, kept as distance, and each rank"
    with pytest.raises(OptimizerError, match=words):
        require_tensorwise(Adapting, [torch.ones(3, 4)], {"held": held})


@pytest.mark.parametrize("kind", [LAMB, optim.Muon, optim.Adafactor, optim.ASGD, optim.NAdam, optim.Rprop])
def test_counts_of_steps_are_nobodys_gradients(kind: Any) -> None:
    require_tensorwise(kind, [torch.ones(3, 4)], {})
