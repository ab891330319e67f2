"""A probe's timings as a cluster, and what a step takes there; all figures are made up."""

from dataclasses import replace

import pytest

from tests.pure.measure.probed import BATCH, MESH, raw
from zeromesh.errors import MeasurementError
from zeromesh.measure.probe import from_raw
from zeromesh.measure.selftest import _devices
from zeromesh.measure.steps import planned


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


def test_a_step_is_predicted_as_the_planner_does():
    cluster = from_raw(raw(), MESH, "here").cluster
    whole, one = (planned("node=3,cluster=1", cluster, replace(BATCH, micro_batches=count)) for count in (2, 1))
    assert one.step_s < whole.step_s and one.compute_s < whole.compute_s


@pytest.mark.parametrize(("cores", "slowest", "status"), [(None, 0.8, "look"), (None, 0.95, "ok"), (0.5, 0.5, "ok")])
def test_a_device_that_is_slower_than_its_like_is_marked(cores, slowest, status):
    """Ranks that share cores are not held to it."""
    check = _devices(
        {"cores": cores, "by_rank": {"copies": [3e12] * 4, "bf16 products": [5e14, 5e14, slowest * 5e14, 5e14]}}
    )
    assert check.status == status and f"bf16 products {slowest:.2f} (rank 2)" in check.detail
