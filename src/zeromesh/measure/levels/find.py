"""Asks every source on the ranks which levels they are joined by.

In the order in which they are believed: the hosts of the ranks; inside a host what drivers and the kernel say of its
devices, or of the processors that its ranks may use; above hosts SLURM's switches. Where these say nothing, pairs of
ranks are measured: inside the first host, which the others are taken to be like, and between the first ranks of hosts.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist

from zeromesh.errors import MeshError
from zeromesh.launch.device import machine_id
from zeromesh.launch.ranks import Ranks, from_first
from zeromesh.measure.levels import devices, slurm
from zeromesh.measure.levels.pairs import LONG_BYTES, MOST, measure_pairs
from zeromesh.measure.levels.partition import RATIO, Distances, Found, Partition, close_parts, levels_of
from zeromesh.units import format_bytes

NO_LINK = 1e2
"""Between devices that no xGMI joins, where it joins others: further than any two that it does."""

MEASURED = "measured: "

TOPOLOGY_CONF = "/etc/slurm/topology.conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank is.

    Args:
        machine: what no other one has.
        host: its name, as SLURM writes it.
        switches: above it, outermost first, if SLURM has told.
        device: its place on the bus; empty for the CPU or where it is not known.
        numa: the NUMA node of the processors that the rank may use, if it is one of several.
    """

    machine: str
    host: str
    switches: tuple[str, ...]
    device: str
    numa: int | None


def find_levels(ranks: Ranks) -> Found:
    """The levels of all ranks, the same on each; collective.

    Raises:
        MeshError: on all ranks; hosts have different numbers of ranks, or theirs are no neighbours.
    """
    places = _gather(_place_of(ranks), ranks)
    machines = Partition(source="hosts of the ranks", parts=tuple(place.machine for place in places))
    hosts = len(set(machines.parts))
    if not (size := machines.block):
        raise MeshError(
            f"{ranks.world} ranks on {hosts} hosts are no equal blocks of neighbouring ranks, so they have no levels: "
            f"start as many on each and number them host by host (torchrun does; srun -m block), or give --mesh"
        )
    missing: list[str] = []
    inside = _inside(ranks, places[:size], missing) if size > 1 else []
    found = [machines]
    for source, parts in inside:
        part_of = {rank: number for number, part in enumerate(parts) for rank in part}
        whole = tuple((rank // size, part_of[rank % size]) for rank in range(ranks.world))
        found.append(Partition(source=source, parts=whole))
    if hosts > 1:
        found += _above(ranks, places, size, missing)
    # A machine whose ranks were measured to be apart stands for several: an emulated cluster, or containers.
    apart = [each.block for each in found[1:] if hosts == 1 and each.source.startswith(MEASURED)]
    levels = levels_of(ranks.world, found, node=max(apart, default=size))
    return Found(mesh=levels.mesh, sources=levels.sources, missing=(*missing, *levels.missing))


def _gather(place: Place, ranks: Ranks) -> list[Place]:
    told = [place] * ranks.world
    dist.all_gather_object(told, place)
    return told


def _place_of(ranks: Ranks) -> Place:
    nodes = devices.read_numa(Path("/sys/devices/system/node"))
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return Place(
        machine=machine_id(),
        host=os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0],
        switches=slurm.parse_address(os.environ.get("SLURM_TOPOLOGY_ADDR", "")),
        device="" if ranks.on_cpu else _bus_place(ranks.device),
        numa=devices.numa_of(cores, nodes) if len(nodes) > 1 else None,
    )


def _bus_place(device: torch.device) -> str:
    properties = torch.get_device_module(device).get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(properties, name) for name in names):
        return ""
    domain, bus, slot = (getattr(properties, name) for name in names)
    return f"{domain:04x}:{bus:02x}:{slot:02x}"


# Inside a host --------------------------------------------------------------------------------------------------------


Parts = tuple[str, tuple[frozenset[int], ...]]
"""A source, and parts of a host's ranks by their number on it."""


def _inside(ranks: Ranks, places: Sequence[Place], missing: list[str]) -> list[Parts]:
    """Of the first host: what a source says, or else what its pairs were measured to take."""
    said = from_first(lambda: device_distances([place.device for place in places], run_program), "reading devices")
    if said is None and len(numa := {place.numa for place in places}) > 1 and None not in numa:
        pairs = combinations(enumerate(place.numa for place in places), 2)
        said = "NUMA nodes of the ranks' processors", {(i, j): 1.0 if a == b else 2.0 for (i, a), (j, b) in pairs}
    if said is not None:
        source, distances = said
        found = close_parts(range(len(places)), distances)
        if not found:
            missing.append(f"{source}: all ranks of a host are equally far from each other: no level inside it")
        return [(source, parts) for parts in found]
    missing.append(
        "no driver, kernel or affinity tells the ranks of a host apart" if ranks.on_cpu else
        "neither nvidia-smi, nor the kernel's amdkfd, nor /sys/bus/pci knows the devices of the ranks"
    )  # fmt: skip
    return _measured(ranks, range(len(places)), "ranks of the first host", missing)


