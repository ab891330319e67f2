"""Levels from what machines and launchers say, in the words in which they say it."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from zeromesh.measure.levels.devices import numa_of, parse_nvidia_topology, read_numa
from zeromesh.measure.levels.find import device_distances, switch_partitions
from zeromesh.measure.levels.partition import Partition, close_parts, levels_of
from zeromesh.measure.levels.slurm import hosts_of, parse_address, parse_topology

# nvidia-smi topo -m, with its underlined header, of a machine with an NVSwitch and of one with bridges between pairs.
SWITCHED = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-51\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t52-103\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
BRIDGED = """\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tNODE\tNODE\t0-31\t0
GPU1\tNV4\t X \tNODE\tNODE\t0-31\t0
GPU2\tNODE\tNODE\t X \tNV4\t0-31\t0
GPU3\tNODE\tNODE\tNV4\t X \t0-31\t0
"""
INDICES = "0, 00000000:07:00.0\n1, 00000000:0B:00.0\n2, 00000000:48:00.0\n3, 00000000:4C:00.0\n"
PLACES = ["0000:07:00", "0000:0b:00", "0000:48:00", "0000:4c:00"]

PAIRS = (frozenset({0, 1}), frozenset({2, 3}))


def nvidia(table: str):
    return lambda *command: table if "topo" in command else INDICES


@pytest.mark.parametrize(("table", "parts"), [(SWITCHED, []), (BRIDGED, [PAIRS])])
def test_nvlink_by_places_on_the_bus(table, parts, tmp_path):
    source, distances = device_distances(PLACES, nvidia(table), tmp_path)
    assert source == "nvidia-smi topo (NVML)" and len(distances) == 6
    assert close_parts(range(4), distances) == parts
    # Ranks in another order than NVML's: what CUDA_VISIBLE_DEVICES does. They are no neighbours then.
    _, shuffled = device_distances([PLACES[index] for index in (0, 2, 1, 3)], nvidia(table), tmp_path)
    assert close_parts(range(4), shuffled) == ([(frozenset({0, 2}), frozenset({1, 3}))] if parts else [])
    assert device_distances(PLACES[:1] * 4, nvidia(table), tmp_path) is None  # one device of several ranks


def test_nvlinks_of_other_numbers_are_other_steps():
    found = parse_nvidia_topology(BRIDGED.replace("NODE", "NV1"))
    assert close_parts(range(4), found) == [PAIRS]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("wide", ["200000", None])
def test_xgmi_of_the_kernel(tmp_path, wide):
    """Two cards of two dies each, as MI250X: 200 GB/s inside a card, 50 between; older kernels do not say."""
    nodes = tmp_path / "class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 64\nsimd_count 0\n")
    for number, bus in enumerate((0xC1, 0xC6, 0xC9, 0xCE), start=1):
        write(nodes / f"{number}/properties", f"cpu_cores_count 0\nsimd_count 440\nlocation_id {bus << 8}\ndomain 0\n")
        write(
            nodes / f"{number}/io_links/0/properties", f"type 2\nnode_from {number}\nnode_to 0\nmax_bandwidth 36000\n"
        )
    for one, other in combinations(range(1, 5), 2):
        width = wide if (one + 1) // 2 == (other + 1) // 2 else "50000"
        said = f"max_bandwidth {width}\n" if wide else ""
        write(nodes / f"{one}/io_links/{other}/properties", f"type 11\nnode_from {one}\nnode_to {other}\n{said}")
    places = [f"0000:{bus}:00" for bus in ("c1", "c6", "c9", "ce")]
    source, distances = device_distances(places, lambda *_: "", tmp_path)
    assert "kfd" in source and close_parts(range(4), distances) == ([PAIRS] if wide else [])


def test_bridges_of_pcie_and_numa_nodes(tmp_path):
    """Two switches at two roots: each joins two devices."""
    for bus, root, port in (("07", "00", "01"), ("0b", "00", "01"), ("48", "40", "03"), ("4c", "40", "03")):
        real = tmp_path / f"devices/pci0000:{root}/0000:{root}:{port}.0/0000:{root[0]}6:{bus}.0/0000:{bus}:00.0"
        write(real / "numa_node", "0\n" if root == "00" else "1\n")
        link = tmp_path / f"bus/pci/devices/0000:{bus}:00.0"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(real)
    source, distances = device_distances(PLACES, lambda *_: "", tmp_path)
    assert source.startswith("PCIe") and close_parts(range(4), distances) == [PAIRS]
    assert device_distances(["0000:99:00", *PLACES[1:]], lambda *_: "", tmp_path) is None
    for node, cores in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        write(tmp_path / f"devices/system/node/node{node}/cpulist", f"{cores}\n")
    nodes = read_numa(tmp_path / "devices/system/node")
    assert numa_of({9, 2}, nodes) == 0 and numa_of({5}, nodes) == 1 and numa_of({3, 4}, nodes) is None


def test_switches_of_slurm():
    told = parse_topology(
        "# topology.conf\n"
        "SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=n[08-09]\n"
        "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[10-11]\n"
        "SwitchName=core Level=1 LinkSpeed=1 Nodes=n[08-11] Switches=leaf[0-1]\n"
    )
    assert told == {f"n{number:02d}": ("core", f"leaf{number // 10}") for number in (8, 9, 10, 11)}
    assert parse_topology("BlockName=b0 BlockIndex=0 Nodes=a[0-1] BlockSize=2\nBlockSizes=2") == {
        "a0": ("b0",),
        "a1": ("b0",),
    }
    assert parse_address("core.leaf3.n17") == ("core", "leaf3") and parse_address("n17") == ()
    assert hosts_of("r[1-2]n[1-2],x") == ["r1n1", "r1n2", "r2n1", "r2n2", "x"]
    assert hosts_of("n[1-x]") == hosts_of("(null)") == []
    assert parse_topology("SwitchName=a Switches=b\nSwitchName=b Switches=a Nodes=") == {}  # above each other
    ways = [("core", "leaf0")] * 4 + [("core", "leaf1")] * 4
    hosts = Partition(source="hosts", parts=tuple("aabbccdd"))
    found = levels_of(8, [hosts, *switch_partitions(ways, "SLURM")], node=2)
    assert found.mesh == {"cluster": 2, "switch": 2, "node": 2} and list(found.mesh) == ["cluster", "switch", "node"]
    assert found.sources == {"node": "hosts", "switch": "SLURM", "cluster": "all ranks"} and not found.missing


def test_what_is_no_level_is_said():
    odd = Partition(source="leaf switches", parts=tuple("aaab"))
    pairs, threes = (Partition(source=f"by {n}", parts=tuple(rank // n for rank in range(12))) for n in (2, 3))
    assert levels_of(4, [odd], node=4).missing == (
        "leaf switches: 2 parts that are no equal blocks of neighbouring ranks: no level",
    )
    found = levels_of(12, [pairs, threes], node=12)
    assert found.mesh == {"node": 6, "package": 2} and "do not fit into those of 2" in found.missing[0]
    assert levels_of(4, [Partition(source="hosts", parts=tuple("abcd"))], node=1).mesh == {"cluster": 4}


def tree_distances(*sizes: int) -> dict[tuple[int, int], float]:
    """Of a tree's leaves, innermost size first: each level is four times as far, give or take a seventh."""
    world, found = 1, {}
    for size in sizes:
        world *= size
    for one, other in combinations(range(world), 2):
        inside, level = 1, 0
        while one // inside != other // inside:
            inside *= sizes[level]
            level += 1
        found[one, other] = 4.0**level * (1 + ((one * 7 + other) % 5 - 2) / 15)
    return found


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4), (2, 2, 2), (8,)])
def test_measured_distances_make_the_tree_that_they_come_from(sizes):
    distances, world = tree_distances(*sizes), len(set(sum(tree_distances(*sizes), ())))
    parts = close_parts(range(world), distances)
    blocks = sorted(len(each[0]) for each in parts)
    assert blocks == ([] if len(sizes) == 1 else [sizes[0]] if len(sizes) == 2 else [2, 4])
