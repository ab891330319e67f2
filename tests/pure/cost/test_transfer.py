from dataclasses import replace
from itertools import pairwise

import pytest

from zeromesh.cluster import Cluster, Curve, preset
from zeromesh.cost import ComputeModel, default_constants
from zeromesh.cost.transfer import TransferModel
from zeromesh.schedule import Transfer
from zeromesh.schedule.transfer import wire_bytes
from zeromesh.strategy import Layout

CONSTANTS = default_constants()
CLUSTER = preset("a800-8x-hdr").take(64)
MODEL = TransferModel(CLUSTER, CONSTANTS, ComputeModel(device=CLUSTER.device, constants=CONSTANTS))
NODE, OUTER = Layout.of("node=3,cluster=3", CLUSTER.axes).axes
NUMEL = 2**28


def transfer(operation: str, axis=OUTER, wire: str = "bf16") -> Transfer:
    return Transfer(operation=operation, axis=axis, numel=NUMEL, wire=wire)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_sent_bytes_are_the_schedules(operation):
    for axis in (NODE, OUTER):
        step = transfer(operation, axis)
        assert MODEL.cost(step).sent_bytes == pytest.approx(step.sent_bytes)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_narrow_wires_are_faster_between_nodes(operation):
    seconds = [MODEL.cost(transfer(operation, wire=wire)).seconds for wire in ("fp32", "bf16", "int8", "int4")]
    assert seconds == sorted(seconds, reverse=True)


def test_a_quantised_wire_pays_for_its_kernels():
    step = transfer("all_gather", wire="int8")
    on_the_wire = wire_bytes(NUMEL // 8, "int8") * 8
    plain = MODEL.joint((OUTER,), "all_gather", on_the_wire // 2, "bf16").seconds
    kernels = MODEL.cost(step).seconds - plain
    assert kernels == pytest.approx(MODEL.compute.memory(2 * NUMEL * (1 + 1 / 8) + 2 * on_the_wire), rel=1e-3)


def test_a_joint_group_is_a_flat_ring_or_what_is_asked_for():
    flat, two_level, overlapped = (
        MODEL.joint((NODE, OUTER), "all_gather", NUMEL, "bf16", algorithm)
        for algorithm in ("flat", "hierarchical", "ho_ring")
    )
    assert flat.seconds != two_level.seconds
    assert overlapped.seconds < two_level.seconds
    chain = [MODEL.joint((OUTER,), "all_gather", NUMEL // 8, "bf16"), MODEL.joint((NODE,), "all_gather", NUMEL, "bf16")]
    assert two_level.seconds == pytest.approx(sum(cost.seconds for cost in chain))


def test_what_was_asked_before_is_remembered():
    assert MODEL.cost(transfer("all_gather")) is MODEL.cost(transfer("all_gather"))


POINTS = {1e5: 1e-4, 1e6: 4e-4, 1e7: 2e-3, 1e8: 1.5e-2}


def with_curves(*curves: Curve) -> Cluster:
    node, outer = CLUSTER.levels
    return replace(CLUSTER, levels=(node, replace(outer, latency_s=1e-6, curves=curves)))


def outer_cost(cluster: Cluster, sent_bytes: float, size: int = 8):
    """A gather between nodes in which one member sends so much: all of its ranks at once."""
    model = TransferModel(cluster, CONSTANTS, ComputeModel(device=cluster.device, constants=CONSTANTS))
    (axis,) = Layout.of(f"node=0,cluster[{size}]=3,cluster[{8 // size}]=0", CLUSTER.axes).axes[1:2]
    numel = round(sent_bytes / 8 / 2 * size / (size - 1))
    return model.cost(Transfer(operation="all_gather", axis=axis, numel=numel, wire="bf16"))


def test_what_was_measured_is_believed():
    cluster = with_curves(Curve(operation="all_gather", ranks=8, points=POINTS))
    for sent_bytes, seconds in POINTS.items():
        assert outer_cost(cluster, sent_bytes).seconds == pytest.approx(seconds, rel=0.01)
    assert outer_cost(cluster, 4e6).seconds == pytest.approx(4e-4 + 1.6e-3 / 3, rel=0.01)  # a third of the way
    rate = cluster.levels[1].bandwidth_bytes_per_s * CONSTANTS.share_of("infiniband")
    assert outer_cost(cluster, 1e9).seconds == pytest.approx(1.5e-2 + 9e8 / rate, rel=0.01)  # behind its end
    # Half of the members: as many bytes on the links, and less latency.
    half, whole = (outer_cost(cluster, 1e7, size=size) for size in (4, 8))
    assert half.busy[0][1] == pytest.approx(whole.busy[0][1], rel=0.01)
    assert whole.seconds - half.seconds == pytest.approx(4 * 1e-6, rel=0.05)


def test_short_messages_are_no_faster_by_their_bytes_than_long_ones():
    """As on a shaped link after a pause; bounds on joined units rely on it, and on longer ones taking longer."""
    noisy = with_curves(Curve(operation="all_gather", ranks=8, points={1e5: 3e-5, 1e6: 9e-4, 1e7: 5e-4, 1e8: 5e-2}))
    found = [(sent, dict(outer_cost(noisy, sent).busy)[1]) for sent in (1e3, 1e5, 3e5, 1e6, 3e6, 1e7, 1e8, 1e9)]
    assert all(one <= other * 1.001 for (_, one), (_, other) in pairwise(found))
    assert all(one / x >= other / y * 0.999 for (x, one), (y, other) in pairwise(found))


def test_a_device_that_computes_takes_the_longer_curve():
    alone = Curve(operation="all_gather", ranks=8, points=POINTS)
    beside = replace(alone, beside_computation=True, points={sent: 2 * s for sent, s in POINTS.items()})
    cost = outer_cost(with_curves(alone, beside), 1e7)
    assert cost.seconds == pytest.approx(2e-3, rel=0.01) and cost.busy_latency_s == pytest.approx(2e-3, rel=0.01)
    assert outer_cost(with_curves(alone), 1e7).busy_latency_s == 0.0
