from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.cluster.catalogue import preset
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import Device
from zeromesh.cluster.level import Level
from zeromesh.cost.collective import collective_cost
from zeromesh.cost.constants import default_constants
from zeromesh.cost.group import Group, ring_steps

CONSTANTS = default_constants()
SHARES = {kind: 1.0 for kind, _ in CONSTANTS.link_share}
#: No losses: formulas can be checked by hand.
IDEAL = replace(CONSTANTS, link_share=SHARES, size_scale_s=0.0, launch_s=0.0, tree_share=0.5)
OPERATIONS = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"]
ALGORITHMS = ["flat", "hierarchical", "ho_ring"]
DEVICE = Device(name="d", memory_bytes=1e9, peak_flops={"bf16": 1e12})


def levels(*shape: tuple[int, float, float], kind: str = "other") -> Cluster:
    """(size, bandwidth, latency) of each level, innermost first."""
    made = tuple(
        Level(name=f"l{i}", size=n, bandwidth_bytes_per_s=b, latency_s=t, kind=kind)
        for i, (n, b, t) in enumerate(shape)
    )
    return Cluster(name="c", device=DEVICE, levels=made)


def test_a_ring_on_one_level_by_hand():
    group = Group.of(levels((4, 1e9, 1e-6)), [("l0", 4)], IDEAL)
    cost = collective_cost(group, "all_gather", 8e6, IDEAL)
    assert cost.seconds == pytest.approx(3 * 1e-6 + 0.75 * 8e6 / 1e9)
    assert cost.sent_bytes == 6e6
    assert cost.busy == ((0, pytest.approx(6e-3)),)
    reduced = collective_cost(group, "all_reduce", 8e6, IDEAL)
    assert (reduced.sent_bytes, reduced.seconds) == (12e6, pytest.approx(2 * cost.seconds))
    for size, sent in ((1, 1e9), (4, 0)):  # nothing to send
        none = Group.of(levels((4, 1e9, 1e-6)), [("l0", size)], CONSTANTS)
        assert collective_cost(none, "all_gather", sent, CONSTANTS).seconds == 0


def test_eight_groups_share_the_nodes_nics_and_one_group_has_them_alone():
    """One device per node drives one port. The line rate is published for a gradient's all-reduce: 30B over 8 nodes, 8
    groups at once, 12.06 GB a rank at 12.5 GB/s (arXiv 2311.00257 states 100 GB/s a node)."""
    cluster = preset("a800-8x-hdr").take(64)
    alone = Group.of(cluster, [("cluster", 8)], IDEAL)
    joint = Group.of(cluster, [("node", 8), ("cluster", 8)], IDEAL)
    half = Group.of(cluster, [("node", 4), ("cluster", 8)], IDEAL)
    assert [group.hops[-1].sharing for group in (alone, joint, half)] == [8, 1, 2]
    assert alone.hops[-1].rate_bytes_per_s == pytest.approx(12.5e9)
    assert joint.hops[-1].rate_bytes_per_s == pytest.approx(100e9)
    cost = collective_cost(alone, "all_reduce", 27.57e9 * 2 / 8, IDEAL)
    assert cost.seconds == pytest.approx(0.965, rel=2e-3)
    one_per_node = replace(cluster, levels=(replace(cluster.levels[0], size=1), cluster.levels[1]))
    group = Group.of(one_per_node, [("cluster", 8)], IDEAL)
    assert group.hops[0].rate_bytes_per_s == pytest.approx(25e9)
    group = Group.of(preset("frontier-mi250x").take(384), [("package", 2), ("node", 4), ("cluster", 48)], IDEAL)
    assert (ring_steps([hop.size for hop in group.hops]), group.size) == ((192, 144, 47), 384)


