"""Rows and summary from files of known content: what is measured here is made up."""

import json
import statistics
from contextlib import nullcontext
from typing import Any

import pytest

from zeromesh.cli.bench import _print as print_table
from zeromesh.errors import InputError, MeasurementError
from zeromesh.measure.bench import Bench, _over_links, shown, summarise, trusted
from zeromesh.measure.matrix import Cell, Topology, estimate_s, make_cells
from zeromesh.measure.probe import from_raw
from zeromesh.measure.records import Records
from zeromesh.measure.replay import read_schedule, schedule_json
from zeromesh.measure.selftest import _devices
from zeromesh.measure.shapes import SHAPES
from zeromesh.measure.steps import Batch, compute_of, median_compute, predict, to_json
from zeromesh.model.transformer import build
from zeromesh.schedule import FlatBuffer, Role, Schedule, Unit
from zeromesh.simulator import FixedWorkload, simulate
from zeromesh.strategy import Layout
from zeromesh.trace import Event, Trace

BATCH = Batch(model="tiny", sequences=1, tokens=16, micro_batches=2)
TREE = "2@200mbit,2"
MESH = Topology(text=TREE).mesh
UNITS = ["", *(f"layers.{index}" for index in range(3))]


def raw(latency: float = 1e-4, *, loaded: float = 1.0, spread: float = 1.0) -> dict[str, Any]:
    """A probe of 500 MB/s inside and 25 MB/s outside; `loaded` times as slow in its second half, and `spread` times in
    every second round."""

    def times(rate: float) -> dict[str, list[float]]:
        return {
            str(size): [(latency + size / rate) * (1 if i < 4 else loaded) * spread ** (i % 2) for i in range(8)]
            for size in (10_000, 100_000, 1_000_000)
        }

    levels = {
        name: {
            "backend": "gloo",
            "timings": {
                "all_gather": times(rate),
                "reduce_scatter": times(rate),
                "all_reduce": times(1.5 * rate),
            },
            "beside": {name: {"10000": [2e-3] * 6} for name in ("all_gather", "reduce_scatter", "all_reduce")},
            "host_s_per_byte": 1e-9,
            "host_call_s": 0.0,
        }
        for name, rate in (("node", 5e8), ("cluster", 12.5e6))
    }
    machine = {
        "name": "cpu",
        "memory_bytes": 1e9,
        "memory_bytes_per_s": 1e10,
        "peak_flops": {"fp32": 1e10},
        "cores": 0.5,
        "ranks_per_machine": 4,
    }
    return {"machine": machine, "levels": levels}


def compute() -> dict[str, Any]:
    return {
        "forward": dict.fromkeys(UNITS, 1e-3),
        "backward": dict.fromkeys(UNITS, 2e-3),
        "optimizer_s": 4e-3,
        "elements": 1000,
        "agreement_s": 5e-3,
    }


def schedule(strategy: str, names: list[str] = UNITS) -> Schedule:
    buffers = (FlatBuffer(numel=10_000, param_dtype="fp32", master_dtype="fp32"),)
    units = [Unit(name=name, role=Role.BLOCK if name else Role.RESIDENT, buffers=buffers) for name in names]
    return Schedule.of(Layout.of(strategy, Topology(text=TREE).axes), units)


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path, steps=3, warmup=1, rounds=1)
    made.records.keep_probe(TREE, raw())
    for cell in make_cells([TREE], ["node=0,cluster=0"], [BATCH]):
        made.records.keep_compute(cell, compute())
    return made


def a_round(cell: Cell, seconds: float, **fields: Any) -> dict[str, Any]:
    """What is found of a cell that takes these."""
    event = Event(name="forward", kind="compute", resource="compute", start_s=0.0, end_s=seconds, unit="")
    found = {
        "step_s": [seconds * 0.9, seconds, seconds * 5],
        "exposed_s": [0.0] * 3,
        "sent_bytes": {"node": 1.0, "cluster": 2.0},
        "schedule": schedule_json(schedule(cell.strategy)),
        "traces": [to_json(Trace(label="made up", events=(event,)))] * 3,
    }
    return found | fields


