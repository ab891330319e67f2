"""Ranks that die, stall or are preempted, as a user sees it, under zeromesh's own launcher and under torchrun."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.forks import run_python

FAKE = Path(__file__).parent / "fake"
CONFIG = """
strategy = "node=3"
mesh = { node = 2 }
[run]
directory = "out"
steps = 8
threads = 1
[model]
config = { model_type = "tiny", faults = FAULTS }
[data]
files = ["text/*.txt"]
seq_len = 8
holdout = 0
[batch]
global_sequences = 4
micro = 4
[optimizer]
lr = 1e-2
[checkpoint]
every = 2
[faults]
restarts = 1
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text number {number}\n" * 10)
    return tmp_path


def train(directory: Path, faults: list[str], *overrides: str, launcher: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit code, output and complaints of the command."""
    file = directory / "run.toml"
    file.write_text(CONFIG.replace("FAULTS", json.dumps(faults)))
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    paths = {"PYTHONPATH": f"{FAKE}:{os.environ.get('PYTHONPATH', '')}", "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [word for override in overrides for word in ("--set", override)]
    command = (*launcher, "-m", "zeromesh.cli", "train", file, *arguments)
    ended = run_python(*command, env=inherited | paths | {"OMP_NUM_THREADS": "1"}, cwd=directory)
    return ended.returncode, ended.stdout, ended.stderr


def require_gone_on(directory: Path, output: str) -> None:
    """From the newest complete checkpoint, or the one before if the fault came early; two steps later it saved."""
    (found,) = re.findall(r"^resumed from .* after step (\d+)$", output, re.MULTILINE)
    step = int(found)
    assert step in (2, 4)
    lines = (directory / "out/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 3))
    saved = sorted(path.name for path in (directory / "out/checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{step + 2:08}"


def test_a_stopped_rank_is_named_the_run_restarted_and_saved_when_preempted(directory: Path) -> None:
    """In step 5 the checkpoint of step 2 is complete; that of step 4 may be. The restarted run ends after two steps."""
    code, output, errors = train(directory, ["stop 1 0 5", "preempt 0 1 2"], "run.timeout_s=5")
    assert "Missing: rank 1, which did not answer" in errors and "timeout 5 s" in errors, errors
    assert "zeromesh: restart 1 of 1" in errors and "Traceback" not in errors
    require_gone_on(directory, output)
    assert code == 75, errors


def test_ctrl_c_ends_the_step_and_saves_also_without_checkpoints(directory: Path) -> None:
    """And says where all is, and how to go on."""
    settings = ("checkpoint.every=0", "faults.restarts=0", "run.steps=4")
    code, output, errors = train(directory, ["interrupt 1 0 3"], *settings)
    assert code == 130 and "ending after this step, and saving" in errors, errors
    *_, stopped, where, command = output.splitlines()
    assert stopped == "stopped and saved after step 3 of 4"
    assert where == "page out/run.html, metrics out/metrics.jsonl, checkpoints out/checkpoints"
    assert all((directory / place.split(" ")[1]).exists() for place in where.split(", "))
    assert command.startswith("to go on: zeromesh train ") and command.endswith("--set run.steps=4")
    code, output, errors = train(directory, [], *settings)
    assert code == 0 and "step-00000003 after step 3" in output and output.splitlines()[-1] == where, errors


def test_a_second_ctrl_c_ends_at_once(directory: Path) -> None:
    code, _, errors = train(directory, ["insist 0 0 3"])
    assert code == 130 and "Traceback" not in errors, errors
    assert not (directory / "out/checkpoints/step-00000003").exists()


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_torchruns_sigterm_saves(directory: Path) -> None:
    """Started again, its processes meet in the store of before: `tests/local/launch/test_meeting.py`."""
    code, _, errors = train(directory, ["preempt 0 0 3"], launcher=TORCHRUN)
    assert [path.name for path in (directory / "out/checkpoints").glob("step-*")].count("step-00000003") == 1, errors
    assert code == 1, errors  # torchrun's own, not its processes'
