"""The plan is checked by carrying frames through it; counts on its links, and messages to its ranks."""

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import Lab, LabError, LinkLevel, Registry, Tree, Wiring, by_level, counters, unavailable_reason
from lab.plan import Command, address, environment, mac
from lab.shell import execute
from zeromesh.errors import InputError

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


# ---- test_tree


RATES = st.one_of(
    st.none(),
    st.integers(min_value=1, max_value=10**13).map(lambda bits: bits / 8),
    st.floats(min_value=1.0, max_value=1e12),
)
LEVELS = st.builds(LinkLevel, size=st.integers(1, 4), rate_bytes_per_s=RATES)
TREES = st.builds(Tree, levels=st.lists(LEVELS, max_size=4), ranks_per_leaf=st.integers(1, 4))


def test_the_documented_tree():
    tree = Tree.parse("2@200mbit,2@1gbit,2")
    assert tree.levels == (LinkLevel(size=2, rate_bytes_per_s=200e6 / 8), LinkLevel(size=2, rate_bytes_per_s=1e9 / 8))
    assert (tree.ranks_per_leaf, tree.num_leaves, tree.world_size) == (2, 4, 8)
    assert tree.switches == ((), (0,), (1,))
    assert [(link.name, link.level) for link in tree.links] == [
        ("0", 0), ("1", 0), ("0.0", 1), ("0.1", 1), ("1.0", 1), ("1.1", 1),
    ]  # fmt: skip
    assert [(place.rank, place.local_rank, place.leaf, place.path) for place in tree.places[3:6]] == [
        (3, 1, 1, (0, 1)),
        (4, 0, 2, (1, 0)),
        (5, 1, 2, (1, 0)),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2@200mbit,1", "2@200mbit"),
        ("2@1gbit,2", "2@1000mbit,2"),
        ("2@1Gbit,2", " 2 @ 1 Gbit/s , 2"),
        ("2@125 MB/s,2", "2@1gbit,2"),
        ("2@2.5gbit,2", "2@2500mbit,2"),
    ],
)
def test_two_spellings_of_one_tree_are_equal(one, other):
    assert Tree.parse(one) == Tree.parse(other)


@given(TREES)
def test_every_rank_has_one_place_and_every_leaf_one_link_up(tree):
    assert Tree.parse(str(tree)) == tree
    assert [place.rank for place in tree.places] == list(range(tree.world_size))
    assert len({(place.path, place.local_rank) for place in tree.places}) == tree.world_size
    ends = [link.path for link in tree.links]
    assert len(set(ends)) == len(ends)
    assert {*ends, ()} == {*tree.switches, *tree.leaves}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"'' is not a whole number; expected a tree, outermost level first"),
        ("two", r"'two' is not a whole number"),
        ("2,2", r"level '2' has no rate; only the last number, ranks per leaf, has none"),
        ("2@200mbit,0", r"a leaf has at least 1 rank, got 0"),
        ("0@200mbit,1", r"tree '0@200mbit,1': level '0@200mbit': .*at least 1 member, got 0"),
        ("-2@200mbit", r"'-2' is not a whole number"),
        ("2@fast,2", r"level '2@fast': expected a rate, such as 200mbit, .* got 'fast'"),
        ("2@200mb,2", r"level '2@200mb': expected a rate, .* got '200mb'"),
        ("2@0mbit,2", r"a rate is a finite number of at least 1 bit/s, got 0 bit/s"),
        ("2@-1 Gbit/s,2", r"at least 1 bit/s, got -1e\+09 bit/s"),
        ("2@1gbit@2,2", r"expected a rate, .* got '1gbit@2'"),
        ("2@1gbit,,2", r"level '' has no rate"),
        ("64@1gbit,64@1gbit,1", r"4096 leaves; one machine emulates at most 1024"),
    ],
)
def test_what_is_not_a_tree_is_refused(text, message):
    with pytest.raises(LabError, match=message):
        Tree.parse(text)
    with pytest.raises(LabError, match="finite"):
        LinkLevel(size=2, rate_bytes_per_s=float("inf"))


# ---- Which labs are found and whose they are, in made-up directories; machines where no lab can be made


@pytest.fixture
def registry(tmp_path):
    for name in ("netns", "proc"):
        (tmp_path / name).mkdir()
    return Registry(netns=tmp_path / "netns", proc=tmp_path / "proc")


def run_process(registry, pid, *, start, state="S"):
    directory = registry.proc / str(pid)
    directory.mkdir(exist_ok=True)
    # The name of a process may hold spaces and parentheses.
    fields = [state, *["0"] * 18, str(start), "0"]
    (directory / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")


def make_namespaces(registry, *names):
    for name in names:
        (registry.netns / name).touch()


def test_a_lab_is_live_while_its_owner_runs(registry):
    run_process(registry, os.getpid(), start=100)
    name = registry.own_name(7)
    assert name == f"zmlab-{os.getpid()}-100-7"
    make_namespaces(registry, f"{name}-root")
    assert registry.labs() == (name,)
    assert registry.leftovers() == ()


@pytest.mark.parametrize("change", ["gone", "zombie", "pid used again"])
def test_a_lab_is_leftover_when_its_owner_does_not_run(registry, change):
    make_namespaces(registry, "zmlab-41-100-0-root")
    if change != "gone":
        run_process(registry, 41, start=101 if change == "pid used again" else 100, state="SZ"[change == "zombie"])
    assert registry.leftovers() == ("zmlab-41-100-0",)


def test_where_no_lab_can_be_made(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"needs root .* runs as user 1000: use sudo"), Lab("2@1gbit"):
        pass
    assert "needs root" in (unavailable_reason() or "")
    # Missing programs are named with their packages.
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LabError, match=r"needs ip, tc, bridge, setpriv, not found in PATH: install iproute2 util-linux"
    ):
        Lab("2@1gbit").__enter__()
    # A lab that is not up runs nothing.
    with pytest.raises(InputError, match="is not up"):
        Lab("2@1gbit").run(["true"])
    monkeypatch.undo()  # a failed batch names the line and the complaint
    script = "echo 'Error: no such device.' >&2; echo 'Command failed -:2' >&2; exit 1"
    command = Command(argv=("sh", "-c", script), stdin="first line\nsecond line\n", purpose="make veth pairs")
    with pytest.raises(LabError, match=r"cannot make veth pairs: sh -c .* second line: Error: no such device\.$"):
        execute(command)