def measured(bench: Bench, cell: Cell, step_s: float, **fields: Any) -> None:
    """Writes a cell that took `step_s`, in place of what it took before."""
    (bench.directory / "cells" / f"{cell.key}.json").unlink(missing_ok=True)
    bench.records.keep_cell(cell, a_round(cell, step_s, **fields))


def test_a_probe_becomes_a_cluster():
    found = from_raw(raw(), MESH, "here")
    node, cluster = found.cluster.levels
    assert (node.name, node.size, node.kind) == ("node", 2, "loopback")
    assert node.bandwidth_bytes_per_s == pytest.approx(5e8) and node.host_bytes_per_s == pytest.approx(1e9)
    # Both ranks of a node have sent 12.5 MB/s at once.
    assert cluster.bandwidth_bytes_per_s == pytest.approx(25e6)
    assert dict(node.shares) == pytest.approx({"all_gather": 1.0, "all_reduce": 1.5, "reduce_scatter": 1.0})
    assert node.busy_latency_s == 2e-3
    assert cluster.latency_s == pytest.approx(1e-4, rel=0.1)
    assert found.cluster.device.cores == 0.5
    found.require_trust()
    with pytest.raises(MeasurementError, match="all_gather over node"):
        from_raw(raw(loaded=3.0), MESH, "here").require_trust()


def test_the_simulator_is_fed_by_the_probe_alone(bench):
    (cell,) = make_cells([TREE], ["node=3,cluster=1"], [BATCH])
    measured(bench, cell, 0.1)
    (row,) = bench.rows([cell])
    cluster, written = from_raw(raw(), MESH, TREE).cluster, schedule_json(schedule(cell.strategy))
    expected = predict(written, cluster, BATCH, compute())
    assert row.predicted_s == expected.step_s
    assert row.step_s == 0.1 and row.error == pytest.approx(expected.step_s / 0.1 - 1)
    agreeing = predict(written, cluster, BATCH, {**compute(), "agreement_s": 0.0})
    assert expected.step_s - agreeing.step_s == pytest.approx(5e-3)
    slower = {**compute(), "forward": dict.fromkeys(UNITS, 1e-2)}
    later = predict(written, cluster, BATCH, slower)
    assert later.compute_s - expected.compute_s == pytest.approx(2 * len(UNITS) * 9e-3, rel=0.2)


def test_a_schedule_survives_its_file():
    made = schedule("node=3,cluster=1;prefetch=2").reordered([0, 2, 1, 3])
    again = read_schedule(json.loads(json.dumps(schedule_json(made))))
    assert again.program == made.program
    assert again.units == made.units and again.layout == made.layout and again.memory == made.memory


def test_joined_units_take_what_their_members_take():
    """Also where the engine has joined them with the root, whose name they then have."""
    found = compute_of(compute())
    for names, units in [
        (UNITS, [0, 1, 2, 3]),
        (["", "layers.0 to layers.1", "layers.2"], [0, 1, 1, 2]),
        (["", "layers.1 to layers.2"], [0, 0, 1, 1]),
        ([""], [0, 0, 0, 0]),
    ]:
        made = schedule("node=0,cluster=0", names)
        assert found.parts(made) == dict(zip(UNITS, units, strict=True))
        whole = predict(schedule_json(made), from_raw(raw(), MESH, TREE).cluster, BATCH, compute())
        assert whole.compute_s >= 2 * len(UNITS) * 3e-3 + 4e-3  # two micro-batches and the optimizer, slowed or not
    turned = schedule("node=3,cluster=3").reordered([0, 2, 1, 3])
    assert list(found.parts(turned).items()) == [("", 0), ("layers.1", 2), ("layers.0", 1), ("layers.2", 3)]
    for unknown in ("layers.7", "layers.0 to layers.7"):
        with pytest.raises(InputError, match=r"has not been measured; known: root, layers\.0"):
            found.parts(schedule("node=0,cluster=0", ["", unknown]))
    with pytest.raises(InputError, match="activation checkpointing"):
        found.seconds("recompute", "layers.0")


