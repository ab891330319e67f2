"""Whether what owners keep fits on their devices, said before a step fails there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zeromesh.engine.control import Control
from zeromesh.errors import OptimizerError
from zeromesh.units import format_bytes

if TYPE_CHECKING:
    from zeromesh.owners.optimizer import OwnerOptimizer


def free_bytes(device: torch.device) -> int | None:
    """What may still be allocated; None where no limit is known."""
    if device.type == "cpu":  # which swaps
        return None
    module = torch.get_device_module(device)
    free: int = module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)
    return free


def require_memory(optimizer: OwnerOptimizer, control: Control) -> None:
    """Raises OptimizerError, on all ranks, where one has less memory free than its own tensors' states, values and
    gradients will take."""
    free = free_bytes(next(param.device for group in optimizer.param_groups for param in group["params"]))
    if free is None:
        return
    kept, room = optimizer.state_bytes() + optimizer.kept_bytes(), optimizer.room_bytes()[0]
    short = torch.tensor([int(kept + room > free)], device=control.device)
    if not control.reduce_all(short, dist.ReduceOp.MAX).item():
        return
    every = control.gather((kept, room, free))
    rank = max(range(len(every)), key=lambda each: every[each][0] + every[each][1] - every[each][2])
    kept, room, free = every[rank]
    raise OptimizerError(
        f"zm.by_owner({optimizer.kind.__name__}, params): rank {rank} owns tensors whose states and values take "
        f"{format_bytes(kept)}, and in a step {format_bytes(room)} more; of its device {format_bytes(free)} are free, "
        f"{format_bytes(kept + room - free)} too little. Shard states over more ranks, so that more own (stage 1 or "
        f"above on further axes), or give elementwise optimizers their slices, without zm.by_owner"
    )
