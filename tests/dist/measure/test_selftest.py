"""`zeromesh selftest`: one result file, in any event."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.dist import pool
from tests.dist.measure.test_tasks import BATCH, ranks_of
from tests.dist.pool import on_ranks, told_by_first
from tests.forks import run_python
from zeromesh.cli.app import main
from zeromesh.comm import groups
from zeromesh.errors import InputError
from zeromesh.launch.job import find_task
from zeromesh.launch.ranks import Ranks
from zeromesh.measure import launch, links, machine, parity, probe, selftest
from zeromesh.measure.probe import from_raw
from zeromesh.measure.steps import planned

MESH = {"node": 2}
STRATEGIES = {"all 2": "node=2", "all 3": "node=3", "all 0": "node=0"}
"""Three of those that it has for this mesh (`test_layouts_of_a_mesh`)."""


@on_ranks(2)
def test_all_is_well_on_two_ranks_of_a_torchrun(tmp_path: Path) -> None:
    ranks, output = ranks_of(2), Path(told_by_first(str, tmp_path)) / "found.json"
    names = {"RANK": ranks.rank, "WORLD_SIZE": 2, "LOCAL_RANK": ranks.rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    around = {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "localhost"}
    measure = probe.measure

    def on_these(_: None, *, task: str, mesh: object, options: dict[str, object]) -> object:
        return find_task(task)(ranks, **options)

    def shortly(ranks: object, **options: object) -> object:
        options |= {"rounds": 4, "seconds": 0.2, "find": True, "works": [asdict(BATCH.work)]}
        return measure(ranks, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "run_task", on_these)
        patch.setattr(probe, "measure", shortly)
        patch.setattr(selftest, "_timed_batch", lambda: BATCH)
        patch.setattr(selftest, "strategies", lambda mesh: STRATEGIES)
        patch.setattr(machine, "SAMPLE_S", 0.02)
        patch.setattr(links, "LEAST_BYTES", 1 << 18)
        with mock.patch.dict(os.environ, around):
            result = selftest.selftest(MESH, output, steps=1)
        if result is None:
            assert ranks.rank == 1
            return
        patch.setattr(selftest, "selftest", lambda *_, **__: result)
        patch.setattr(sys, "argv", ["zeromesh", "selftest", "--ranks", "2"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0 and result.passed
    assert json.loads(output.read_text()) == json.loads(json.dumps(result.to_json()))
    found = [check.name for check in result.checks]
    on_host = {f"all 3, {stage} on the host": f"host={stage},node=3" for stage in "123"}
    for title, strategy in (STRATEGIES | on_host).items():
        assert f"parity, {title} ({strategy})" in found
        assert f"bytes and memory, {title} ({strategy})" in found
    assert "links, node" in found and sum(name.startswith("time, ") for name in found) == 3
    # Links and times of a machine that others use may be unlikely; all else is right or wrong.
    assert all(check.status == "ok" for check in result.checks if not check.name.startswith(("links", "time")))
    assert result.environment["mesh"] == "node=2" and sum(result.environment["hosts"].values()) == 2
    assert result.environment["backend"] == "gloo" and 0 < result.seconds < 600
    assert all(len(steps["step_s"]) == 1 for steps in result.raw["steps"].values())
    assert result.cluster
    cluster = from_raw(json.loads(output.read_text())["raw"]["probe"], MESH, "here").cluster
    assert cluster.axes == (("node", 2),) and dict(cluster.sources)["level.node.size"] == "all ranks"
    assert cluster.device.cores is not None and cluster.device.memory_bytes > 1e6
    assert 1e6 < cluster.levels[0].bandwidth_bytes_per_s < 1e12
    kinds = [kernel.kind for kernel in cluster.device.kernels]
    counts = {"product": 4, "attention": 1, "elementwise": 1, "gradients": 1, "optimizer": 1}
    assert {kind: kinds.count(kind) for kind in kinds} == counts
    assert 0 < planned("node=1", cluster, BATCH).step_s < 5


def run_with_a_rank_that_raises(output: Path) -> dict[str, Any]:
    ranks, difference = ranks_of(2), parity.largest_difference

    def fail(ranks: Ranks, strategy: str) -> float:
        if ranks.rank == 1 and strategy == "node=1":
            raise ValueError("a cosmic ray")
        return difference(ranks, strategy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "largest_difference", fail)
        patch.setattr(selftest, "strategies", lambda mesh: {"all 3": "node=3", "all 1": "node=1"})
        return selftest.run(ranks, steps=1, output=str(output))


@on_ranks(2, timeout_s=120.0, spoils=True)
def test_what_a_rank_raised_is_in_the_file_with_what_was_found_before(tmp_path: Path) -> None:
    output = Path(told_by_first(str, tmp_path)) / "found.json"
    raw = run_with_a_rank_that_raises(output)
    if dist.get_rank() == 1:
        groups._Pool._latest = None  # which holds the group of the ranks' words
        pool._leave()  # as its process ends
        return
    noted = json.loads(output.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "on_all_ranks", lambda *_, **__: raw)
        result = selftest.selftest(MESH, output)
    assert result is not None and not result.passed
    *before, last = result.checks
    assert [check.status for check in before] == ["ok"] * 2
    assert last.name == "parity, all 1 (node=1)" and last.status == "failed"
    # The cause first, then its effect on the rank that reports it.
    assert last.detail.startswith("rank 1: ValueError: a cosmic ray; rank 0: "), last
    assert result.environment["backend"] == "gloo" and result.raw == {"probe": None, "steps": {}}
    # All processes may end at once, so each check is noted before it begins.
    assert [check["status"] for check in noted["checks"]] == ["ok", "ok", "failed"]
    assert noted["checks"][-1] == selftest._begun(last.name) and noted["passed"] is False


DIES = """
import os, pathlib, time
if os.environ.get("RANK") == "1":
    from zeromesh.measure import parity
    def die(ranks, strategy):  # once the first rank is there too
        while "parity" not in pathlib.Path("found.json").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), 9)
    parity.largest_difference = die