def test_bytes_out_of_links(bench):
    """Out of a node go what its two ranks send over the cluster axis; counted bytes are set beside them."""
    (cell,) = make_cells([TREE], ["node=0,cluster=0"], [BATCH])
    measured(bench, cell, 0.1, link_bytes=[3.0])
    (row,) = bench.rows([cell])
    assert row.predicted_link_bytes == (2 * row.predicted_bytes["cluster"],)
    assert "3 B" in next(iter(shown([row])))[-1]


def test_what_is_done_is_not_done_again(bench):
    cells = make_cells([TREE], (), [BATCH])
    measured(bench, cells[0], 0.1)
    assert bench.pending(cells) == cells[1:]
    assert [row.cell for row in bench.rows(cells)] == cells[:1]


def test_rounds_are_added_up(bench):
    """What a directory has counts; seconds are medians over all steps, and the spread is that of the rounds."""
    (cell,) = make_cells([TREE], ["node=3,cluster=1"], [BATCH])
    bench.rounds = 3
    for step_s in (0.1, 0.3, 0.2):
        assert bench.pending([cell]) == [cell]
        bench.records.keep_cell(cell, a_round(cell, step_s, step_s=[step_s] * 3, link_bytes=[step_s]))
    assert bench.pending([cell]) == []
    (row,) = bench.rows([cell])
    assert (row.rounds, row.step_s, row.link_bytes) == (3, 0.2, (0.2,))
    assert row.rounds_step_s == (0.1, 0.3, 0.2) and row.spread == pytest.approx(2.0)
    assert len(list((bench.directory / "traces" / cell.key).glob("step-*.json"))) == 9
    assert next(iter(shown([row])))[5] == "200%"


def test_what_is_far_off_is_measured_once(bench, capsys):
    """Unless all rounds are wanted; what is left is compared in the rounds that both have, and said to be untold."""
    cells, bench.rounds = make_cells([TREE], ["node=0,cluster=0", "node=3,cluster=1", "node=3,cluster=3"], [BATCH]), 3
    for cell, step_s in zip(cells, (0.1, 0.11, 0.9), strict=True):
        measured(bench, cell, step_s, link_bytes=[1e6])
    assert bench.pending(cells) == cells[:2]
    bench.all_rounds = True
    assert bench.pending(cells) == cells
    for cell, step_s in zip(cells[:2], (0.2, 0.18), strict=True):
        bench.records.keep_cell(cell, a_round(cell, step_s, link_bytes=[1e6]))
    (choice,) = bench.summarise(bench.rows(cells)).settings
    assert choice.best.cell == cells[1] and not choice.told
    assert choice.ratios[cells[2]].value == pytest.approx(0.9 / 0.11)
    print_table(bench, cells)
    assert f"{cells[1].strategy} is fastest, or {cells[0].strategy} 1.01" in capsys.readouterr().out


def test_units_take_the_median_of_their_rounds():
    rounds = [{**compute(), "forward": dict.fromkeys(UNITS, s), "agreement_s": s} for s in (1.0, 5.0, 2.0)]
    assert median_compute(rounds) == rounds[2]
    assert median_compute(rounds[:1]) == rounds[0]


def test_a_directory_holds_what_was_measured_alike(bench, monkeypatch):
    """Other versions, machines or numbers of steps need a directory of their own; what is there keeps its label."""
    cells = make_cells([TREE], (), [BATCH])

    def written(task, options, mesh, **around):
        for cell, held in options["cells"]:
            assert held == 0
            measured(bench, Cell.from_json(cell), 0.1)

    monkeypatch.setattr("zeromesh.measure.bench.Lab", lambda tree: nullcontext())
    monkeypatch.setattr("zeromesh.measure.bench.on_all_ranks", written)
    with pytest.raises(InputError, match=r"layout None, now \d.*steps None, now 3"):  # a probe of which nobody knows
        bench.run(cells)
    empty_directory(bench)
    bench.run(cells[:1])
    bench.records.keep_probe(TREE, raw())
    bench.records.keep_compute(cells[0], compute())
    Bench(bench.directory, steps=3, warmup=1, rounds=1).run(cells[:1])
    with pytest.raises(InputError, match=r"was with steps 3, now 50: name another directory"):
        Bench(bench.directory, steps=50, warmup=1).run(cells)
    result = Bench(bench.directory, steps=50, warmup=1).write_result(bench.rows(cells[:1]))
    assert result["steps"] == result["environment"]["steps"] == 3
    monkeypatch.setattr("zeromesh.measure.setting.processor_name", lambda: "another")
    with pytest.raises(InputError, match=r"machine .*, now another"):
        bench.run(cells)


