"""Clusters with another network or device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeromesh.cluster.catalogue import find_cluster
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import Kernel
from zeromesh.cluster.level import Curve
from zeromesh.cost.constants import default_constants
from zeromesh.errors import InputError
from zeromesh.planner.what_if import what_if

CLUSTER = find_cluster("h100-8x-ndr").take(64)


@pytest.mark.parametrize(
    ("change", "level", "field", "factor"),
    [
        ("cluster.bandwidth=2x", 1, "bandwidth_bytes_per_s", 2.0),
        ("node.bandwidth = .5x", 0, "bandwidth_bytes_per_s", 0.5),
        ("cluster.latency=0.1x", 1, "latency_s", 0.1),
    ],
)
def test_one_level_changes_by_a_factor(change: str, level: int, field: str, factor: float) -> None:
    changed = what_if(CLUSTER, change)
    before, after = CLUSTER.levels[level], changed.levels[level]
    assert getattr(after, field) == pytest.approx(factor * getattr(before, field))
    assert replace(after, **{field: getattr(before, field)}) == before
    assert changed.levels[1 - level] == CLUSTER.levels[1 - level] and changed.device == CLUSTER.device


def measured() -> Cluster:
    points = {1e6: 300e-6, 1e9: 30e-3}
    curves = tuple(
        Curve(operation="all_gather", ranks=8, points=points, beside_computation=busy) for busy in (False, True)
    )
    kernels = [Kernel(kind="attention", dtype="bf16", shape=(4096, 128), forward=1e14, backward=2e14)]
    kernels += [Kernel(kind="elementwise", dtype="bf16", forward=1e12, backward=2e12)]
    level = replace(CLUSTER.levels[1], curves=curves, busy_latency_s=2 * CLUSTER.levels[1].latency_s)
    device = replace(CLUSTER.device, kernels=tuple(kernels))
    return replace(CLUSTER, levels=(CLUSTER.levels[0], level), device=device)


def test_measured_curves_and_kernels_change_too() -> None:
    """In a curve, bandwidth changes the seconds beyond the latency, and latency only these."""
    cluster = measured()
    level = cluster.level("cluster")
    for index, step_s in ((0, level.latency_s), (1, 2 * level.latency_s)):
        waits_s = default_constants().launch_s + 7 * step_s
        before = [seconds for _, seconds in level.curves[index].pairs]
        faster = what_if(cluster, "cluster.bandwidth=2x").level("cluster").curves[index]
        assert [s for _, s in faster.pairs] == pytest.approx([waits_s + (s - waits_s) / 2 for s in before])
        slower = what_if(cluster, "cluster.latency=3x").level("cluster").curves[index]
        assert [s for _, s in slower.pairs] == pytest.approx([s + 2 * 7 * step_s for s in before])
    assert what_if(cluster, "cluster.latency=3x").level("cluster").busy_latency_s == pytest.approx(6 * level.latency_s)
    attention, elementwise = what_if(cluster, "flops=0.5x").device.kernels
    assert (attention.forward, attention.backward) == (0.5e14, 1e14) and elementwise == cluster.device.kernels[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rack.bandwidth=2x", r"--what-if changes node.bandwidth, node.latency, cluster.bandwidth, .*got 'rack.band"),
        ("cluster.size=2x", r"got 'cluster.size=2x'"),
        ("cluster", r"got 'cluster'"),
        ("cluster.bandwidth=2", r"expected a rate with a unit.*got '2'.*or a factor, such as 2x"),
        ("memory=big", r"expected bytes with a unit.*or a factor"),
        ("cluster.latency=0x", r"above 0, got 0x"),
        ("flops=-1 TFLOP/s", r"above 0, got -1 TFLOP/s"),
    ],
)
def test_wrong_changes(change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        what_if(CLUSTER, change)
