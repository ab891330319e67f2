"""`zeromesh selftest` as a user runs it: one result file, whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.dist.engine.reference import TIMEOUT_S, mesh_of
from tests.dist.pool import on_ranks
from zeromesh.errors import InputError
from zeromesh.launch.ranks import Ranks
from zeromesh.measure import selftest

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


UNDER_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_selftest(folder: Path, startup: str = "", *, launcher: tuple[str, ...] = ()) -> tuple[int, dict[str, Any], str]:
    """The exit code, the result file and what was printed of a self-test on two ranks.

    Args:
        folder: of the result.
        startup: what each process of it does first, in Python; a fault.
        launcher: starts the ranks; by itself it starts its own.
    """
    (folder / "sitecustomize.py").write_text(startup)
    around = {key: value for key, value in os.environ.items() if key not in TORCHRUN}
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    ranks = () if launcher else ("--ranks", "2")
    command = (*launcher, "-m", "zeromesh.cli", "selftest", *ranks, "--steps", "1", "-o", "found.json")
    ended = subprocess.run(
        (sys.executable, *command),
        cwd=folder,
        env={**around, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    printed = ended.stdout + ended.stderr
    assert (folder / "found.json").exists(), printed
    return ended.returncode, json.loads((folder / "found.json").read_text()), printed


SHORTLY = """
from zeromesh.measure import probe
measure = probe.measure
probe.measure = lambda ranks, **options: measure(ranks, **{**options, "seconds": 0.5})
"""
"""Links are timed for half a second, not six."""


def test_all_is_well_on_two_ranks_of_a_torchrun(tmp_path):
    code, found, printed = run_selftest(tmp_path, SHORTLY, launcher=UNDER_TORCHRUN)
    assert code == 0 and found["passed"], printed
    names = [check["name"] for check in found["checks"]]
    for stage in ("0", "1", "2", "3", "3d"):
        assert f"parity, all {stage} (node={stage})" in names
        assert f"bytes and memory, all {stage} (node={stage})" in names
    timed = [name for name in names if name.startswith("time, ")]
    assert "links, node" in names and len(timed) == 3
    # Links and times of a machine that others use may be unlikely; all else is right or wrong.
    assert all(check["status"] == "ok" for check in found["checks"] if not check["name"].startswith(("links", "time")))
    assert 0 < found["seconds"] < 600
    assert found["environment"]["mesh"] == "node=2" and sum(found["environment"]["hosts"].values()) == 2
    assert found["cluster"]
    assert all(len(steps["step_s"]) == 1 for steps in found["raw"]["steps"].values())


def on_rank_1(what: str) -> str:
    return f"""
import os, time
if os.environ.get("RANK") == "1":
    from zeromesh.measure import parity
    difference = parity.largest_difference

    def fail(ranks, strategy):
        if strategy == "node=2":
            time.sleep(1)  # the other rank is no longer in the check before
            {what}
        return difference(ranks, strategy)

    parity.largest_difference = fail
"""


def test_what_a_rank_raised_is_in_the_file_with_what_was_found_before(tmp_path):
    code, found, printed = run_selftest(tmp_path, on_rank_1('raise ValueError("a cosmic ray")'))
    assert code == 1 and not found["passed"], printed
    *before, last = found["checks"]
    assert [check["status"] for check in before] == ["ok"] * 4
    assert last["name"] == "parity, all 2 (node=2)" and last["status"] == "failed"
    # The cause first, then what it did to the rank that reports it.
    assert last["detail"].startswith("rank 1: ValueError: a cosmic ray; rank 0: "), last
    assert found["environment"]["backend"] == "gloo" and found["raw"]["steps"] == {}
    assert "a cosmic ray" in printed and "FAILED in " in printed


def test_a_rank_that_dies_leaves_a_file(tmp_path):
    code, found, printed = run_selftest(tmp_path, on_rank_1("os.kill(os.getpid(), 9)"))
    assert code == 1 and not found["passed"], printed
    *before, doing, check = found["checks"]
    assert [check["status"] for check in before] == ["ok"] * 4
    assert (doing["name"], doing["detail"]) == ("parity, all 2 (node=2)", "begun, and not ended")
    assert check["name"] == "all ranks start, and live to the end" and check["status"] == "failed"
    assert "RanksFailedError: " in check["detail"] and "rank 1 died of SIGKILL" in check["detail"]
    assert found["environment"]["mesh"] == "node=2" and found["environment"]["zeromesh"]
    assert found["cluster"] == "" and found["seconds"] > 0


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_a_check_that_raises_is_the_last_one():
    ranks = Ranks(rank=dist.get_rank(), world=2, device=torch.device("cpu"), mesh=mesh_of(2))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    layouts = {"all 3": "node=3", "all 1": "node=1"}
    wrong = mock.patch.object(selftest, "_accounts", side_effect=RuntimeError("out of bytes"))
    with wrong, mock.patch.object(selftest, "strategies", lambda mesh: layouts):
        found = selftest.run(ranks, steps=1, output=str(Path(folder[0]) / "found.json"))
    assert [check["status"] for check in found["checks"]] == ["ok", "failed"]
    assert found["checks"][1]["name"] == "bytes and memory, all 3 (node=3)"
    assert f"rank {ranks.rank}: RuntimeError: out of bytes" in found["checks"][1]["detail"]
    assert found["probe"] is None and found["environment"]["backend"] == "gloo"


def test_figures_that_make_no_sense_are_a_failed_check(monkeypatch, tmp_path):
    mesh = {"node": 2}
    good = {"name": "parity", "status": "ok", "detail": "same"}
    raw = {**selftest._nothing(mesh), "checks": [good], "probe": {"levels": "none"}}
    monkeypatch.setattr(selftest, "on_all_ranks", lambda *_, **__: raw)
    result = selftest.selftest(mesh, tmp_path / "found.json")
    assert result is not None and not result.passed
    assert [check.status for check in result.checks] == ["ok", "failed"]
    assert result.checks[1].name == "links and times beside predicted ones"
    assert result.to_json()["passed"] is False
    assert json.loads((tmp_path / "found.json").read_text()) == json.loads(json.dumps(result.to_json()))


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path):
    with pytest.raises(InputError, match=r"the result file cannot be written: .*nowhere.*: No such file or directory"):
        selftest.selftest({"node": 2}, tmp_path / "nowhere" / "found.json")


def test_all_processes_ended_leave_what_was_found(tmp_path):
    """With SIGKILL, while a check runs; the ranks end with the process that has started them."""
    startup = on_rank_1("os.kill(os.getppid(), 9)")
    code, found, _ = run_selftest(tmp_path, startup)
    assert code == -9 and not found["passed"]
    *before, doing = found["checks"]
    assert [check["status"] for check in before] == ["ok"] * 4
    assert (doing["name"], doing["status"]) == ("parity, all 2 (node=2)", "failed")
