"""Saves models and optimizers in a library's checkpoint as `zm.Checkpoints`, one directory for each model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.engine.api import engine_of
from zeromesh.engine.optim import by_engine
from zeromesh.engine.whole import sliced_like, whole_state


def checkpoints_of(
    directory: str | os.PathLike[str], model: nn.Module, optimizers: Iterable[Optimizer] = ()
) -> Checkpoints:
    """Checkpoints of a sharded model and of the optimizers that update it.

    A model that lies frozen beneath PEFT's adapters has files of its own, so it is left out, and loading compares it.
    """
    own = [optimizer for optimizer in optimizers if engine_of(model) in by_engine(optimizer)]
    beneath = {param for part in model.modules() if is_peft(part) for param in part.parameters()}
    frozen = any(not param.requires_grad and param not in beneath for param in model.parameters())
    return Checkpoints(directory, model, own, keep=1, frozen=frozen)


class Registered:
    """Wraps an object that a library saves by its `state_dict()`, such as a moving average. Its slices are saved as
    whole tensors and loaded as slices under any strategy. All ranks call both methods."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return whole_state(self.held.state_dict())

    def load_state_dict(self, state: Any) -> None:
        self.held.load_state_dict(sliced_like(self.held.state_dict(), state))


def is_peft(model: object) -> bool:
    """Whether `model` is a PEFT model; PEFT need not be installed."""
    return any(kind.__module__ == "peft.peft_model" for kind in type(model).__mro__)


def is_pretrained(model: object) -> bool:
    """Whether `model` is a `PreTrainedModel` of transformers, which need not be installed."""
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)
