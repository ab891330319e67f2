"""Optimizers that were made before their model was sharded, as most scripts make them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zeromesh.engine.optim import check_optimizer
from zeromesh.errors import OptimizerError


def give_shards(optimizer: Optimizer, shards: MutableMapping[Tensor, Any]) -> None:
    """Puts shards in the place of the parameters that they were made from, by which they are given.

    Raises:
        OptimizerError: it has stepped already, or mixes the elements of a parameter.
    """
    if any(param in shards for param in optimizer.state):
        raise OptimizerError(
            f"{type(optimizer).__name__} has stepped on the model before it was sharded, so its states are of whole "
            f"tensors: prepare model and optimizer before the first step"
        )
    for group in optimizer.param_groups:
        group["params"] = [shards.get(param, param) for param in group["params"]]
    check_optimizer(optimizer)
