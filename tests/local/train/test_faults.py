"""What a user sees of ranks that die, stall or are preempted, under zeromesh's own launcher and under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def start(directory: Path, faults: list[str], *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    file = directory / "run.toml"
    file.write_text(CONFIG.replace("FAULTS", json.dumps(faults)))
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    paths = {
        "PYTHONPATH": f"{FAKE}:{os.environ.get('PYTHONPATH', '')}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *launcher, "-m", "zeromesh.cli", "train", str(file), *arguments]
    return subprocess.Popen(
        command,
        env=inherited | paths,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, output, errors


def steps(directory: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (directory / "out/metrics.jsonl").read_text().splitlines()]


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "out/checkpoints").glob("step-*"))


def resumed_after(output: str) -> int:
    """The step that a restarted run went on from: the newest complete one, or the one before if the kill came early."""
    (step,) = re.findall(r"^resumed from .* after step (\d+)$", output, re.MULTILINE)
    return int(step)


KILLED_THEN_PREEMPTED = ["kill 1 0 5", "preempt 0 1 2"]
"""In step 5 the checkpoint of step 2 is complete; that of step 4 may be. The restarted run ends after two steps."""


def test_a_killed_rank_is_restarted_and_a_preempted_run_saves(directory: Path) -> None:
    code, output, errors = end(start(directory, KILLED_THEN_PREEMPTED))
    assert "rank 1 was ended by SIGKILL" in errors
    assert "zeromesh: restart 1 of 1" in errors
    step = resumed_after(output)
    assert step in (2, 4)
    assert steps(directory) == list(range(1, step + 3))
    assert saved(directory)[-1] == f"step-{step + 2:08}"
    assert code == 75, errors


def test_a_stopped_rank_is_named(directory: Path) -> None:
    """Three ranks wait for the one that sleeps, one of them for another that waits itself."""
    process = start(
        directory,
        ["stop 3 0 5"],
        *("--set", "mesh={cluster=2, node=2}", "--set", "strategy=node=3,cluster=1"),
        *("--set", "run.timeout_s=3", "--set", "faults.restarts=0", "--set", "batch.micro=1"),
    )
    code, _, errors = end(process)
    assert code == 1
    assert "Missing: rank 3, which did not answer" in errors, errors
    assert " over axis " in errors and "timeout 3 s" in errors
    assert "Traceback" not in errors
    assert saved(directory)[0] == "step-00000002"


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")


def test_torchrun_restarts_its_sigterm_saves_and_fewer_processes_go_on(directory: Path) -> None:
    code, output, errors = end(start(directory, KILLED_THEN_PREEMPTED, launcher=TORCHRUN))
    ended = resumed_after(output) + 2
    assert steps(directory) == list(range(1, ended + 1)), errors
    assert saved(directory)[-1] == f"step-{ended:08}"
    assert code == 1  # torchrun's own, whatever its processes end with
    one = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    code, output, errors = end(start(directory, [], "--set", "faults.resize=true", launcher=one))
    assert code == 0, errors
    assert "strategy node=3 on mesh node=2, and is loaded under strategy node=3 on mesh node=1" in output
    assert steps(directory) == list(range(1, 9))
