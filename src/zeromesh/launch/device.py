"""The device that a rank computes on: found by each rank for itself, then agreed, before there is a process group."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from zeromesh.errors import InputError
from zeromesh.files import machine_id

CPU = torch.device("cpu")

COUNTS = ("SLURM_GPUS_ON_NODE",)
PROMISES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("ASCEND_RT_VISIBLE_DEVICES", "SLURM_STEP_GPUS", *COUNTS),
)
"""A value in one of these variables, except `NO_DEVICES`, means that there should be a device. In lists, 0 is the first
device; in `COUNTS`, 0 means none."""

NO_DEVICES = ("", "0", "-1", "none", "void", "NoDevFiles")  # as launchers and people write it
CUDA_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # [Note: Order]

SHARE = "ZEROMESH_SHARE_DEVICES"
"""If this variable is set, ranks of a machine may share a device, to check numbers with fewer devices than ranks."""

NCCL_SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # from NCCL 2.30 on
    "NCCL_HOSTID": "rank{rank}",  # before: a rank that takes itself for another machine is not compared with the others
    "NCCL_SOCKET_IFNAME": "lo",  # and reaches these machines through it
    "NCCL_MAX_CTAS": "2",  # kernels of all ranks must fit on the device at once, or they wait for each other for ever
    "NCCL_CUMEM_ENABLE": "0",
}
"""Settings of NCCL for ranks that share a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The device that a rank tells the others: its type; an identity that no other device of any machine has (empty for
    the CPU and for a device that ranks may share); and the reason, if it should have a device and has none."""

    type: str
    identity: str = ""
    lacks: str = ""


def visible_devices() -> int:
    """Accelerators that this process can use."""
    return torch.accelerator.device_count()


def find_device(wanted: str, local_rank: int, local_world: int) -> tuple[torch.device, Claim]:
    """The accelerator of this rank, or the CPU if it has none, and its claim for the others.

    A rank that sees one device takes it: `srun --gpus-per-task=1` and a CUDA_VISIBLE_DEVICES for each process show
    every rank its own. `agree_on_device` finds out whether it is.

    `wanted` is "cpu", the type of an accelerator, or "auto" for the accelerator that there is; on an emulated cluster
    the CPU, since devices that leaves share use no shaped link.
    """
    if wanted == "cpu" or (wanted == "auto" and "ZEROMESH_LAB" in os.environ):
        return CPU, Claim(type="cpu")
    found, visible = torch.accelerator.current_accelerator(), visible_devices()
    if found is None or not visible or wanted not in ("auto", found.type):
        there = f"{visible} of type {found.type}" if found is not None and visible else "none"
        lacks = _promised(os.environ) if wanted == "auto" else f"are to have a device of type {wanted}"
        lacks = lacks and f"{lacks}, where torch sees {there}"
        return CPU, Claim(type="cpu", lacks=lacks)
    if SHARE in os.environ:
        return torch.device(found.type, local_rank % visible), Claim(type=found.type)
    if 1 < visible < local_world:
        return CPU, Claim(type="cpu", lacks=f"are {local_world} on a machine of {visible} devices")
    device = torch.device(found.type, 0 if visible == 1 else local_rank)
    return device, Claim(type=device.type, identity=_identity(device))


def _promised(environ: Mapping[str, str]) -> str:
    """The sign that there should be devices here; empty without one, or if somebody hides them."""
    said = {name: environ[name] for name in PROMISES if name in environ}
    none = {name for name, value in said.items() if value in NO_DEVICES and (value != "0" or name in COUNTS)}
    return "" if none or not said else "were given devices by " + ", ".join(f"{n}={v}" for n, v in said.items())


def set_variables(rank: int) -> None:
    """Sets NCCL and CUDA up for several communicators at once and for ranks that share a device, before CUDA is
    initialised. Variables that somebody has set stay.

    [Note: Order] Kernels of different streams wait for each other if CUDA has fewer queues than streams (8 by default):
    the computation, and for each communicator a lane and NCCL's own. NCCL 2.26 and newer can also keep all kernels of a
    device in the order of their launch, over all communicators (NCCL_LAUNCH_ORDER_IMPLICIT). That is left off. It rules
    out that collectives of two communicators, of which a device has room for one, wait for each other on two ranks. But
    then a gather over fast links waits until every earlier reduction over slow ones has begun, and the lanes of one
    device overlap no more. All ranks issue collectives in one order, so either setting gives the same numbers.
    """
    if torch.version.cuda is not None:
        for name, value in (CUDA_QUEUES | (NCCL_SHARED if SHARE in os.environ else {})).items():
            os.environ.setdefault(name, value.format(rank=rank))


def agree_on_device(claim: Claim, store: Store, rank: int, world: int) -> None:
    """Compares the claims of all ranks; collective. Raises InputError, on every rank, if some have no device and others
    have, or some share one; it names those."""
    if wrong := fault_of(
        store, "devices", rank, world, asdict(claim), lambda said: _wrong([Claim(**each) for each in said])
    ):
        raise InputError(
            f"each rank must have a device of its own, of one type on all machines, or all the CPU; of {world} ranks, "
            f"{wrong}. Start no more ranks on a machine than it has devices, with LOCAL_RANK and LOCAL_WORLD_SIZE set "
            f"(torchrun does; under srun they are SLURM_LOCALID and SLURM_NTASKS_PER_NODE). To compute on the CPU, "
            f'set run.device = "cpu" in what is trained, or hide all devices (CUDA_VISIBLE_DEVICES= does). Where torch '
            f"sees fewer devices than there are, it was built for others, or the driver does not answer"
        )


def fault_of(store: Store, name: str, rank: int, world: int, own: object, judge: Callable[[list[Any]], str]) -> str:
    """The fault that rank 0 finds with `judge` in the values of all ranks, which JSON can hold; empty if there is none.
    Collective, over a store of this start alone, to which thousands of ranks say few words."""
    store = PrefixStore(f"zeromesh/{name}", store)
    store.set(str(rank), json.dumps(own))
    if rank == 0:
        store.set("wrong", judge([json.loads(store.get(str(other))) for other in range(world)]))
    return store.get("wrong").decode()


def _wrong(claims: Sequence[Claim]) -> str:
    """The fault of these ranks' devices, in words; empty if there is none."""
    users = Counter(claim.identity for claim in claims)
    usual = Counter(claim.type for claim in claims if claim.type != "cpu").most_common(1)
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, claim in enumerate(claims):
        if claim.lacks:
            groups[claim.lacks].append(rank)
        elif usual and claim.type == "cpu":
            groups["see none"].append(rank)
        elif usual and claim.type != usual[0][0]:
            groups[f"see {claim.type} where others see {usual[0][0]}"].append(rank)
        elif claim.identity and users[claim.identity] > 1:
            groups["share one"].append(rank)
    return "; ".join(f"{_some(ranks)} {what}" for what, ranks in groups.items())


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _identity(device: torch.device) -> str:
    """The machine; the device's place on its bus, which tells two dies of a card apart; and its uuid, which tells parts
    of a divided device apart. A device that has neither is taken for this process's own."""
    properties = torch.get_device_module(device).get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id", "uuid")
    known = [str(getattr(properties, name)) for name in names if hasattr(properties, name)]
    return "/".join([machine_id(), *(known or [f"process {os.getpid()}"])])


def device_name(device: torch.device) -> str:
    return "CPU" if device == CPU else str(torch.get_device_module(device).get_device_name(device))


def backend_for(device: torch.device) -> str:
    """The backends of torch's process groups: for tensors on the device and on the host."""
    return "gloo" if device == CPU else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
