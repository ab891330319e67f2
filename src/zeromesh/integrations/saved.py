"""What a library's checkpoint holds of a model and its optimizers: `zm.Checkpoints`, one directory for each model."""

from __future__ import annotations

import os
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.engine.api import engine_of
from zeromesh.engine.optim import updates


def checkpoints_of(
    directory: str | os.PathLike[str], model: nn.Module, optimizers: Iterable[Optimizer] = ()
) -> Checkpoints:
    """Of a sharded model and those of the optimizers that update it.

    What lies frozen beneath PEFT's adapters came from files of its own, so it is left out; a load compares it.
    """
    own = [optimizer for optimizer in optimizers if updates(optimizer, engine_of(model))]
    return Checkpoints(directory, model, own, keep=1, frozen=_freezes_beside_adapters(model))


def is_peft(model: object) -> bool:
    """Whether it is a model of PEFT's, which need not be installed."""
    return any(kind.__module__ == "peft.peft_model" for kind in type(model).__mro__)


def _freezes_beside_adapters(model: nn.Module) -> bool:
    """Whether something is frozen that no model of PEFT's holds."""
    beneath = {param for part in model.modules() if is_peft(part) for param in part.parameters()}
    return any(not param.requires_grad and param not in beneath for param in model.parameters())
