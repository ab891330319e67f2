"""Rows and choices of cells of known content: measurements here are made up; and the matrix of cells."""

import json
from typing import Any

import pytest

from bench.__main__ import _print, _write
from bench.cells import Found
from bench.matrix import STRATEGIES, TOPOLOGIES, Cell, Topology, make_cells
from bench.rows import _over_links, choices_of, make_rows, summarise
from lab import LabError
from tests.pure.measure.probed import BATCH, MESH, raw
from zeromesh.errors import InputError, MeshError
from zeromesh.measure.probe import from_raw
from zeromesh.measure.steps import Batch, planned
from zeromesh.strategy import Layout

TREE = "2@200mbit,2"


def a_round(cell: Cell, number: int, seconds: float, **fields: Any) -> Found:
    """The row of a cell that takes these."""
    found = {
        "round": number,
        "step_s": [seconds * 0.9, seconds, seconds * 5],
        "exposed_s": [0.0] * 3,
        "sent_bytes": {"node": 1.0, "cluster": 2.0},
        "link_bytes": [1e6],
    }
    return found | fields


def found_of(rounds: dict[Cell, list[Found]]) -> Found:
    cells = [{"cell": cell.to_json(), "rounds": found} for cell, found in rounds.items()]
    return {"probe": raw(), "settings": [{"cells": cells}]}


def rows_of(seconds: dict[Cell, list[float]], **fields: Any):
    rounds = {
        cell: [a_round(cell, number, each, **fields) for number, each in enumerate(found)]
        for cell, found in seconds.items()
    }
    return make_rows(TREE, found_of(rounds))


def test_the_simulator_is_fed_by_the_probe_alone():
    (cell,) = make_cells([TREE], ["node=3,cluster=1"], [BATCH])
    (row,) = rows_of({cell: [0.1]})
    expected = planned(cell.strategy, from_raw(raw(), MESH, TREE).cluster, BATCH)
    assert row.predicted_s == expected.step_s
    assert row.step_s == 0.1 and row.error == pytest.approx(expected.step_s / 0.1 - 1)


def test_layouts_are_compared_round_by_round(tmp_path, capsys):
    cells = make_cells([TREE], ["node=0,cluster=0", "node=3,cluster=1", "node=3,cluster=3"], [BATCH])
    rows = rows_of(dict(zip(cells, ([0.1, 0.2], [0.11, 0.18], [0.9, 0.9]), strict=True)))
    (choice,) = choices_of(rows)
    assert choice.best.cell == cells[1]
    assert choice.ratios[cells[2]][1] == pytest.approx((0.9 / 0.11 + 0.9 / 0.18) / 2)
    assert f"{cells[1].strategy} is fastest, or {cells[0].strategy} 1.01" in str(choice)
    _print(rows, _write(tmp_path / "bench.json", rows, ["probe of it: noisy"]))
    out = capsys.readouterr().out
    assert str(choice) in out and "probe of it: noisy" in out
    lines = [line.split() for line in out.splitlines()]
    for cell in cells:
        assert [TREE, cell.strategy, "2", "fp32"] in [line[:4] for line in lines]
    summary = json.loads((tmp_path / "bench.json").read_text())["summary"]
    assert f"median error of 3 step times: {summary['median_error']:.1%};" in out
    assert f"within 3 % of it, in {summary['right']} of 1 settings" in out


def test_parts_of_a_level_share_its_links():
    def over_links(tree, strategy, sent):
        topology = Topology(text=tree)
        return _over_links(topology, Layout.of(strategy, topology.axes), sent)

    strategy = "node[2]=3,node[*]=2,cluster[2]=1"
    sent = {"node[2]": 1.0, "node[2]#2": 2.0, "cluster": 4.0}
    assert over_links("2@200mbit,4", strategy, sent) == (16.0,)
    sent = {"package": 1.0, "node[2]": 2.0, "node[2]#2": 3.0, "cluster": 4.0}
    strategy = "package=3,node[2]=3,node[*]=2,cluster=1"
    assert over_links("2@200mbit,4@1gbit,2", strategy, sent) == (32.0, 18.0)


def test_the_best_predicted_is_held_against_the_best_measured():
    cells = make_cells([TREE], (), [BATCH])
    predicted = {row.cell: row.predicted_s for row in rows_of({cell: [1.0] for cell in cells})}
    best = min(predicted, key=predicted.get)
    second = min(seconds for cell, seconds in predicted.items() if cell != best)

    def summary(**measured):
        rows = rows_of({cell: [measured.get("best", s) if cell == best else s] for cell, s in predicted.items()})
        return summarise(rows, choices_of(rows))

    found = summary()  # measured as predicted
    assert found["median_error"] < 1e-9 and (found["choices"], found["right"]) == (1, 1)
    assert summary(best=1.02 * second)["right"] == 1  # within 3 % of the best
    assert summary(best=1.05 * second)["right"] == 0


BATCHES = [Batch(micro_batches=count, dtype=dtype) for count in (1, 4) for dtype in ("fp32", "bf16")]


def test_the_whole_matrix():
    cells = make_cells((), (), BATCHES)
    assert len(cells) == sum(len(STRATEGIES[len(Topology(text=text).axes)]) for text in TOPOLOGIES) * len(BATCHES)
    assert len(set(cells)) == len(cells)
    assert all(Cell.from_json(cell.to_json()) == cell for cell in cells)
    twice = make_cells(["2@1gbit,2"] * 2, ["zero3", "node=3,cluster=3"], BATCHES[:1] * 2)
    assert [cell.strategy for cell in twice] == ["node=3,cluster=3"]
    assert make_cells(["a=2,b=2,c=2,d=2"], ["zero3"], BATCHES)
    # Strategies of other levels are left out.
    cells = make_cells(["node=2", "cluster=2,node=2"], ["node=3,cluster=1", "node=3"], BATCHES[:1])
    assert [(c.topology, c.strategy) for c in cells] == [("node=2", "node=3"), ("cluster=2,node=2", "node=3,cluster=1")]
    presets = make_cells(["node=2", "cluster=2,node=2"], ["zero3"], BATCHES[:1])
    assert [cell.strategy for cell in presets] == ["node=3", "node=3,cluster=3"]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: make_cells(["2@fast,2"], (), BATCHES), LabError),
        (lambda: make_cells(["2,2"], (), BATCHES), MeshError),
        (lambda: make_cells(["1@1gbit,1"], (), BATCHES), MeshError),
        (lambda: make_cells(["a=2,b=2,c=2,d=2"], (), BATCHES), InputError),  # no strategy has its levels
        (lambda: Batch(dtype="fp16"), InputError),
        (lambda: Batch(micro_batches=0), InputError),
        (lambda: Batch(tokens=-1), InputError),
    ],
)
def test_what_is_refused(make, error):
    with pytest.raises(error, match=r"must be|no strategy has the levels|sizes by axis|rate|levels of more"):
        make()
