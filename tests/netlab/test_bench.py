"""A bench on an emulated cluster: the kernel's own counters beside the formulas."""

from collections.abc import Iterator

import pytest

from tests.pure.measure.test_bench import raw
from zeromesh.errors import MeasurementError
from zeromesh.lab import Lab
from zeromesh.measure.bench import Bench, Row
from zeromesh.measure.matrix import Topology, make_cells
from zeromesh.measure.probe import probe
from zeromesh.measure.steps import Batch

BATCH = Batch(model="1M", sequences=1, tokens=16, micro_batches=2)

WORDS_BYTES = 24 << 10
"""At most, of a step, beside the data: gloo's words about each message, and what ranks agree on. 3 to 20 kB are counted
with these strategies, on a busy machine too, where TCP sends nothing again."""

TREE = "2@1gbit,2@1gbit,1"
"""Both axes are links, and what crosses the outer ones crosses the inner ones too."""

STRATEGIES = [
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
]


@pytest.mark.timeout(180)
def test_bytes_over_every_link_are_the_predicted_ones(tmp_path):
    """What waits too long on a busy machine is sent again, so the least of up to three measurements counts."""
    wrong = cells = make_cells([TREE], STRATEGIES, [BATCH])
    for rounds in (1, 2, 3):
        bench = Bench(tmp_path, steps=1, warmup=1, rounds=rounds, all_rounds=True, accept_noise=True)
        bench.claim()
        # Bytes depend on no rate.
        levels = dict.fromkeys(Topology(text=TREE).mesh, raw()["levels"]["node"])
        bench.records.keep_probe(TREE, raw() | {"levels": levels, "works": [BATCH.work.to_json()]})
        bench.run(wrong)
        rows = bench.rows(cells)
        beside = {row.cell: list(bytes_beside_data(bench, row)) for row in rows}
        wrong = [cell for cell, levels in beside.items() if not all(0 <= sent <= WORDS_BYTES for sent in levels)]
        if not wrong:
            break
    assert not wrong, [(cell.name, beside[cell]) for cell in wrong]
    assert len(rows) == len(STRATEGIES)
    for row in rows:
        assert row.sent_bytes == pytest.approx(row.predicted_bytes), row.cell.name
        assert len(row.link_bytes) == 2


def bytes_beside_data(bench: Bench, row: Row) -> Iterator[float]:
    """Of each level of links, in the round in which they were least."""
    counted = zip(*(found["link_bytes"] for found in bench.records.cell(row.cell)), strict=True)
    for level, predicted in zip(counted, row.predicted_link_bytes, strict=True):
        yield min(level) - predicted


@pytest.mark.timeout(120)
def test_a_probe_finds_the_levels_and_the_rate_of_a_link():
    """All ranks are on one machine, whose hosts, devices and switches say nothing: rates tell links apart."""
    with Lab("2@1gbit,2") as lab:
        found = probe(None, ranks=4, rounds=8, seconds=1.5, lab=lab)
    assert found.raw["found"]["mesh"] == {"cluster": 2, "node": 2}
    assert found.raw["found"]["sources"]["node"].startswith("measured")
    assert found.raw["machine"]["ranks_per_machine"] == 4
    try:
        found.require_trust()
    except MeasurementError as noisy:
        pytest.skip(f"too noisy to tell how fast a link is: {noisy}")
    # What leaves a node: 125 MB/s less headers.
    assert found.cluster.level("cluster").bandwidth_bytes_per_s == pytest.approx(119e6, rel=0.15)