def empty_directory(bench: Bench) -> None:
    for path in bench.directory.glob("*/*.json"):
        path.unlink()


def test_a_noisy_probe_is_taken_again_unless_noise_is_accepted(bench, monkeypatch):
    cells = make_cells([TREE], (), [BATCH])
    told = []
    monkeypatch.setattr("zeromesh.measure.bench.Lab", lambda tree: nullcontext())
    monkeypatch.setattr("zeromesh.measure.bench.on_all_ranks", lambda task, options, *_, **__: told.append(options))
    empty_directory(bench)
    bench.run(cells)
    works = [BATCH.work.to_json()]
    assert told.pop()["probe"] == {"seconds": bench.probe_s, "rounds": bench.probe_rounds, "works": works}
    bench.records.keep_probe(TREE, raw(loaded=3.0) | {"works": works})
    assert not trusted(raw(loaded=3.0), Topology(text=TREE))
    bench.run(cells)
    assert told.pop()["probe"] is not None
    bench.accept_noise = True
    bench.run(cells)
    assert told.pop()["probe"] is None
    bench.records.keep_probe(TREE, raw() | {"works": works})
    bench.accept_noise = False
    bench.run(cells)
    assert told[0]["probe"] is None


def test_parts_of_a_level_share_its_links(bench):
    def over_links(tree, strategy, sent):
        topology = Topology(text=tree)
        return _over_links(topology, Layout.of(strategy, topology.axes), sent)

    strategy = "node[2]=3,node[*]=2,cluster[2]=1"
    assert estimate_s(make_cells(["2@200mbit,4"], [strategy], [BATCH]), steps=4, cores=2) > 0
    sent = {"node[0]": 1.0, "node[1]": 2.0, "cluster": 4.0}
    assert over_links("2@200mbit,4", strategy, sent) == (16.0,)
    sent = {"package": 1.0, "node[0]": 2.0, "node[1]": 3.0, "cluster": 4.0}
    strategy = "package=3,node[2]=3,node[*]=2,cluster=1"
    assert over_links("2@200mbit,4@1gbit,2", strategy, sent) == (32.0, 18.0)


def test_the_best_predicted_is_held_against_the_best_measured(bench):
    cells = make_cells([TREE], (), [BATCH])
    predicted = {}
    for cell in cells:
        measured(bench, cell, 1.0)
        predicted[cell] = bench.rows([cell])[0].predicted_s
    best = min(predicted, key=predicted.get)
    for cell in cells:  # measured as predicted
        measured(bench, cell, predicted[cell])
    summary = summarise(bench.rows(cells))
    assert summary.median_error < 1e-9 and (summary.choices, summary.right) == (1, 1)
    measured(bench, best, 1.02 * min(p for c, p in predicted.items() if c != best))
    assert summarise(bench.rows(cells)).right == 1  # within 3 % of the best
    measured(bench, best, 1.05 * min(p for c, p in predicted.items() if c != best))
    assert summarise(bench.rows(cells)).right == 0
    rows = bench.rows(cells)
    cluster, errors = bench.probe_of(TREE).cluster, [abs(row.planned_s / row.step_s - 1) for row in rows]
    model, batch = build(SHAPES[BATCH.model].transformer, dtype=BATCH.dtype), BATCH.sequences * BATCH.tokens
    work = FixedWorkload(
        seq_len=BATCH.tokens,
        global_batch_tokens=4 * batch * BATCH.micro_batches,
        micro_batch=BATCH.sequences,
        param_dtype=BATCH.dtype,
    )
    assert [row.planned_s for row in rows] == [simulate(model, cluster, c.strategy, work).step_s for c in cells]
    assert summarise(rows).planned_median_error == statistics.median(errors) > 0
    assert model.num_params == SHAPES[BATCH.model].num_params
    result = bench.write_result(rows)
    assert json.loads((bench.directory / "result.json").read_text())["summary"] == result["summary"]
    assert (bench.directory / "traces" / best.key / "predicted.json").exists()


