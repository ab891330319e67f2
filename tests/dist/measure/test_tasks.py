"""The tasks of each rank in a probe, a bench and a self-test, on ranks that are there already."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import zeromesh as zm
from bench.cells import run_cells
from bench.matrix import Cell, make_cells
from tests.dist.parity import mesh_of
from tests.dist.pool import on_ranks
from tests.pure.measure.probed import raw
from tests.traffic import communication
from zeromesh.errors import MeshError
from zeromesh.launch.ranks import Ranks
from zeromesh.measure import levels, parity, selftest
from zeromesh.measure.kernels import _blocks, measure_kernels
from zeromesh.measure.links import measure_links
from zeromesh.measure.probe import from_raw
from zeromesh.measure.steps import Batch, Training, from_json, measure_round, planned
from zeromesh.model.shape import KERNELS
from zeromesh.model.transformer import build

BATCH = Batch(model="tiny", sequences=1, tokens=16, micro_batches=2)


def ranks_of(*shape: int) -> Ranks:
    return Ranks(rank=dist.get_rank(), world=dist.get_world_size(), device=torch.device("cpu"), mesh=mesh_of(*shape))


@on_ranks(4)
def test_every_level_is_timed_on_all_its_groups():
    found = measure_links(ranks_of(2, 2), rounds=4, seconds=0.1)
    assert list(found) == ["node", "cluster"]
    for level in found.values():
        assert set(level["timings"]) == {"all_gather", "reduce_scatter", "all_reduce"}
        shortest = {op: [min(level["timings"][op])] for op in ("all_gather", "reduce_scatter")}
        assert {op: list(by_size) for op, by_size in level["beside"].items()} == shortest  # on processor cores
        for by_size in level["timings"].values():
            assert len(by_size) >= 3 and all(len(times) == 4 for times in by_size.values())
            assert all(seconds > 0 for times in by_size.values() for seconds in times)
        assert 0 < level["host_s_per_byte"] < 1e-6
        assert 0 <= level["host_call_s"] < 1e-1
    mine = json.dumps({name: level["timings"] for name, level in found.items()})
    all_ranks = [None] * 4
    dist.all_gather_object(all_ranks, mine)
    assert len(set(all_ranks)) == 1  # the slowest rank's times, on every rank


@on_ranks(4)
def test_levels_are_found_alike_on_all_ranks():
    """One machine whose ranks are taken to be on others: two hosts, four, and then hosts that are no blocks."""
    ranks = ranks_of(4)

    def find(machines: str):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(levels, "machine_id", lambda: machines[ranks.rank])
            return levels.find_levels(ranks)

    found = find("aabb")
    assert found.mesh == {"cluster": 2, "node": 2} and list(found.mesh) == ["cluster", "node"]
    assert found.sources["node"] == "hosts of the ranks"
    measured = find("abcd")  # all pairs are of one machine, busy or not: no level, or one that divides them
    assert list(measured.mesh.items()) in ([("cluster", 4)], [("cluster", 2), ("switch", 2)])
    told = [None] * 4
    dist.all_gather_object(told, measured)
    assert told.count(measured) == 4
    with pytest.raises(MeshError, match="4 ranks on 2 hosts are no equal blocks"):
        find("abab")


@on_ranks(2)
def test_compiled_blocks_are_compiled_and_count_the_bytes_of_compiled_kernels():
    """At equal times, elementwise rates of kernels are in the ratio of the bytes that they move."""
    compiled: list[torch.nn.Module] = []
    rates, moved = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
        patch.setattr("zeromesh.measure.kernels._seconds", lambda call, ranks: 1e-3)
        for name in ("eager", "compiled"):
            work = replace(BATCH.work, kernels=name)
            rates[name] = next(one for one in measure_kernels(ranks_of(2), work) if one["kind"] == "elementwise")
            units = build(work.llama, dtype="fp32", kernels=KERNELS[name]).units
            moved[name] = next(unit.activations.elementwise.constant for unit in units if unit.attention is not None)
            assert len(compiled) == {"eager": 0, "compiled": _blocks(ranks_of(2), work, "fp32")}[name]
    for way in ("forward", "backward"):
        assert rates["compiled"][way] / rates["eager"][way] == pytest.approx(moved["compiled"] / moved["eager"])


@on_ranks(4)
def test_measured_steps_send_what_the_simulator_says():
    ranks, strategy = ranks_of(2, 2), "node=1,cluster=3;overlap=none"
    training = Training(ranks, BATCH, strategy)
    training.timed(2)
    found = json.loads(json.dumps(measure_round(training, steps=2, recorded=2)))
    assert len(found["step_s"]) == len(found["exposed_s"]) == len(found["traces"]) == 2
    cluster = from_raw(raw(), {"cluster": 2, "node": 2}, "made up").cluster  # sent bytes depend on no rate
    simulated = planned(strategy, cluster, BATCH, record=True)
    assert found["sent_bytes"] == {axis.axis: axis.bytes_sent_per_device for axis in simulated.axes}
    assert simulated.trace is not None
    assert communication(from_json(found["traces"][0])) == communication(simulated.trace)
    for predicted, allocated in found["memory_bytes"].values():
        assert predicted == allocated


@on_ranks(2)
def test_a_bench_takes_cells_in_turn():
    cells = make_cells(["node=2"], ["node=3", "node=1"], [BATCH])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.cells.FAR", 1e3)  # all, however busy the machine is
        patch.setattr("zeromesh.measure.probe.measure", lambda ranks, **options: options)
        found = run_cells(
            ranks_of(2), rounds=2, cells=[cell.to_json() for cell in cells], probe={"seconds": 0.3}, steps=1, marks=""
        )
    (setting,) = found["settings"]
    assert [Cell.from_json(one["cell"]) for one in setting["cells"]] == cells
    assert [[found["round"] for found in one["rounds"]] for one in setting["cells"]] == [[0, 1], [0, 1]]
    assert found["probe"] == {"seconds": 0.3}


@on_ranks(2)
def test_parity_is_seen_and_so_is_its_lack():
    ranks, strategy = ranks_of(2), "node=3"
    assert parity.largest_difference(ranks, strategy) < 1e-12
    with pytest.MonkeyPatch.context() as patch:
        right = parity._batch
        patch.setattr(parity, "_batch", lambda rank, step, micro, at: right(rank, step, micro + (rank == 1), at))
        assert parity.largest_difference(ranks, strategy) > 1e-4  # one micro-batch of one rank is another


@on_ranks(2)
def test_wrong_accounts_fail_the_self_test():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeromesh.observe.report.sent_bytes_per_axis", lambda *_, **__: {"node": 1000})
        good, detail = selftest._accounts(Training(ranks_of(2), BATCH, "node=3"))
    assert not good, detail


@on_ranks(5)
def test_every_rank_of_an_all_reduce_sends_what_is_predicted():
    training = Training(ranks_of(5), replace(BATCH, dtype="bf16"), "node=0")  # whose sums are ours, by chunks
    training.step()
    with zm.traffic_report(training.model, micro_batches=len(training.data)) as traffic:
        training.step()
    (line,) = traffic.lines()
    assert line.sent_bytes == line.predicted_bytes
    good, detail = selftest._accounts(training)
    assert good and "0.00% off" in detail, detail


def test_layouts_of_a_mesh():
    assert set(selftest.strategies({"node": 4}).values()) == {f"node={stage}" for stage in ("0", "1", "2", "3", "3d")}
    two = set(selftest.strategies({"cluster": 2, "node": 4}).values())
    assert {"node=3,cluster=0", "node=3,cluster=1", "node=3,cluster=3k", "node=3d,cluster=3d"} <= two
