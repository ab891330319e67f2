"""Seconds of a schedule's transfers, and the part of a device that collectives take meanwhile."""

from dataclasses import replace
from itertools import pairwise

import pytest

from zeromesh.cluster.catalogue import preset
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.level import Curve
from zeromesh.cost.collective import HOST, CollectiveCost, one_after_another
from zeromesh.cost.compute import ComputeModel
from zeromesh.cost.constants import default_constants
from zeromesh.cost.contention import slowdown, taken_share
from zeromesh.cost.transfer import TransferModel
from zeromesh.schedule.transfer import Transfer, wire_bytes
from zeromesh.strategy import Layout

CONSTANTS = default_constants()
CLUSTER = preset("a800-8x-hdr").take(64)
MODEL = TransferModel(CLUSTER, CONSTANTS, ComputeModel(device=CLUSTER.device, constants=CONSTANTS))
NODE, OUTER = Layout.of("node=3,cluster=3", CLUSTER.axes).axes
NUMEL = 2**28


def transfer(operation: str, axis=OUTER, wire: str = "bf16") -> Transfer:
    return Transfer(operation=operation, axis=axis, numel=NUMEL, wire=wire)


def test_a_joint_group_is_a_flat_ring_or_what_is_asked_for():
    flat, two_level, overlapped = (
        MODEL.joint((NODE, OUTER), "all_gather", NUMEL, "bf16", algorithm)
        for algorithm in ("flat", "hierarchical", "ho_ring")
    )
    assert flat.seconds != two_level.seconds
    assert overlapped.seconds < two_level.seconds
    chain = [MODEL.joint((OUTER,), "all_gather", NUMEL // 8, "bf16"), MODEL.joint((NODE,), "all_gather", NUMEL, "bf16")]
    assert two_level.seconds == pytest.approx(sum(cost.seconds for cost in chain))


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


A800 = preset("a800-8x-hdr").take(64)


def taken(cluster: Cluster, *names: str) -> float:
    axes = Layout.of(",".join(f"{name}=3" for name, _ in cluster.axes), cluster.axes).axes
    return taken_share(cluster, [axis for axis in axes if axis.mesh_axis in names], CONSTANTS)


def test_what_collectives_take_of_a_device():
    """Inside a node as much as measured on an A100; a rank alone in its node drives one card, a whole node all of them,
    and a ring over many cards takes no more than one inside the node. A larger device is slowed less."""
    assert slowdown(taken(A800, "node")) == pytest.approx(1.1256, abs=1e-4)
    assert slowdown(5.0) == pytest.approx(10.0)  # something is always left to compute with
    one = CONSTANTS.channel_share * CONSTANTS.card_channels / 108
    assert taken(A800, "cluster") == pytest.approx(one)
    assert taken(A800, "node", "cluster") == pytest.approx(4 * one)
    pairs = replace(A800, levels=(replace(A800.levels[0], size=2), A800.levels[1]))
    assert taken(pairs, "node", "cluster") == pytest.approx(2 * one)
    many = replace(A800, levels=(A800.levels[0], replace(A800.levels[1], ports=64)))
    assert taken(many, "node", "cluster") <= taken(many, "node")
    h100, unknown = preset("h100-8x-ndr").take(16), replace(A800, device=replace(A800.device, multiprocessors=None))
    assert taken(h100, "node") == pytest.approx(taken(A800, "node") * 108 / 132)
    assert taken(unknown, "node") == pytest.approx(taken(A800, "node") * 108 / CONSTANTS.multiprocessors)


def test_processor_cores_are_shared_by_the_network_not_here():
    """And are charged once for the bytes that they move."""
    cpu = preset("gloo-laptop")
    assert cpu.device.cores is not None
    assert taken(cpu, *(name for name, _ in cpu.axes)) == 0.0
    model = TransferModel(cpu, CONSTANTS, ComputeModel(device=cpu.device, constants=CONSTANTS))
    (axis, *_) = Layout.of("zero3", cpu.axes).axes
    assert model.joint((axis,), "all_gather", 2**20, "fp32").memory_s == 0.0


def test_a_transfer_carries_it_and_a_chain_has_the_mean():
    model = TransferModel(A800, CONSTANTS, ComputeModel(device=A800.device, constants=CONSTANTS))
    node, outer = Layout.of("node=3,cluster=3", A800.axes).axes
    costs = [model.joint((axis,), "all_gather", 2**28, "bf16") for axis in (node, outer)]
    assert [cost.taken for cost in costs] == [taken(A800, "node"), taken(A800, "cluster")]
    both = one_after_another(*costs)
    assert both.taken * both.seconds == pytest.approx(sum(cost.taken * cost.seconds for cost in costs))
    assert one_after_another(CollectiveCost(seconds=0.0)).taken == 0.0
    # Bytes that are sent go through memory three times inside a node and five over a network.
    for axes, passes in (((node,), 3), ((outer,), 5), ((node, outer), 3 + 2 / 8)):
        cost = model.joint(axes, "all_gather", 2**28, "bf16")
        assert cost.memory_s == pytest.approx(model.compute.memory(passes * cost.sent_bytes))
    gather, both = (model.joint((node,), operation, 2**28, "bf16") for operation in ("all_gather", "all_reduce"))
    assert both.memory_s == pytest.approx(2 * gather.memory_s)
    assert one_after_another(gather, both).memory_s == pytest.approx(3 * gather.memory_s)


def test_kernels_of_a_collective_take_the_device_from_computation_for_as_long_as_they_run():
    plain = CollectiveCost(seconds=3.0, busy=((0, 2.0),), taken=0.1)
    own = plain.with_kernels(1.0, None)
    assert own.seconds == 4.0 and own.transfer_s == 2.0
    assert own.taken * own.seconds == pytest.approx(0.1 * 3.0 + 1.0)
    for cores, share in ((0.5, 1.0), (1.0, 1.0), (4.0, 0.25)):  # a core, as computation has
        hosted = plain.with_kernels(1.0, cores)
        assert hosted.seconds == 4.0 and dict(hosted.busy)[HOST] == share


def test_quantising_is_charged_for_what_it_reads_and_writes():
    """int8 sends half of bf16; a gather quantises one part and restores all, a reduction the other way round."""
    model = TransferModel(A800, CONSTANTS, ComputeModel(device=A800.device, constants=CONSTANTS))
    (node, _), numel = Layout.of("node=3,cluster=3", A800.axes).axes, 2**28
    sent = 8 * wire_bytes(numel // 8, "int8")  # with scales
    for operation, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        cost = model.joint((node,), operation, numel, "int8")
        kernels = times * model.compute.memory(2 * numel * (1 + 1 / 8) + 2 * sent)
        assert cost.taken * cost.seconds == pytest.approx(
            kernels + taken(A800, "node") * (cost.seconds - kernels), rel=1e-3
        )


# Memory ---------------------------------------------------------------------------------------------------------------


def test_a_kernel_that_waits_for_memory_beside_a_gather_takes_twice_as_long_on_an_a100():
    """Seen: .02 ms and .05 ms (NVIDIA/nccl#1428), of two digits: 1.8 to 3.7 times."""
    a100 = preset("a100-8x-hdr").take(8)
    model = TransferModel(a100, CONSTANTS, ComputeModel(device=a100.device, constants=CONSTANTS))
    gather = model.joint(Layout.of("node=3,cluster=3", a100.axes).axes[:1], "all_gather", 2**32, "bf16")
    assert 1.8 <= slowdown(gather.taken + gather.memory_s / gather.transfer_s) <= 3.7