def test_a_cell_that_is_named_twice_is_one():
    cells = make_cells([TREE, TREE], ["zero3", "node=3,cluster=3"], [BATCH, BATCH])
    assert [cell.strategy for cell in cells] == ["node=3,cluster=3"]


def test_meshes_without_common_strategies_need_some():
    with pytest.raises(InputError, match="no strategy has the levels of a topology"):
        make_cells(["a=2,b=2,c=2,d=2"], (), [BATCH])
    assert make_cells(["a=2,b=2,c=2,d=2"], ["zero3"], [BATCH])


def test_an_estimate_grows_with_what_is_to_do():
    few = make_cells([TREE], ["node=3,cluster=3"], [BATCH])
    many = make_cells([TREE, "2@1gbit,2"], ["node=3,cluster=3", "node=0,cluster=0"], [BATCH])
    times = [estimate_s(cells, steps=5, cores=2) for cells in (few, many)]
    assert 0 < times[0] < times[1]
    # 30 million parameters of 4 bytes, half of them from each rank, 8 times over half of 25 MB/s at the least.
    large = make_cells([TREE], ["node=0,cluster=0"], [Batch(model="30M")])
    assert SHAPES["30M"].num_params > 3e7
    assert estimate_s(large, steps=12, cores=64) - estimate_s(large, steps=4, cores=64) >= 8 * 30e6 * 4 / 25e6


@pytest.mark.parametrize(("steps", "warmup", "rounds"), [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_steps_that_are_none(tmp_path, steps, warmup, rounds):
    with pytest.raises(InputError, match="at least 1 step in at least 1 round"):
        Bench(tmp_path, steps=steps, warmup=warmup, rounds=rounds)


def test_one_bench_at_a_time_works_in_a_directory(bench):
    other = pytest.raises(InputError, match="another bench works in")
    with bench.records.alone(), other, Records(bench.directory).alone():
        pass
    with Records(bench.directory).alone():
        pass


@pytest.mark.parametrize(("variable", "name"), [("OMP_NUM_THREADS", "threads"), ("CUDA_VISIBLE_DEVICES", "devices")])
def test_cells_of_other_threads_or_devices_are_not_mixed(tmp_path, monkeypatch, variable, name):
    monkeypatch.delenv(variable, raising=False)
    records = Records(tmp_path)
    records.claim(steps=1, warmup=1)
    records.claim(steps=1, warmup=1)
    monkeypatch.setenv(variable, "7")
    with pytest.raises(InputError, match=rf"must be measured alike; .* was with {name} .*, now 7: name another"):
        records.claim(steps=1, warmup=1)


@pytest.mark.parametrize(("cores", "slowest", "status"), [(None, 0.8, "look"), (None, 0.95, "ok"), (0.5, 0.5, "ok")])
def test_a_device_that_is_slower_than_its_like_is_marked(cores, slowest, status):
    """Ranks that share cores are not held to it."""
    check = _devices(
        {"cores": cores, "by_rank": {"copies": [3e12] * 4, "bf16 products": [5e14, 5e14, slowest * 5e14, 5e14]}}
    )
    assert check.status == status and f"bf16 products {slowest:.2f} (rank 2)" in check.detail


def test_the_table_has_each_cell_and_what_all_say_together(bench, capsys):
    cells = make_cells([TREE], ["node=0,cluster=0", "node=3,cluster=1"], [BATCH])
    for cell in cells:
        measured(bench, cell, 0.1, link_bytes=[1e6])
    print_table(bench, cells)
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    for cell in cells:
        assert [TREE, cell.strategy, "2", "fp32", "100", "ms"] in [line[:6] for line in lines]
    summary = summarise(bench.rows(cells))
    assert f"median error of 2 step times: {summary.median_error:.1%} (from the probe alone" in out
    assert f"within 3 % of it, in {summary.right} of 1 settings" in out and str(bench.directory) in out
