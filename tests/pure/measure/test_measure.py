"""Lines, levels and steps from timings that are made up, and the meshes that they are measured on."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.measure.probed import BATCH, MESH, raw
from zeromesh.errors import ConfigError, MeasurementError, MeshError
from zeromesh.measure.fit import Line, fit
from zeromesh.measure.launch import default_mesh, mesh_text, on_all_ranks, parse_mesh
from zeromesh.measure.levels import Partition, close_parts, levels_of
from zeromesh.measure.probe import from_raw
from zeromesh.measure.selftest import _devices
from zeromesh.measure.steps import planned

SIZES = [1 << power for power in (12, 14, 16, 18, 20, 22)]


def timings(line: Line, *, noise: float = 0.0, rounds: int = 16, seed: int = 0) -> dict[int, list[float]]:
    """Timings that are never shorter than the line says, as real ones."""
    draw = random.Random(seed)
    return {
        size: [line.seconds(size) * (1 + draw.expovariate(1 / noise) if noise else 1) for _ in range(rounds)]
        for size in SIZES
    }


@settings(deadline=None, max_examples=50)
@given(latency=st.floats(1e-6, 1e-2), rate=st.floats(1e6, 1e11))
def test_a_line_is_found_again(latency, rate):
    found = fit(timings(Line(latency_s=latency, bytes_per_s=rate))).line
    # Where the latency hides the longest transfer, or the other way round, only their sum is known.
    for size in SIZES:
        assert found.seconds(size) == pytest.approx(latency + size / rate, rel=1e-3)
    if 0.1 < latency * rate / SIZES[2] < 10:
        assert (found.latency_s, found.bytes_per_s) == pytest.approx((latency, rate), rel=1e-3)


def test_what_a_bucket_lets_pass_at_once_does_not_make_its_link_faster():
    """128 KiB are there at once, the rest comes at the link's rate."""
    rate, latency, burst = 6e7, 1e-3, 131072
    seconds = {size: latency + max(0, size - burst) / rate for size in SIZES}
    found = fit({size: [s] * 8 for size, s in seconds.items()}).line
    assert found.bytes_per_s == pytest.approx(rate, rel=0.03)
    assert found.latency_s == pytest.approx(latency, rel=0.5)


def test_noise_and_disturbed_rounds():
    line = Line(latency_s=1e-4, bytes_per_s=5e8)
    found = fit(timings(line, noise=0.1))
    assert found.line.bytes_per_s == pytest.approx(line.bytes_per_s / 1.07, rel=0.08)
    assert 0.02 < found.spread < 0.12 and found.disagreement < 0.25
    found.require_trust("here")
    # A few disturbed rounds do not matter.
    clean = timings(Line(latency_s=1e-4, bytes_per_s=5e8))
    disturbed = {size: [t * 10 if i % 5 == 0 else t for i, t in enumerate(times)] for size, times in clean.items()}
    assert fit(disturbed).line == fit(clean).line


@pytest.mark.parametrize(
    ("slower", "message"),
    [
        (lambda i: i >= 8, r"gather over node: .* disagree by \d+% .*spread by \d+%.*--accept-noise"),
        (lambda i: i % 2, r"longest messages spread by 33% \(allowed 25%\)"),  # load that is the same in both halves
    ],
)
def test_timings_that_disagree_are_not_trusted(slower, message):
    clean = timings(Line(latency_s=1e-4, bytes_per_s=5e8))
    found = fit({size: [t * (1 + slower(i)) for i, t in enumerate(times)] for size, times in clean.items()})
    assert not found.trusted and (found.disagreement < 0.01) == ("longest" in message)
    with pytest.raises(MeasurementError, match=message):
        found.require_trust("gather over node")


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=8), min_size=2, max_size=5))
def test_any_timings_give_a_usable_line(rows):
    rounds = min(map(len, rows))
    found = fit({4**index * 1000: row[:rounds] for index, row in enumerate(rows)})
    assert found.line.latency_s >= 0 and 0 < found.line.bytes_per_s < float("inf")
    longest = max(statistics.median(row[:rounds]) for row in rows)
    assert found.line.latency_s <= longest * 1.001


def test_meshes_as_text():
    assert parse_mesh("cluster=2, node=4") == {"cluster": 2, "node": 4}
    assert mesh_text(parse_mesh("a=2,b=3,c=4")) == "a=2,b=3,c=4"
    # No meshes:
    for text in ("", "4", "node", "node=0", "node=-1", "node=2,node=2", "a b=2", "node=2x"):
        with pytest.raises(MeshError, match="sizes by axis name"):
            parse_mesh(text)


