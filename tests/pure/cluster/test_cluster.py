"""Cluster files and presets: read, written, listed, cut to a world."""

from dataclasses import asdict, is_dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from zeromesh.cli.app import app, main
from zeromesh.cluster.catalogue import find_cluster, preset, preset_names
from zeromesh.cluster.cluster import Cluster
from zeromesh.cluster.device import Device, Kernel
from zeromesh.cluster.level import Curve, Level
from zeromesh.cluster.read import cluster_toml, parse_cluster, read_cluster
from zeromesh.errors import ClusterError

GOOD = """
name = "a800-8x-hdr"
[device]
name = "A800-SXM4-80GB"
memory = "80 GB"
[device.peak]            # dense matrix rate
bf16 = "312 TFLOP/s"
[[level]]
name = "node"
size = 8
bandwidth = "200 GB/s"
latency = "6 us"
[[level]]
name = "cluster"
size = 128
bandwidth = "100 GB/s"
latency = "15 us"
"""


def level(name: str = "node", size: int = 8) -> Level:
    return Level(name=name, size=size, bandwidth_bytes_per_s=1e9, latency_s=1e-6)


def cluster(*sizes: int) -> Cluster:
    device = Device(name="d", memory_bytes=1e9, peak_flops={"bf16": 1e12})
    return Cluster(name="c", device=device, levels=tuple(level(f"l{i}", n) for i, n in enumerate(sizes)))


def test_the_documented_file_reads():
    read = parse_cluster(GOOD)
    assert read.axes == (("node", 8), ("cluster", 128))
    assert read.world == 1024
    assert read.device.memory_bytes == 80e9
    assert read.device.peak() == 312e12
    assert read.level("node").bandwidth_bytes_per_s == 200e9
    assert read.level("cluster").latency_s == pytest.approx(15e-6)
    assert hash(read) == hash(parse_cluster(GOOD))
    # A device computes in the best dtype it has.
    assert preset("dgx2-v100-400g").device.matrix_dtype == "fp16"
    assert preset("a800-8x-hdr").device.matrix_dtype == "bf16"
    with pytest.raises(ClusterError, match="has no peak for bf16"):
        preset("dgx2-v100-400g").device.peak("bf16")
    # Unknown names list the nearest.
    with pytest.raises(ClusterError, match="did you mean a800-8x-hdr"):
        find_cluster("a800-8x-hrd")
    with pytest.raises(ClusterError, match="has no level 'nod'; did you mean node"):
        preset("a800-8x-hdr").level("nod")


MEMORY, PEAK = 'memory = "80 GB"', 'bf16 = "312 TFLOP/s"'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (MEMORY, "", r"device\.memory: is missing; expected bytes with a unit"),
        (MEMORY, 'memory = "-80 GB"', r"device\.memory: expected a finite value above zero"),
        (MEMORY, f"{MEMORY}\ncores = nan", r"device\.cores: expected a finite value above zero"),
        ("size = 128", "size = 1\nshares = { all_reduce = nan }", r"level\[1\]\.shares\.all_reduce: expected a finite"),
        (MEMORY, 'memroy = "80 GB"', r"device\.memroy: unknown key; did you mean memory"),
        ("[device]", 'host_memory = "0 GB"\n[device]', r"host_memory: expected a finite value above zero"),
        (PEAK, "", r"device\.peak: expected a rate by dtype"),
        ('latency = "15 us"', 'latency = "-15 us"', r"level\[1\]\.latency: expected a finite time of zero or more"),
        ('bandwidth = "100 GB/s"', 'bandwidth = "100 GB"', r"level\[1\]\.bandwidth: .*unknown unit 'GB'"),
        ("size = 128", "size = 0", r"level\[1\]\.size: expected a whole number of at least 1"),
        ('name = "cluster"', 'name = "node"', "levels must have distinct names, node stands twice"),
        ('name = "cluster"', 'name = "clus ter"', r"level\[1\]: level 'clus ter': a name must consist of letters"),
        (
            "size = 128",
            'size = 128\nkind = "nvlnk"',
            r"level\[1\]: .*kind must be one of .*ethernet.*got 'nvlnk': did you mean nvlink",
        ),
        (
            "[[level]]",
            "[[level]]\nsizes = 8",
            r"level\[0\]\.sizes: unknown key; did you mean size\?\n  level\[1\]\.sizes: [^\n]*$",
        ),
        (PEAK, f'{PEAK}\n[device.achievable]\nbf16 = "2712 TFLOP/s"', r"achievable .* of the peak, so bf16 needs"),
        ("[device]", "[device", "not valid TOML"),
        (GOOD, f"level = []\n{GOOD[: GOOD.index('[[level]]')]}", r"level: expected one \[\[level\]\] table per level"),
        (GOOD[GOOD.index("[[level]]") :], "", r"level: is missing; expected one \[\[level\]\] table per level"),
    ],
)
def test_a_wrong_file_names_file_key_and_what_was_expected(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ClusterError, match=message) as caught:
        read_cluster(path)
    assert str(caught.value).startswith(str(path))
    with pytest.raises(ClusterError, match="cannot be read as a cluster file"):
        find_cluster(tmp_path / "absent.toml")


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_take_fills_inner_levels_first(sizes, data):
    whole = cluster(*sizes)
    depth = data.draw(st.integers(0, len(sizes) - 1))
    count = data.draw(st.integers(1, sizes[depth]))
    inner = whole.members_below(depth)
    taken = whole.take(inner * count)
    assert taken.world == inner * count
    assert [n for _, n in taken.axes] == [*sizes[:depth], count, *[1] * (len(sizes) - depth - 1)]


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ((8, 4), 12, "take 8 or 16"),
        ((2, 8, 4), 20, "take 16 or 32"),
        ((8, 4), 40, "has 32 devices, 40 were asked for"),
        ((8, 4), 0, "at least 1"),
    ],
)
def test_take_refuses_what_does_not_fill_a_level(sizes, world, message):
    with pytest.raises(ClusterError, match=message):
        cluster(*sizes).take(world)
    assert [cluster(2, 4, 8).link_kind(i) for i in range(3)] == ["nvlink", "nvlink", "infiniband"]
    assert cluster(8).link_kind(0) == "nvlink"  # by their place


