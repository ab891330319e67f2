"""A bench on an emulated cluster: the kernel's own counters beside the formulas."""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pure.measure.test_bench import raw
from zeromesh.errors import MeasurementError
from zeromesh.lab import Lab
from zeromesh.measure.bench import Bench
from zeromesh.measure.matrix import Topology, make_cells
from zeromesh.measure.steps import Batch

# Wide enough that headers and the words that ranks exchange beside the data (a kilobyte a step) do not matter.
BATCH = Batch(model="1M", sequences=1, tokens=16, micro_batches=2)

TREES = {
    "2@1gbit,2": [
        "node=0,cluster=0",
        "node=0,cluster=0;collective=ho_ring",
        "node=0,cluster=0@/int8",
        "node=1,cluster=0",
        "node=1,cluster=1",
        "node=2,cluster=1",
        "node=2,cluster=2",
        "node=3,cluster=0",
        "node=3,cluster=1",
        "node=3,cluster=3k",
        "node=3,cluster=3",
        "node=3,cluster=3;collective=ho_ring",
        "node=3d,cluster=1",
        "node=3,cluster=3d",
        "node=3@bf16,cluster=1@bf16",
        "node=3@int8/int4,cluster=3k@int8/int4",
        "node=1@/int8,cluster=3dk@int8/int4+ef",
        "node=1,cluster=1@int8/int4",
        "node=1,cluster=2;overlap=none",
    ],
    # All three levels are links.
    "2@500mbit,2@1gbit,2@1gbit": [
        "package=0,node=0,cluster=0",
        "package=3,node=1,cluster=0",
        "package=3,node=3,cluster=3;collective=ho_ring",
    ],
}


PROBED = "2@1gbit,2"


def test_ranks_find_the_levels_of_an_emulated_cluster():
    """All are on one machine, whose hosts, devices and switches say nothing: links are told apart by their rates."""
    program = Path(__file__).parent / "programs" / "find_levels.py"
    with Lab("2@100mbit,2") as lab:
        results = lab.run([sys.executable, str(program)], timeout_s=50, check=True)
    mesh, sources = json.loads(results[0].stdout.splitlines()[-1])
    assert mesh == {"cluster": 2, "node": 2}
    assert sources["node"].startswith("measured")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Callable[[str], Bench]:
    """The bench of a tree, run once."""

    @functools.cache
    def run(tree: str) -> Bench:
        folder = tmp_path_factory.mktemp("bench")
        bench = Bench(folder, steps=1, warmup=1, rounds=1, accept_noise=True, probe_s=1.5, probe_rounds=8)
        if tree != PROBED:
            bench.claim()
            level = raw()["levels"]["node"]  # bytes depend on no rate
            bench.records.keep_probe(tree, raw() | {"levels": dict.fromkeys(Topology(text=tree).mesh, level)})
        bench.run(make_cells([tree], TREES[tree], [BATCH]))
        return bench

    return run


@pytest.mark.timeout(180)
@pytest.mark.parametrize("tree", TREES)
def test_bytes_over_every_link_are_the_predicted_ones(measured, tree):
    rows = measured(tree).rows(make_cells([tree], TREES[tree], [BATCH]))
    assert len(rows) == len(TREES[tree])
    for row in rows:
        # On three ranks an all-reduce's chunks are not equal.
        assert row.sent_bytes == pytest.approx(row.predicted_bytes, rel=1e-5), row.cell.name
        assert len(row.link_bytes) == tree.count("@")
        assert row.link_bytes == pytest.approx(row.predicted_link_bytes, rel=0.02), row.cell.name


@pytest.mark.timeout(180)
def test_a_probe_finds_the_rate_of_a_link(measured):
    probe = measured(PROBED).probe_of(PROBED)
    try:
        probe.require_trust()
    except MeasurementError as noisy:
        pytest.skip(f"too noisy to tell how fast a link is: {noisy}")
    # Half of a node's 125 MB/s (less headers) is a rank's.
    assert probe.cluster.level("cluster").bandwidth_bytes_per_s == pytest.approx(119e6, rel=0.15)
    assert probe.raw["machine"]["ranks_per_machine"] == 4