def test_levels_of_what_has_been_started(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert default_mesh(4) == {"node": 4}
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_mesh(4) == {"cluster": 2, "node": 4}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert default_mesh(4) == {"node": 8}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(MeshError, match="--mesh"):
        default_mesh(4)
    with pytest.raises(MeshError, match="has 4 ranks; 8 are there"):
        on_all_ranks("zeromesh.measure.probe:measure", {}, {"node": 4})
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR must say where rank 0 listens"):
        on_all_ranks("zeromesh.measure.probe:measure", {}, {"node": 8})
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(MeshError, match="does not say LOCAL_WORLD_SIZE"):
        default_mesh(4)
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="has WORLD_SIZE but not RANK"):
        default_mesh(4)


def test_levels_from_divisions_of_ranks():
    hosts, leaves = (
        Partition(source=by, parts=tuple(text)) for by, text in (("hosts", "aabbccdd"), ("pairs", "aaaabbbb"))
    )
    found = levels_of(8, [hosts, leaves], node=2)
    assert found.mesh == {"cluster": 2, "switch": 2, "node": 2} and list(found.mesh) == ["cluster", "switch", "node"]
    assert found.sources == {"node": "hosts", "switch": "pairs", "cluster": "all ranks"} and not found.missing
    # A partition that is no level is named.
    odd = Partition(source="leaf switches", parts=tuple("aaab"))
    pairs, threes = (Partition(source=f"by {n}", parts=tuple(rank // n for rank in range(12))) for n in (2, 3))
    assert levels_of(4, [odd], node=4).missing == (
        "leaf switches: 2 parts that are no equal blocks of neighbouring ranks: no level",
    )
    found = levels_of(12, [pairs, threes], node=12)
    assert found.mesh == {"node": 6, "package": 2} and "do not fit into those of 2" in found.missing[0]
    assert levels_of(4, [Partition(source="hosts", parts=tuple("abcd"))], node=1).mesh == {"cluster": 4}


def tree_distances(*sizes: int) -> dict[tuple[int, int], float]:
    """Distances of a tree's leaves, innermost size first: each level is four times as far, give or take a seventh."""
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


def test_a_probe_becomes_a_cluster():
    found = from_raw(raw(), MESH, "here")
    node, cluster = found.cluster.levels
    assert (node.name, node.size, node.kind) == ("node", 2, "loopback")
    assert node.bandwidth_bytes_per_s == pytest.approx(5e8) and node.host_bytes_per_s == pytest.approx(1e9)
    # Both ranks of a node have sent 12.5 MB/s at once.
    assert cluster.bandwidth_bytes_per_s == pytest.approx(25e6)
    assert dict(node.shares) == pytest.approx({"all_gather": 1.0, "all_reduce": 1.5, "reduce_scatter": 1.0})
    assert node.busy_latency_s == 2e-3
    assert cluster.latency_s == pytest.approx(1e-4, rel=0.1)
    assert found.cluster.device.cores == 0.5
    found.require_trust()
    with pytest.raises(MeasurementError, match="all_gather over node"):
        from_raw(raw(loaded=3.0), MESH, "here").require_trust()
    # A step is predicted as the planner does.
    cluster = from_raw(raw(), MESH, "here").cluster
    whole, one = (planned("node=3,cluster=1", cluster, replace(BATCH, micro_batches=count)) for count in (2, 1))
    assert one.step_s < whole.step_s and one.compute_s < whole.compute_s


def test_a_probe_says_what_copies_to_the_host_reach_alone():
    found = raw()
    found["machine"] |= {"cores": None, "host_copies": {"at once": 5e9, "up": 6e9, "down": 7e9}}
    assert "alone 6 GB/s up and 7 GB/s down" in dict(from_raw(found, MESH, "here").cluster.sources)["host_copy"]


@pytest.mark.parametrize(("cores", "slowest", "status"), [(None, 0.8, "look"), (None, 0.95, "ok"), (0.5, 0.5, "ok")])
def test_a_device_that_is_slower_than_its_like_is_marked(cores, slowest, status):
    """Ranks that share cores are not held to it."""
    check = _devices(
        {"cores": cores, "by_rank": {"copies": [3e12] * 4, "bf16 products": [5e14, 5e14, slowest * 5e14, 5e14]}}
    )
    assert check.status == status and f"bf16 products {slowest:.2f} (rank 2)" in check.detail
