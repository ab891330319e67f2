"""Whole states of an optimizer in its state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from zeromesh.engine.elements import Elements
from zeromesh.engine.optim import Whole
from zeromesh.engine.param import ShardedParameter, Slice, slice_of
from zeromesh.engine.vouched import plain_parts
from zeromesh.errors import CheckpointError
from zeromesh.modules import DTYPE_NAMES
from zeromesh.pieces.region import Region


class WholeStates(Whole):
    """The whole states of one optimizer's parameters in its state dict; see `Whole`."""

    def shown(self, param: ShardedParameter, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.dtype not in DTYPE_NAMES:
            return value
        if plain_parts(value):
            return value
        region = self[param].of(self[param].whole_shape(value.shape))
        place = None if region.is_whole else (region, 0, 0)
        shape, name, writes = torch.Size(region.shape), f"{param.full_name}.{key}", param.writes
        own = Elements(shape=shape, place=place, name=name, region=region, start=0, numel=region.numel, writes=writes)
        return slice_of(own, value.detach().contiguous().view(-1))

    def take(self, optimizer: Optimizer) -> None:
        for states in optimizer.state.values():  # of all parameters: else only owners would raise
            for value in states.values():
                if (
                    isinstance(value, Slice)
                    and value.elements.place
                    and not isinstance(value.elements.place[0], Region)
                ):
                    raise CheckpointError(
                        f"an optimizer of zm.by_owner has whole states, but load_state_dict got slices, such as those "
                        f"of {value.elements}: load them with zm.Checkpoints"
                    )
        for param in [param for param in optimizer.state if param not in self]:
            del optimizer.state[param]
        for param, owned in self.items():
            state: dict[str, Any] = optimizer.state.get(param, {})
            for key, value in state.items():
                if isinstance(value, Slice):
                    held, value = value.elements.region, value.local.view(value.elements.region.sizes)
                elif owned.batch and isinstance(value, torch.Tensor) and owned.is_part_of(value.shape):
                    held = Region.whole(value.shape)
                else:
                    continue
                region = owned.of(held.shape)
                if held == region:
                    state[key] = value
                elif held.is_whole:
                    state[key] = value[region.index].clone()
                else:
                    raise CheckpointError(
                        f"state {key!r} of {param.elements}: load_state_dict needs {region} here, and was given "
                        f"{held}: use zm.Checkpoints or torch.distributed.checkpoint"
                    )
