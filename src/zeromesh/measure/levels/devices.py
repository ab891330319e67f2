"""How far the devices of one machine are from each other, from what drivers and the kernel say. Torch-free.

Distances are steps of a scale that all sources share: more links are closer, a link is closer than any way over PCIe,
and that the further the higher it climbs, as `nvidia-smi topo -m` names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path, PurePosixPath

from zeromesh.measure.levels.partition import Distances

STEPS = {"PIX": 1e3, "PXB": 1e4, "PHB": 1e5, "NODE": 1e6, "SYS": 1e7}
"""One bridge of PCIe, several, its root in the processor, another root of the same NUMA node, another node."""

XGMI = 11
"""`CRAT_IOLINK_TYPE_XGMI` of the kernel's amdkfd."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def parse_nvidia_topology(text: str) -> dict[tuple[int, int], float]:
    """Distances between GPUs by NVML's indices, from the text of `nvidia-smi topo -m`; empty where it has no table.

    >>> parse_nvidia_topology("     GPU0 GPU1 CPU Affinity\\nGPU0  X   NV4  0-23\\nGPU1 NV4   X   0-23")
    {(0, 1): 0.25}
    """
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    gpus = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    found = {}
    for words in lines:
        if words[:1] and re.fullmatch(r"GPU\d+", words[0]) and "X" in words:
            row = int(words[0][3:])
            for column, word in zip(gpus, words[1:], strict=False):
                if row < column and (step := _nvidia_step(word)) is not None:
                    found[row, column] = step
    return found


def _nvidia_step(word: str) -> float | None:
    links = re.fullmatch(r"NV(\d+)", word)
    return 1 / int(links[1]) if links and int(links[1]) else STEPS.get(word)


def parse_nvidia_places(text: str) -> dict[str, int]:
    """NVML's index by place on the bus, from `nvidia-smi --query-gpu=index,pci.bus_id --format=csv,noheader`.

    >>> parse_nvidia_places("0, 00000000:1B:00.0")
    {'0000:1b:00': 0}
    """
    rows = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    return {normal_place(place): int(index) for index, place in rows if index.strip().isdecimal()}


def normal_place(text: str) -> str:
    """A place on the PCI bus as domain:bus:device, in lower case and with a domain of four digits."""
    domain, bus, device = text.strip().lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{device.partition('.')[0]}"


def read_kfd(topology: Path) -> dict[tuple[str, str], float]:
    """Distances between AMD's GPUs by place on the bus, from `/sys/class/kfd/kfd/topology`: those that xGMI joins, the
    closer the wider. Pairs that it does not join are left out."""
    places, found = {}, {}
    nodes = sorted(topology.glob("nodes/*"), key=lambda node: int(node.name) if node.name.isdecimal() else -1)
    for node in nodes:
        said = _properties(node / "properties")
        if said.get("simd_count"):
            at = said.get("location_id", 0)
            places[node.name] = f"{said.get('domain', 0):04x}:{at >> 8 & 0xFF:02x}:{at >> 3 & 0x1F:02x}"
    for node in nodes:
        for link in sorted(node.glob("io_links/*")):
            said = _properties(link / "properties")
            ends = [places.get(str(said.get(name))) for name in ("node_from", "node_to")]
            if said.get("type") == XGMI and ends[0] and ends[1]:
                # Kernels before 5.15 do not say how wide: all are alike then.
                one, other = sorted((ends[0], ends[1]))
                found[one, other] = 1e6 / max(1, said.get("max_bandwidth", 0)) if said.get("max_bandwidth") else 1.0
    return found


def _properties(path: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def read_pci(places: Sequence[str], devices: Path) -> dict[tuple[str, str], float]:
    """Distances over PCIe by place on the bus, from `/sys/bus/pci/devices`; devices that are not there are left out."""
    ways = {place: _way(place, devices) for place in places}
    known = {place: way for place, way in ways.items() if way is not None}
    return {(a, b): STEPS[_step(known[a], known[b])] for a, b in combinations(sorted(known), 2)}


def _way(place: str, devices: Path) -> tuple[tuple[str, ...], str] | None:
    """The bridges from the root to a device, and its NUMA node."""
    entry = devices / f"{place}.0"
    if not entry.exists():
        return None
    parts = PurePosixPath(entry.resolve()).parts
    start = next((index for index, part in enumerate(parts) if part.startswith("pci")), 0)
    node = entry / "numa_node"
    return parts[start:-1], node.read_text().strip() if node.exists() else "-1"


def _step(one: tuple[tuple[str, ...], str], other: tuple[tuple[str, ...], str]) -> str:
    (way, node), (other_way, other_node) = one, other
    common = sum(1 for a, b in zip(way, other_way, strict=False) if a == b and way[0] == other_way[0])
    if common >= 2:  # the root and a port of it at least: a switch is below
        return "PIX" if max(len(way), len(other_way)) - common <= 1 else "PXB"
    if common == 1:
        return "PHB"
    return "NODE" if node == other_node else "SYS"


def parse_cores(text: str) -> set[int]:
    """Of a kernel's list of processors.

    >>> sorted(parse_cores("0-2,7"))
    [0, 1, 2, 7]
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found


def read_numa(system: Path) -> dict[int, set[int]]:
    """Processors by NUMA node, from `/sys/devices/system/node`."""
    return {
        int(node.name[4:]): parse_cores((node / "cpulist").read_text())
        for node in sorted(system.glob("node[0-9]*"))
        if (node / "cpulist").exists()
    }


def numa_of(cores: set[int], nodes: Mapping[int, set[int]]) -> int | None:
    """The node that has all of these processors; None where several do."""
    return next((node for node, owned in nodes.items() if cores and cores <= owned), None)


def by_rank(distances: Mapping[tuple[str, str], float], places: Sequence[str], apart: float) -> Distances:
    """Distances between ranks whose devices are at these places; pairs that are not listed are `apart`."""
    found = {}
    for (i, one), (j, other) in combinations(enumerate(places), 2):
        key = (one, other) if (one, other) in distances else (other, one)
        found[i, j] = distances.get(key, apart)
    return found