@pytest.mark.parametrize(("gpus", "saved"), [(16, 0.467), (32, 0.226), (64, 0.111), (128, 0.055)])
def test_two_levels_save_what_the_papers_bytes_say(gpus, saved):
    """PaRO (arXiv 2310.06003): bytes across nodes of two levels against a flat ring, m = 8."""
    cluster = preset("a100-8x-100g").take(gpus)
    group = Group.of(cluster, [("node", 8), ("cluster", gpus // 8)], IDEAL)
    flat, two_level = (collective_cost(group, "all_gather", 1e9, IDEAL, algorithm=a) for a in ("flat", "hierarchical"))
    assert 1 - dict(two_level.busy)[1] / dict(flat.busy)[1] == pytest.approx(saved, abs=6e-4)


def test_two_level_rings():
    m, nodes, v = 8, 4, 1e6
    cluster = levels((m, 100e9, 2e-6), (nodes, 10e9, 20e-6))
    group = Group.of(cluster, [("l0", m), ("l1", nodes)], IDEAL)
    cost = collective_cost(group, "all_gather", v * m * nodes, IDEAL, algorithm="ho_ring")
    outer = (nodes - 1) * (20e-6 + v * m / 10e9)
    inner = (m - 1) * (2e-6 + v / 100e9)
    assert cost.seconds == pytest.approx(max(outer, nodes * inner) + inner)
    # SimAI's table (nic_ratio, 128 nodes): 1 GiB reaches about .31 of line rate, 16 MiB about .009.
    cluster = preset("h100-8x-ndr").take(1024)
    group = Group.of(cluster, [("node", 8), ("cluster", 128)], CONSTANTS)
    for size_bytes, share in ((2**24, 0.0087), (2**30, 0.3146), (2**34, 0.919)):
        seconds = collective_cost(group, "all_gather", size_bytes, CONSTANTS).seconds
        assert size_bytes / seconds / 400e9 == pytest.approx(share, rel=0.25)
    # An all-reduce over many nodes takes the tree while it is short.
    group = Group.of(preset("h100-8x-ndr").take(1024), [("cluster", 128)], CONSTANTS)
    short = collective_cost(group, "all_reduce", 1e4, CONSTANTS).seconds
    assert short == pytest.approx(CONSTANTS.launch_s + 2 * 7 * 14e-6, rel=0.05)
    ring_latency = 2 * 127 * 14e-6
    assert collective_cost(group, "all_reduce", 1e10, CONSTANTS).seconds > ring_latency


SHAPES = st.lists(st.tuples(st.integers(1, 8), st.floats(1e8, 1e12), st.floats(0, 1e-4)), min_size=1, max_size=3)
SIZES = st.floats(0, 1e12)


def seconds(shape, operation, algorithm, size_bytes, kind="nvlink") -> float:
    group = Group.of(levels(*shape, kind=kind), [(f"l{i}", n) for i, (n, _, _) in enumerate(shape)], CONSTANTS)
    return collective_cost(group, operation, size_bytes, CONSTANTS, algorithm=algorithm).seconds


def no_less(larger: float, smaller: float) -> bool:
    return larger >= smaller * (1 - 1e-12)


@given(
    SHAPES, st.sampled_from(OPERATIONS), st.sampled_from(ALGORITHMS), SIZES, SIZES, st.sampled_from(["nvlink", "efa"])
)
def test_cost_is_positive_and_monotone_in_bytes(shape, operation, algorithm, one, other, kind):
    less, more = sorted([one, other])
    assert seconds(shape, operation, algorithm, less, kind) >= 0
    assert no_less(seconds(shape, operation, algorithm, more, kind), seconds(shape, operation, algorithm, less, kind))


@given(SHAPES, st.sampled_from(OPERATIONS), st.sampled_from(ALGORITHMS), st.floats(0, 1e9), st.data())
def test_more_members_never_make_it_faster(shape, operation, algorithm, shard_bytes, data):
    """With the shard fixed (the buffer grows with the ranks), as when a model stays and the cluster grows."""
    index = data.draw(st.integers(0, len(shape) - 1))
    n, bandwidth, latency = shape[index]
    larger = [*shape[:index], (n + 1, bandwidth, latency), *shape[index + 1 :]]

    def whole(of):
        ranks = 1
        for size, _, _ in of:
            ranks *= size
        return shard_bytes * ranks

    small = seconds(shape, operation, algorithm, whole(shape))
    assert no_less(seconds(larger, operation, algorithm, whole(larger)), small)