@pytest.mark.parametrize("name", preset_names())
def test_every_constant_of_a_preset_has_a_source(name):
    found = preset(name)
    sources = dict(found.sources)
    device = {"device.memory", "device.memory_bandwidth", "device.peak"}
    levels = {f"level.{lv.name}.{key}" for lv in found.levels for key in ("bandwidth", "latency")}
    achieved = {"device.achievable"} if found.device.achievable_flops else set()
    cores = {"device.multiprocessors" if found.device.cores is None else "device.cores"}
    host = {"host_memory"} if found.host_memory_bytes else set()
    assert set(sources) == device | levels | achieved | cores | host
    assert all(len(text) > 10 for text in sources.values())
    assert found.name == name and found.description
    for dtype, rate in found.device.achievable_flops:
        assert rate < found.device.peak(dtype)
    require_same(parse_cluster(cluster_toml(found)), found)


@pytest.mark.parametrize(
    ("old", "new", "bandwidth", "achievable"),
    [
        ("", "", 2039e9, 271.2e12),
        ("80 GB", '40 GB"\nmemory_bandwidth = "1 GB/s', 1e9, 271.2e12),
        ("80 GB", "40 GB", 1555e9, 271.2e12),
        ("312 TFLOP/s", "250 TFLOP/s", 2039e9, None),  # 271.2 of 250 is no rate of this version
        ("A800-SXM4-80GB", "Abacus 9", None, None),
    ],
)
def test_what_a_file_leaves_out_of_a_known_device_is_filled_in(tmp_path, old, new, bandwidth, achievable):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new, 1))
    device = read_cluster(path).device
    assert (device.memory_bytes_per_s, device.achievable()) == (bandwidth, achievable)


def test_optional_keys_and_odd_text_are_read_back():
    cluster = preset("gloo-laptop")
    level = replace(
        cluster.levels[0],
        host_bytes_per_s=1.25e9,
        host_call_s=4e-4,
        ports=2,
        busy_latency_s=2e-3,
        shares={"all_reduce": 1.25},
        curves=(
            Curve(operation="all_gather", ranks=4, points={65536: 1e-4, 1e6: 4e-3}),
            Curve(operation="all_reduce", ranks=4, points={65536: 2e-2}, beside_computation=True),
        ),
    )
    odd = replace(
        cluster,
        host_memory_bytes=1.5e12,
        host_copy_bytes_per_s=2.4e10,
        host_step_bytes_per_s=1.5e11,
        description='say "hi"\\ in 2 lines\n',
        device=replace(
            cluster.device,
            cores=0.5,
            kernels=(
                Kernel(kind="product", dtype="bf16", shape=(128, 256, 512), forward=1e11, backward=9e10),
                Kernel(kind="attention", dtype="fp32", shape=(64, 32), forward=1e10, backward=8e9),
                Kernel(kind="elementwise", dtype="bf16", forward=2e9, backward=3e9),
                Kernel(kind="optimizer", dtype="fp32", forward=2e10, backward=2e10),
            ),
        ),
        levels=(level,),
        sources=(("device.memory", "measured: µs"),),
    )
    text = cluster_toml(odd, remarks=("made by hand",))
    assert text.startswith("# made by hand\n")
    require_same(parse_cluster(text), odd)


def require_same(one: object, other: object) -> None:
    """Equal to the five digits of a file."""
    got, expected = flat(one), flat(other)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), key


def flat(value: object, key: str = "") -> dict[str, object]:
    if isinstance(value, dict | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for k, item in pairs for name, leaf in flat(item, f"{key}.{k}").items()}
    return flat(asdict(value), key) if is_dataclass(value) else {key: value}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["clusters", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_clusters_lists_every_preset_and_prints_one_with_its_sources(monkeypatch, capsys):
    listed, shown = run(), run("a800-8x-hdr")
    assert "a800-8x-hdr" in listed and "frontier-mi250x" in listed
    assert "312 TFLOP/s" in shown and "200 GB/s" in shown and "6 us" in shown and "arXiv 2311.00257" in shown
    assert parse_cluster(shown).axes == preset("a800-8x-hdr").axes
    monkeypatch.setattr("sys.argv", ["zeromesh", "clusters", "a800-8x-hrd"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "did you mean a800-8x-hdr" in capsys.readouterr().err


def test_a_cloud_s_name_of_its_machines_is_a_preset_s_other_name():
    assert preset("p5en").name == "h200-8x-efa"
    assert {preset(name).device.name for name in ("p4d", "p5", "p6-b200", "p6e-gb200")} == {
        "A100-SXM4-40GB",
        "H100-SXM5-80GB",
        "B200-SXM-180GB",
        "GB200-186GB",
    }
    p4d = preset("p4d")
    assert (p4d.host_memory_bytes, p4d.take(4).host_memory_bytes) == (1152 * 2**30, 1152 * 2**30)
    assert [p4d.machine_devices, p4d.cut(inner=2).machine_devices, p4d.take(4).machine_devices] == [8, 8, 4]
    assert preset("frontier-mi250x").machine_devices == 8  # two on each of four packages
