"""The plan is checked by carrying frames through it; counts on its links, and messages to its ranks."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import LinkBytes, LinkLevel, Tree, Wiring, by_level, counters, difference
from lab.environment import environment
from lab.plan import Bucket, address, mac

SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=3)
LINK = re.compile(
    r"link add (\S+) index (\d+)(?: address (\S+))? netns (\S+) type veth peer name (\S+) index (\d+) netns (\S+)"
)
FORWARD = re.compile(r"fdb replace (\S+) dev (\S+) master static")


def wiring(*sizes, rate_bytes_per_s=25e6, **options):
    levels = tuple(LinkLevel(size=size, rate_bytes_per_s=rate_bytes_per_s) for size in sizes)
    return Wiring(lab="zmlab-1-0", tree=Tree(levels=levels, ranks_per_leaf=2), **options)


def lines_of(plan, program):
    """(namespace, line) of each batch line for `program`, in order."""
    for command in plan.up():
        if command.argv[0] == program:
            namespace = command.argv[2] if command.argv[1] == "-n" else ""
            yield from ((namespace, line) for line in command.stdin.splitlines())


def test_a_namespace_is_made_before_it_is_used():
    ends = ("root", "0", "1", "0.0", "0.1", "1.0", "1.1")
    assert wiring(2, 2).namespaces == tuple(f"zmlab-1-0-{end}" for end in ends)
    commands = wiring(2, 2).up()
    assert commands[0].stdin.split("\n")[0] == "netns add zmlab-1-0-root"
    assert [command.purpose for command in commands[:2]] == ["make network namespaces", "make veth pairs"]


@given(SIZES)
def test_a_frame_reaches_its_leaf_over_the_links_between(sizes):
    plan = wiring(*sizes)
    cables, macs, forwarding = {}, {}, {}
    for _, line in lines_of(plan, "ip"):
        if match := LINK.fullmatch(line):
            lower, lower_index, mac_address, below, upper, upper_index, above = match.groups()
            assert lower_index != upper_index
            cables[below, lower], cables[above, upper] = (above, upper), (below, lower)
            if mac_address:
                macs[below] = mac_address
    for namespace, line in lines_of(plan, "bridge"):
        match = FORWARD.fullmatch(line)
        assert match, line
        forwarding[namespace, match[1]] = match[2]
    leaves = [plan.namespace(path) for path in plan.tree.leaves]
    assert sorted(macs) == sorted(leaves)
    for source_path, source in zip(plan.tree.leaves, leaves, strict=True):
        for target_path, target in zip(plan.tree.leaves, leaves, strict=True):
            if source == target:
                continue
            here, num_hops = cables[source, "eth0"][0], 1
            while here != target:
                assert here not in leaves, "the frame went to a leaf that it was not for"
                here, num_hops = cables[here, forwarding[here, macs[target]]][0], num_hops + 1
            common = next(i for i, (a, b) in enumerate(zip(source_path, target_path, strict=True)) if a != b)
            assert num_hops == 2 * (len(sizes) - common)


@given(SIZES)
def test_every_leaf_knows_all_the_others_and_sets_the_congestion_control(sizes):
    plan = wiring(*sizes)
    num_leaves = plan.tree.num_leaves
    for leaf, path in enumerate(plan.tree.leaves):
        lines = [line for namespace, line in lines_of(plan, "ip") if namespace == plan.namespace(path)]
        neighbours = {tuple(line.split()[2:5:2]) for line in lines if line.startswith("neighbour")}
        assert neighbours == {(address(other), mac(other)) for other in range(num_leaves) if other != leaf}
        routes = [line for line in lines if line.startswith("route")]
        assert len(routes) == 2
        assert all(f"src {address(leaf)} congctl cubic" in line for line in routes)


def test_each_link_is_shaped_at_both_ends():
    buckets = {(bucket.namespace, bucket.interface): bucket.rate_bytes_per_s for bucket in wiring(2).buckets}
    root, *below = wiring(2).namespaces
    assert buckets == {(root, "port0"): 25e6, (root, "port1"): 25e6, (below[0], "eth0"): 25e6, (below[1], "eth0"): 25e6}
    plan = wiring(2, rate_bytes_per_s=None)
    assert plan.buckets == () and not list(lines_of(plan, "tc"))
    # Addresses are all different.
    assert len({address(leaf) for leaf in range(1024)}) == len({mac(leaf) for leaf in range(1024)}) == 1024
    # One leaf without links uses loopback.
    plan = wiring()
    assert [line for _, line in lines_of(plan, "ip")] == ["netns add zmlab-1-0-root", "link set lo up"]
    assert (plan.interface, plan.leaf_address(0)) == ("lo", "127.0.0.1")


@pytest.mark.parametrize(
    ("rate_bytes_per_s", "instruction"),
    [
        # 1 ms of 25 MB/s is less than two of the largest packets: 128 KiB; four of them are more than 20 ms.
        (25e6, "qdisc replace dev eth0 root tbf rate 200000000bit burst 131072 limit 524288"),
        (500e6, "qdisc replace dev eth0 root tbf rate 4000000000bit burst 500000 limit 10000000"),
    ],
)
def test_burst_and_queue_grow_with_the_rate(rate_bytes_per_s, instruction):
    bucket = Bucket(namespace="n", interface="eth0", rate_bytes_per_s=rate_bytes_per_s)
    assert bucket.instruction == instruction


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_ipv6_is_kept_quiet_where_the_kernel_has_it(has_ipv6):
    quiet = [line for _, line in lines_of(wiring(2, has_ipv6=has_ipv6), "ip") if "addrgenmode none" in line]
    # two ports and the bridge of the root, one interface in each leaf
    assert len(quiet) == (5 if has_ipv6 else 0)


WIRING = Wiring(lab="zmlab-1-0", tree=Tree.parse("2@200mbit,1@1gbit,1"))


def row(interface, *, received, sent):
    return {
        "ifname": interface,
        "stats64": {"rx": {"bytes": received, "packets": received // 100}, "tx": {"bytes": sent, "packets": 0}},
    }


def test_what_the_upper_end_receives_was_sent_from_below():
    printed = {
        (): [row("lo", received=7, sent=7), row("port0", received=500, sent=40), row("port1", received=0, sent=2)],
        (0,): [row("eth0", received=40, sent=500), row("port0", received=501, sent=41)],
        (1,): [row("port0", received=3, sent=4)],
    }
    read = counters.parse(WIRING.tree.links, printed)
    assert {name: (link.sent_bytes, link.received_bytes) for name, link in read.items()} == {
        "0": (500, 40),
        "1": (0, 2),
        "0.0": (501, 41),
        "1.0": (3, 4),
    }
    assert read["0"].sent_packets == 5
    assert [level.sent_bytes for level in by_level(WIRING, read)] == [500, 504]
    assert [level.sent_payload_bytes for level in by_level(WIRING, read)] == [500 - 5 * 66, 504 - 5 * 66]


def test_counters_are_read_and_subtracted():
    assert [command.argv[2] for command in counters.read_commands(WIRING).values()] == [
        "zmlab-1-0-root",
        "zmlab-1-0-0",
        "zmlab-1-0-1",
    ]
    # A difference is taken link by link.
    before = {"0": LinkBytes(sent_bytes=1, received_bytes=2, sent_packets=3, received_packets=4)}
    after = {"0": LinkBytes(sent_bytes=11, received_bytes=22, sent_packets=33, received_packets=44)}
    spent = difference(after, before)
    assert spent == {"0": LinkBytes(sent_bytes=10, received_bytes=20, sent_packets=30, received_packets=40)}
    assert spent["0"] + before["0"] == after["0"]


def of_rank(rank, text="2@200mbit,2@1gbit,2", around=()):
    plan = Wiring(lab="zmlab-1-0", tree=Tree.parse(text))
    return environment(plan, plan.tree.places[rank], port=29501, around=dict(around))


def test_what_a_rank_is_told():
    expected = """RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=2 GROUP_WORLD_SIZE=4 NODE_RANK=2
        ROLE_RANK=5 ROLE_WORLD_SIZE=8 ROLE_NAME=default MASTER_ADDR=10.77.0.1 MASTER_PORT=29501
        GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 TP_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
        ZEROMESH_LAB=zmlab-1-0 ZEROMESH_LAB_TREE=2@200mbit,2@1gbit,2 ZEROMESH_LAB_ADDRESS=10.77.0.3"""
    assert of_rank(5) == dict(pair.split("=") for pair in expected.split())
    # The owner's environment is passed on, another torchrun's is not.
    around = {"HOME": "/root", "OMP_NUM_THREADS": "4", "RANK": "9", "TORCHELASTIC_RUN_ID": "x"}
    env = of_rank(0, around=around.items())
    assert (env["HOME"], env["OMP_NUM_THREADS"], env["RANK"]) == ("/root", "4", "0")
    assert "TORCHELASTIC_RUN_ID" not in env
    # One leaf without links meets on loopback.
    env = of_rank(1, "4")
    assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"], env["LOCAL_RANK"]) == ("127.0.0.1", "lo", "1")
