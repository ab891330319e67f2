"""The device that a rank computes on: found by each rank for itself, then agreed, before there is a process group."""

from __future__ import annotations

import json
import os
from collections import Counter

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from zeromesh.errors import InputError

CPU = torch.device("cpu")


def visible_devices() -> int:
    """CUDA devices that this process can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def local_device(local_rank: int, local_world: int, *, in_lab: bool = False) -> torch.device:
    """A CUDA device where there is one for each rank of this machine, else the CPU.

    Whoever sees one device alone takes it: `srun --gpus-per-task=1` and a CUDA_VISIBLE_DEVICES for each process show
    every rank its own. That it is its own, `agree_on_device` finds out.

    Args:
        local_rank, local_world: on this machine.
        in_lab: take one inside an emulated cluster too, whose leaves share this machine's devices, and between those no
            shaped link is used.
    """
    visible = visible_devices() if in_lab or "ZEROMESH_LAB" not in os.environ else 0
    if visible == 1:
        return torch.device("cuda", 0)
    return torch.device("cuda", local_rank) if visible >= local_world else CPU


def identity(device: torch.device) -> str:
    """What no other device has, on any machine; empty for the CPU."""
    return "" if device == CPU else str(torch.cuda.get_device_properties(device).uuid)


def agree_on_device(device: torch.device, name: str, store: Store, rank: int, world: int) -> torch.device:
    """`device` where every rank has one of its own, the CPU where none has; collective.

    Args:
        device: that this rank has found.
        name: its identity.
        store: that all ranks see, of this start alone.
        rank, world: this rank, and how many there are.

    Raises:
        InputError: on every rank, where some have one and others do not; names those.
    """
    store = PrefixStore("zeromesh/devices", store)
    store.set(str(rank), name)
    if rank == 0:  # one reads what all have said, and all read what it has found: few words, where ranks are many
        names = [store.get(str(other)) for other in range(world)]
        users = Counter(names)
        none = [other for other, name in enumerate(names) if not name]
        shared = [other for other, name in enumerate(names) if name and users[name] > 1]
        store.set("without", json.dumps([none, shared]))
    none, shared = json.loads(store.get("without"))
    if not none and not shared:
        return device
    if len(none) + len(shared) == world:
        return CPU
    lacking = [
        f"{', '.join(map(str, some))} {what}" for some, what in ((none, "see none"), (shared, "share one")) if some
    ]
    raise InputError(
        f"all ranks must compute on the same type of device, and each CUDA device be one rank's; of {world} ranks, "
        f"{'; '.join(lacking)}. Look for what nvidia-smi says on their machines and whether LOCAL_RANK is set, or hide "
        f"all devices with CUDA_VISIBLE_DEVICES="
    )


def backend_for(device: torch.device) -> str:
    """Of torch's process groups: for tensors there, and for those on the host."""
    return "gloo" if device == CPU else "cpu:gloo,cuda:nccl"
