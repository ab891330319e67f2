"""Local processes end together, and the first failure is the one that is reported. The ranks here are small scripts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from zeromesh.errors import ConfigError, InputError
from zeromesh.train.processes import EXIT_PREEMPTED, Failure, LocalProcesses, verdict

PARENT_GONE = "sys.stdin.buffer.read()"  # ends when the parent closes the pipe, never before


def run(script: str, world: int = 3, grace_s: float = 0.1) -> tuple[dict[int, int], set[int]]:
    script = f"import os, signal, sys\nrank = int(os.environ['RANK'])\n{script}"
    with LocalProcesses([sys.executable, "-S", "-c", script], world, grace_s=grace_s) as processes:
        return processes.wait(), processes.ended_by_us


def test_all_ranks_know_themselves_and_end_with_0() -> None:
    codes, ended = run(
        "world = os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE']\nsys.exit(world != ('3', '3'))"
    )
    assert (codes, ended) == ({0: 0, 1: 0, 2: 0}, set())
    assert verdict(codes, [], ended) == 0


def test_one_failure_ends_the_others() -> None:
    codes, ended = run(f"if rank == 1: sys.exit(1)\n{PARENT_GONE}")
    assert codes == {0: -signal.SIGKILL, 1: 1, 2: -signal.SIGKILL}
    assert ended == {0, 2}


def test_others_may_finish_within_the_grace() -> None:
    codes, ended = run("sys.exit(75 if rank else 1)", grace_s=60.0)
    assert (codes, ended) == ({0: 1, 1: 75, 2: 75}, set())


def test_a_rank_that_is_killed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    codes, ended = run(f"if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n{PARENT_GONE}")
    assert codes[2] == -signal.SIGKILL
    assert verdict(codes, [], ended) == 1
    assert capsys.readouterr().err == "zeromesh: rank 2 was ended by SIGKILL; the machine may be out of memory\n"


def test_leaving_ends_what_still_runs() -> None:
    with LocalProcesses([sys.executable, "-S", "-c", f"import sys; {PARENT_GONE}"], 2) as processes:
        identifiers = [process.pid for process in processes._processes.values()]
    for identifier in identifiers:
        with pytest.raises(ProcessLookupError):
            os.kill(identifier, 0)


def test_signals_reach_the_ranks() -> None:
    with LocalProcesses([sys.executable, "-S", "-c", f"import sys; {PARENT_GONE}"], 2, grace_s=60.0) as processes:
        processes.signal(signal.SIGTERM)
        assert set(processes.wait().values()) == {-signal.SIGTERM}


def fail(rank: int, error: Exception, directory: Path) -> None:
    Failure.now(rank, error, f"Traceback of rank {rank}").write(directory)


def test_the_first_failure_is_reported_not_its_consequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fail(2, ValueError("the cause"), tmp_path)
    fail(0, RuntimeError("connection closed by peer"), tmp_path)
    assert verdict({0: 1, 1: 0, 2: 1}, Failure.read_all(tmp_path), set()) == 1
    assert capsys.readouterr().err == "Traceback of rank 2\nzeromesh: rank 2 failed: ValueError: the cause\n"


def test_wrong_input_on_a_rank_is_the_users_one_message(tmp_path: Path) -> None:
    for rank in range(3):
        fail(rank, ConfigError("data.files matches nothing"), tmp_path)
    with pytest.raises(InputError, match=r"^data.files matches nothing$"):
        verdict({0: 1, 1: 1, 2: 1}, Failure.read_all(tmp_path), set())


def test_preempted_only_if_nobody_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict({0: EXIT_PREEMPTED, 1: EXIT_PREEMPTED}, [], set()) == EXIT_PREEMPTED
    assert verdict({0: EXIT_PREEMPTED, 1: 3}, [], set()) == 1
    assert "left no reason" in capsys.readouterr().err
