from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.cluster import Cluster, Device, Level, find_cluster, parse_cluster, preset, preset_names, read_cluster
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('memory = "80 GB"', "", r"device\.memory: is missing; expected bytes with a unit"),
        ('memory = "80 GB"', 'memory = "80"', r"device\.memory: .*the unit is missing"),
        ('memory = "80 GB"', "memory = 80", r"device\.memory: .*write the unit, as a string"),
        ('memory = "80 GB"', 'memory = "-80 GB"', r"device\.memory: expected a finite value above zero"),
        ('memory = "80 GB"', 'memory = "80 GB"\ncores = nan', r"device\.cores: expected a finite value above zero"),
        ('memory = "80 GB"', 'memory = "80 GB"\ncores = inf', r"device\.cores: expected a finite value above zero"),
        (
            "size = 128",
            "size = 128\nshares = { all_reduce = nan }",
            r"level\[1\]\.shares\.all_reduce: expected a finite value above zero",
        ),
        ('memory = "80 GB"', 'memroy = "80 GB"', r"device\.memroy: unknown key; did you mean memory"),
        ('bf16 = "312 TFLOP/s"', 'bf17 = "312 TFLOP/s"', r"device\.peak\.bf17: unknown key; did you mean bf16"),
        ('bf16 = "312 TFLOP/s"', "", r"device\.peak: expected a rate by dtype"),
        ('latency = "15 us"', 'latency = "-15 us"', r"level\[1\]\.latency: expected a finite time of zero or more"),
        ('bandwidth = "100 GB/s"', 'bandwidth = "100 GB"', r"level\[1\]\.bandwidth: .*unknown unit 'GB'"),
        ("size = 128", "size = 0", r"level\[1\]\.size: expected a whole number of at least 1"),
        ("size = 128", "size = true", r"level\[1\]\.size: expected a whole number"),
        ('name = "cluster"', 'name = "node"', "levels must have distinct names, node stands twice"),
        ('name = "cluster"', 'name = "clus ter"', r"level\[1\]: level 'clus ter': a name is letters"),
        ("size = 128", 'size = 128\nkind = "nvlnk"', r"level\[1\]: .*unknown kind 'nvlnk'; did you mean nvlink"),
        ('latency = "15 us"', 'latency = "1e999 s"', r"level\[1\]\.latency: expected a finite time"),
        (
            'bf16 = "312 TFLOP/s"',
            'bf16 = "312 TFLOP/s"\n[device.achievable]\nbf16 = "2712 TFLOP/s"',
            r"achievable is what was measured of the peak, so bf16 needs .* least 2\.712e\+15 FLOP/s, got 3\.12e\+14",
        ),
        (
            'bf16 = "312 TFLOP/s"',
            'bf16 = "312 TFLOP/s"\n[device.achievable]\nfp32 = "1 TFLOP/s"',
            r"so fp32 needs a peak of at least 1e\+12 FLOP/s, got none",
        ),
        ("[device]", "[device", "not valid TOML"),
    ],
)
def test_a_wrong_file_names_file_key_and_what_was_expected(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ClusterError, match=message) as caught:
        read_cluster(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_without_levels_or_that_is_not_there(tmp_path):
    with pytest.raises(ClusterError, match=r"level: is missing; expected one \[\[level\]\] table per level"):
        parse_cluster(GOOD.split("[[level]]")[0])
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


def test_take_refuses_what_does_not_fill_a_level():
    with pytest.raises(ClusterError, match="take 8 or 16"):
        cluster(8, 4).take(12)
    with pytest.raises(ClusterError, match="take 16 or 32"):
        cluster(2, 8, 4).take(20)
    with pytest.raises(ClusterError, match="has 32 devices, 40 were asked for"):
        cluster(8, 4).take(40)
    with pytest.raises(ClusterError, match="at least 1"):
        cluster(8, 4).take(0)


@pytest.mark.parametrize("name", preset_names())
def test_every_constant_of_a_preset_has_a_source(name):
    found = preset(name)
    sources = dict(found.sources)
    device = {"device.memory", "device.memory_bandwidth", "device.peak"}
    levels = {f"level.{lv.name}.{key}" for lv in found.levels for key in ("bandwidth", "latency")}
    achieved = {"device.achievable"} if found.device.achievable_flops else set()
    cores = {"device.multiprocessors" if found.device.cores is None else "device.cores"}
    assert set(sources) == device | levels | achieved | cores
    assert all(len(text) > 10 for text in sources.values())
    assert found.name == name and found.description
    for dtype, rate in found.device.achievable_flops:
        assert rate < found.device.peak(dtype)


def test_the_catalogue_covers_the_published_tables():
    assert {"a800-8x-hdr", "a100-8x-1600g", "a100-8x-100g", "dgx2-v100-400g", "frontier-mi250x"} <= set(preset_names())
    assert preset("a800-8x-hdr").take(64).axes == (("node", 8), ("cluster", 8))
    assert preset("frontier-mi250x").take(384).axes == (("package", 2), ("node", 4), ("cluster", 48))


def test_unknown_names_list_the_nearest():
    with pytest.raises(ClusterError, match="did you mean a800-8x-hdr"):
        find_cluster("a800-8x-hrd")
    with pytest.raises(ClusterError, match="has no level 'nod'; did you mean node"):
        preset("a800-8x-hdr").level("nod")


def test_a_device_computes_in_the_best_dtype_it_has():
    assert preset("dgx2-v100-400g").device.matrix_dtype == "fp16"
    assert preset("a800-8x-hdr").device.matrix_dtype == "bf16"
    with pytest.raises(ClusterError, match="has no peak for bf16"):
        preset("dgx2-v100-400g").device.peak("bf16")


def test_what_a_file_leaves_out_of_a_known_device_is_filled_in(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    device = read_cluster(path).device
    assert device.memory_bytes_per_s == 2039e9
    assert device.achievable() == 271.2e12
    path.write_text(GOOD.replace('memory = "80 GB"', 'memory = "40 GB"\nmemory_bandwidth = "1 GB/s"'))
    assert read_cluster(path).device.memory_bytes_per_s == 1e9
    path.write_text(GOOD.replace('memory = "80 GB"', 'memory = "40 GB"'))
    assert read_cluster(path).device.memory_bytes_per_s == 1555e9
    path.write_text(GOOD.replace("312 TFLOP/s", "250 TFLOP/s"))
    assert read_cluster(path).device.achievable() is None  # 271.2 of 250 is no rate of this version
    path.write_text(GOOD.replace("A800-SXM4-80GB", "Abacus 9"))
    assert read_cluster(path).device.memory_bytes_per_s is None


def test_the_documented_file_is_the_preset(tmp_path):
    """A user who copies the example gets the same predictions as from the catalogue."""
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    read, known = read_cluster(path), preset("a800-8x-hdr")
    assert (read.device, read.axes) == (replace(known.device, peak_flops={"bf16": 312e12}), known.axes)
    for index in range(2):
        assert read.link_kind(index) == known.link_kind(index)
        assert replace(read.levels[index], kind="other", ports=None) == replace(
            known.levels[index], kind="other", ports=None
        )


def test_links_without_a_kind_go_by_their_place():
    assert [cluster(2, 4, 8).link_kind(i) for i in range(3)] == ["nvlink", "nvlink", "infiniband"]
    assert cluster(8).link_kind(0) == "nvlink"
