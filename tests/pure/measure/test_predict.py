"""A probe's timings as a cluster, and what a step takes there; all figures are made up."""

import json

import pytest

from tests.pure.measure.probed import BATCH, MESH, UNITS, compute, raw, schedule
from zeromesh.errors import InputError, MeasurementError
from zeromesh.measure.probe import from_raw
from zeromesh.measure.replay import read_schedule, schedule_json
from zeromesh.measure.selftest import _devices
from zeromesh.measure.steps import compute_of, predict


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


def test_a_step_takes_what_its_units_and_the_agreement_take():
    cluster, written = from_raw(raw(), MESH, "here").cluster, schedule_json(schedule("node=3,cluster=1"))
    expected = predict(written, cluster, BATCH, compute())
    agreeing = predict(written, cluster, BATCH, {**compute(), "agreement_s": 0.0})
    assert expected.step_s - agreeing.step_s == pytest.approx(5e-3)
    slower = {**compute(), "forward": dict.fromkeys(UNITS, 1e-2)}
    later = predict(written, cluster, BATCH, slower)
    assert later.compute_s - expected.compute_s == pytest.approx(2 * len(UNITS) * 9e-3, rel=0.2)


def test_a_schedule_survives_its_file():
    made = schedule("node=3,cluster=1;prefetch=2").reordered([0, 2, 1, 3])
    again = read_schedule(json.loads(json.dumps(schedule_json(made))))
    assert again.program == made.program
    assert again.units == made.units and again.layout == made.layout and again.memory == made.memory


def test_joined_units_take_what_their_members_take():
    """Also where the engine has joined them with the root, whose name they then have."""
    found = compute_of(compute())
    for names, units in [
        (UNITS, [0, 1, 2, 3]),
        (["", "layers.0 to layers.1", "layers.2"], [0, 1, 1, 2]),
        (["", "layers.1 to layers.2"], [0, 0, 1, 1]),
        ([""], [0, 0, 0, 0]),
    ]:
        made = schedule("node=0,cluster=0", names)
        assert found.parts(made) == dict(zip(UNITS, units, strict=True))
        whole = predict(schedule_json(made), from_raw(raw(), MESH, "here").cluster, BATCH, compute())
        assert whole.compute_s >= 2 * len(UNITS) * 3e-3 + 4e-3  # two micro-batches and the optimizer, slowed or not
    turned = schedule("node=3,cluster=3").reordered([0, 2, 1, 3])
    assert list(found.parts(turned).items()) == [("", 0), ("layers.1", 2), ("layers.0", 1), ("layers.2", 3)]
    for unknown in ("layers.7", "layers.0 to layers.7"):
        with pytest.raises(InputError, match=r"has not been measured; known: root, layers\.0"):
            found.parts(schedule("node=0,cluster=0", ["", unknown]))
    with pytest.raises(InputError, match="activation checkpointing"):
        found.seconds("recompute", "layers.0")


@pytest.mark.parametrize(("cores", "slowest", "status"), [(None, 0.8, "look"), (None, 0.95, "ok"), (0.5, 0.5, "ok")])
def test_a_device_that_is_slower_than_its_like_is_marked(cores, slowest, status):
    """Ranks that share cores are not held to it."""
    check = _devices(
        {"cores": cores, "by_rank": {"copies": [3e12] * 4, "bf16 products": [5e14, 5e14, slowest * 5e14, 5e14]}}
    )
    assert check.status == status and f"bf16 products {slowest:.2f} (rank 2)" in check.detail
