"""The host's memory for a model's shards."""

from __future__ import annotations

import torch
from torch import nn

from zeromesh.comm.host import HostArena, HostLink, free_bytes
from zeromesh.engine.control import Control
from zeromesh.errors import ModelError
from zeromesh.files import core_numbers, machine_id
from zeromesh.strategy.stage import HOST


def take_host_memory(
    wanted: int, control: Control, device: torch.device, *, call: str, less: str
) -> tuple[HostLink, int]:
    """Memory of the host for this rank's shards, and its share of the host's cores; all ranks call this together.

    Args:
        call: of the user, and how it could take `less`, for the message.

    Raises:
        ModelError: a machine has less memory than its ranks would take, states of the optimizer not counted.
    """
    found = control.gather((machine_id(), core_numbers(), wanted))
    here = [taken for machine, _, taken in found if machine == machine_id()]
    sharing = [machine for machine, cores, _ in found if (machine, cores) == (machine_id(), core_numbers())]

    def allocate() -> HostLink:
        free = free_bytes(device)
        if free is not None and sum(here) > free:
            raise ModelError(
                f"{len(here)} rank(s) of this machine need {sum(here) / 1e9:.1f} GB of its memory and further memory "
                f"for optimizer states, but only {free / 1e9:.1f} GB are free (MemAvailable, memory.max): {less}"
            )
        return HostLink(HOST, HostArena(max(1, wanted), device), device, ranks=len(here))

    return control.together(allocate, call=call), len(core_numbers()) // len(sharing)


def show_device(model: nn.Module, device: torch.device) -> None:
    """Has modules that tell a device, by which libraries place inputs, tell the one that they compute on. They ask a
    parameter, and that lies on the host."""
    for module in model.modules():
        kind = type(module)
        if isinstance(getattr(kind, "device", None), property) and module.device != device:
            told = {"device": property(lambda self: device), "__module__": kind.__module__, "__doc__": kind.__doc__}
            module.__class__ = type(kind.__name__, (kind,), told)
