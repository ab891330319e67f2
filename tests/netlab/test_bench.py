"""A bench on an emulated cluster: the kernel's own counters beside the formulas."""

import json

import pytest

from zeromesh.measure.bench import Bench
from zeromesh.measure.matrix import make_cells
from zeromesh.measure.steps import Batch

# Wide enough that headers and the words that ranks exchange beside the data (a kilobyte a step) do not matter.
BATCH = Batch(model="1M", sequences=1, tokens=16, micro_batches=1)


@pytest.mark.timeout(180)
def test_bytes_out_of_a_node_are_the_predicted_ones(tmp_path):
    cells = make_cells(["2@1gbit,2"], ["node=3,cluster=1", "node=3,cluster=3"], [BATCH])
    bench = Bench(tmp_path, steps=2, warmup=1, accept_noise=True, probe_s=1.0, probe_rounds=4)
    bench.run(cells)
    assert not bench.pending(cells)
    for row in bench.rows(cells):
        assert row.sent_bytes == row.predicted_bytes
        (counted,), (predicted,) = row.link_bytes, row.predicted_link_bytes
        assert counted == pytest.approx(predicted, rel=0.02), row.cell.name
    probe = json.loads((tmp_path / "probes" / "2@1gbit,2.json").read_text())["probe"]
    cluster = bench.probe_of("2@1gbit,2").cluster
    # Half of a node's 125 MB/s (less headers) is a rank's.
    assert cluster.level("cluster").bandwidth_bytes_per_s == pytest.approx(119e6, rel=0.15)
    assert probe["machine"]["ranks_per_machine"] == 4