def device_distances(
    places: Sequence[str], run: Callable[..., str], root: Path = Path("/sys")
) -> tuple[str, Distances] | None:
    """A source and what it says of the devices at these places; None where none knows them all.

    Args:
        places: of each rank, as `devices.normal_place` has them.
        run: a program's output, empty where it is not there.
        root: of the kernel's files.
    """
    if not all(places) or len(set(places)) < len(places):
        return None
    if indices := devices.parse_nvidia_places(
        run("nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader")
    ):
        table = devices.parse_nvidia_topology(run("nvidia-smi", "topo", "-m"))
        at = {index: place for place, index in indices.items()}
        named = {(at[a], at[b]): step for (a, b), step in table.items() if a in at and b in at}
        if named and set(places) <= set(indices):
            return "nvidia-smi topo (NVML)", devices.by_rank(named, places, max(devices.STEPS.values()))
    if xgmi := devices.read_kfd(root / "class/kfd/kfd/topology"):
        return "xGMI links (/sys/class/kfd)", devices.by_rank(xgmi, places, NO_LINK)
    pci = devices.read_pci(places, root / "bus/pci/devices")
    if len({place for pair in pci for place in pair}) == len(places) > 1:
        return "PCIe (/sys/bus/pci)", devices.by_rank(pci, places, max(devices.STEPS.values()))
    return None


def run_program(*command: str) -> str:
    """What it prints; empty where it is not there, fails or does not end."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


# Above hosts ----------------------------------------------------------------------------------------------------------


def _above(ranks: Ranks, places: Sequence[Place], size: int, missing: list[str]) -> list[Partition]:
    ways = [place.switches for place in places]
    source = "SLURM_TOPOLOGY_ADDR"
    if not all(ways):
        source, told = from_first(_slurm_topology, "reading SLURM's topology")
        ways = [tuple(told.get(place.host, ())) for place in places]
    if all(ways):
        return switch_partitions(ways, source)
    missing.append("SLURM names no switches above the hosts")
    firsts = range(0, ranks.world, size)
    return [
        Partition(source=by, parts=tuple(_part_of(rank // size * size, parts) for rank in range(ranks.world)))
        for by, parts in _measured(ranks, firsts, "first ranks of hosts", missing)
    ]


def switch_partitions(ways: Sequence[tuple[str, ...]], source: str) -> list[Partition]:
    """One for each depth of switches, outermost first, where all ranks have switches so deep.

    Args:
        ways: of each rank, the switches above its host, outermost first.
        source: who says so.
    """
    depth = min(map(len, ways))
    return [Partition(source=source, parts=tuple(way[: index + 1] for way in ways)) for index in range(depth)]


def _slurm_topology() -> tuple[str, Mapping[str, tuple[str, ...]]]:
    if "SLURM_JOB_ID" in os.environ and (told := slurm.parse_topology(run_program("scontrol", "show", "topology"))):
        return "scontrol show topology", told
    path = Path(os.environ.get("SLURM_CONF", TOPOLOGY_CONF)).with_name("topology.conf")
    return f"{path}", slurm.parse_topology(path.read_text()) if path.exists() else {}


# Measured -------------------------------------------------------------------------------------------------------------


def _measured(ranks: Ranks, members: Sequence[int], who: str, missing: list[str]) -> list[Parts]:
    if len(members) < 3:
        return []  # two have one distance
    if len(members) > MOST:
        missing.append(f"{len(members)} {who} are too many to measure in pairs (at most {MOST})")
        return []
    rates, latencies = measure_pairs(ranks, members)
    size = format_bytes(LONG_BYTES)
    found: list[Parts] = [(f"{MEASURED}{size} between pairs of {who}", p) for p in close_parts(members, rates)]
    known = {parts for _, parts in found}
    found += [
        (f"{MEASURED}latency between pairs of {who}", p) for p in close_parts(members, latencies) if p not in known
    ]
    if not found:
        spread = max(rates.values()) / min(rates.values())
        missing.append(
            f"pairs of {who} take times for {size} that differ by up to {spread:.2f}, and make no groups that are "
            f"{RATIO} apart: no level among them"
        )
    return found


def _part_of(member: int, parts: Sequence[frozenset[int]]) -> int:
    return next(index for index, part in enumerate(parts) if member in part)
