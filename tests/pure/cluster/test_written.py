from dataclasses import asdict, is_dataclass, replace

import pytest

from zeromesh.cluster import Curve, Kernel, cluster_toml, parse_cluster, preset, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_what_is_written_is_read_back(name):
    cluster = preset(name)
    require_same(parse_cluster(cluster_toml(cluster)), cluster)


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
    """Equal to five digits, which is what a file keeps."""
    got, expected = flat(one), flat(other)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), key


def flat(value: object, key: str = "") -> dict[str, object]:
    if isinstance(value, dict | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for k, item in pairs for name, leaf in flat(item, f"{key}.{k}").items()}
    return flat(asdict(value), key) if is_dataclass(value) else {key: value}