"""


def test_a_rank_that_dies_leaves_a_file(tmp_path: Path) -> None:
    """As a user starts it, on two processes of its own."""
    (tmp_path / "sitecustomize.py").write_text(DIES)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    around = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    words = ("-m", "zeromesh.cli", "selftest", "--ranks", "2", "--steps", "1", "-o", "found.json")
    ended = run_python(*words, env={**around, "PYTHONPATH": os.pathsep.join(paths)}, cwd=tmp_path)
    assert ended.returncode == 1 and "FAILED in " in ended.stdout, ended
    found = json.loads((tmp_path / "found.json").read_text())
    doing, check = found["checks"]
    assert doing["name"] == "parity, all 2 (node=2)" and doing["status"] == "failed"
    # The other rank may have time to say that it was left alone, before it is ended.
    assert doing["detail"] == "begun, and not ended" or "rank 0: " in doing["detail"], doing
    assert check["name"] == "all ranks start, and live to the end" and check["status"] == "failed"
    assert "RanksFailedError: " in check["detail"] and "rank 1 died of SIGKILL" in check["detail"]
    assert found["environment"]["mesh"] == "node=2" and found["environment"]["zeromesh"]
    assert not found["passed"] and found["cluster"] == "" and found["seconds"] > 0


def test_figures_that_make_no_sense_are_a_failed_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = {"name": "parity", "status": "ok", "detail": "same"}
    raw = {**selftest._nothing(MESH), "checks": [good], "probe": {"levels": "none"}}
    monkeypatch.setattr(selftest, "on_all_ranks", lambda *_, **__: raw)
    result = selftest.selftest(MESH, tmp_path / "found.json")
    assert result is not None and not result.passed
    assert [check.status for check in result.checks] == ["ok", "failed"]
    assert result.checks[1].name == "links and times beside predicted ones"
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["passed"] is False and written == json.loads(json.dumps(result.to_json()))
    with pytest.raises(InputError, match=r"the result file cannot be written: .*nowhere.*: No such file or directory"):
        selftest.selftest(MESH, tmp_path / "nowhere" / "found.json")
