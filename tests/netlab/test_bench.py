"""A bench on an emulated cluster: the kernel's own counters beside the formulas."""

import json
import sys

import pytest

from bench.__main__ import measure
from bench.cells import Found
from bench.matrix import Cell, Topology, make_cells
from bench.rows import Row, make_rows
from lab import Lab
from tests.pure.measure.probed import raw
from zeromesh.errors import MeasurementError
from zeromesh.measure.probe import from_raw
from zeromesh.measure.steps import Batch

BATCH = Batch(model="1M", sequences=1, tokens=16, micro_batches=2)

WORDS_BYTES = 24 << 10
"""At most, of a step, beside the data: gloo's words about each message, and agreements of ranks. 3 to 20 kB are counted
with these strategies, on a busy machine too, where TCP sends nothing again."""

TREE = "2@1gbit,2@1gbit,1"
"""Both axes are links, and bytes over the outer ones cross the inner ones too."""

STRATEGIES = [
    "node=0,cluster=0@/int8",
    "node=1,cluster=2;overlap=none",
    "node=3,cluster=3;collective=ho_ring",
    "node=3@bf16,cluster=1@bf16",
    "node=3@int8/int4,cluster=3k@int8/int4",
    "node=1@/int8,cluster=3dk@int8/int4+ef",
]


def test_bytes_over_every_link_are_the_predicted_ones():
    """Packets that wait too long on a busy machine are sent again, so the least of up to three measurements counts."""
    wrong = cells = make_cells([TREE], STRATEGIES, [BATCH])
    least: dict[Cell, tuple[float, ...]] = {}
    for _ in range(3):
        for row in rows_of(wrong):
            assert row.sent_bytes == pytest.approx(row.predicted_bytes), row.cell
            beside = [sent - data for sent, data in zip(row.link_bytes, row.predicted_link_bytes, strict=True)]
            assert len(beside) == 2
            least[row.cell] = tuple(map(min, beside, least.get(row.cell, beside)))
        wrong = [cell for cell in cells if not all(0 <= sent <= WORDS_BYTES for sent in least[cell])]
        if not wrong:
            break
    assert not wrong, [(cell.strategy, least[cell]) for cell in wrong]
    assert len(least) == len(STRATEGIES)


def rows_of(cells: list[Cell]) -> list[Row]:
    """Bytes depend on no rate: the links' are made up."""
    levels = dict.fromkeys(Topology(text=TREE).mesh, raw()["levels"]["node"])
    found: Found = measure(TREE, cells, rounds=1, steps=1, probes=False)
    return make_rows(TREE, found | {"probe": raw() | {"levels": levels}})


def test_a_probe_finds_the_levels_and_the_rate_of_a_link():
    """All ranks are on one machine: rates tell links apart."""
    command = [sys.executable, "-m", "zeromesh.cli", "probe", "--rounds", "8", "--seconds", "1.0", "--json"]
    with Lab("2@1gbit,2") as lab:
        first = lab.run([*command, "--accept-noise"], timeout_s=300, check=True)[0]
    found = from_raw(json.loads(first.stdout), {}, "here")
    assert found.raw["found"]["mesh"] == {"cluster": 2, "node": 2}
    assert found.raw["found"]["sources"]["node"].startswith("measured")
    assert found.raw["machine"]["ranks_per_machine"] == 4
    try:
        found.require_trust()
    except MeasurementError as noisy:
        pytest.skip(f"too noisy to tell how fast a link is: {noisy}")
    # A node sends 125 MB/s less headers.
    assert found.cluster.level("cluster").bandwidth_bytes_per_s == pytest.approx(119e6, rel=0.15)
