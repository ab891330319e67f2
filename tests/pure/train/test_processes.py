"""Local processes end together, and the first failure is the one that is reported. The ranks here are small scripts."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from zeromesh.errors import CommunicationError, ConfigError, InputError, NonFiniteError
from zeromesh.train.processes import EXIT_PREEMPTED, Ending, Failure, Forwarder, LocalProcesses, verdict

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
    assert verdict(codes, [], ended) == Ending(code=0)


def test_one_failure_ends_the_others() -> None:
    codes, ended = run(f"if rank == 1: sys.exit(1)\n{PARENT_GONE}")
    assert codes == {0: -signal.SIGKILL, 1: 1, 2: -signal.SIGKILL}
    assert ended == {0, 2}


def test_others_may_finish_within_the_grace() -> None:
    codes, ended = run("sys.exit(75 if rank else 1)", grace_s=60.0)
    assert (codes, ended) == ({0: 1, 1: 75, 2: 75}, set())


def test_a_rank_that_is_killed_is_named_and_nobody_waits() -> None:
    start = time.monotonic()
    codes, ended = run(f"if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n{PARENT_GONE}", grace_s=60.0)
    assert time.monotonic() - start < 30
    assert codes[2] == -signal.SIGKILL
    assert verdict(codes, [], ended) == Ending(
        code=1, reason="zeromesh: rank 2 was ended by SIGKILL; the machine may be out of memory", again=True
    )


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


def test_the_first_failure_is_reported_not_its_consequences(tmp_path: Path) -> None:
    fail(2, ValueError("the cause"), tmp_path)
    fail(0, RuntimeError("connection closed by peer"), tmp_path)
    ending = verdict({0: 1, 1: 0, 2: 1}, Failure.read_all(tmp_path), set())
    assert ending.reason == "Traceback of rank 2\nzeromesh: rank 2 failed: ValueError: the cause"
    assert (ending.code, ending.again) == (1, True)


def test_an_error_that_says_it_all_has_no_traceback(tmp_path: Path) -> None:
    fail(1, CommunicationError("all_gather failed"), tmp_path)
    ending = verdict({0: 1, 1: 1}, Failure.read_all(tmp_path), set())
    assert ending == Ending(code=1, reason="zeromesh: rank 1 failed: all_gather failed", again=True)


def test_a_run_that_is_to_stop_is_not_started_again(tmp_path: Path) -> None:
    fail(0, NonFiniteError("step 3: the loss is nan"), tmp_path)
    assert not verdict({0: 1, 1: 1}, Failure.read_all(tmp_path), set()).again


def test_wrong_input_on_a_rank_is_the_users_one_message(tmp_path: Path) -> None:
    for rank in range(3):
        fail(rank, ConfigError("data.files matches nothing"), tmp_path)
    with pytest.raises(InputError, match=r"^data.files matches nothing$"):
        verdict({0: 1, 1: 1, 2: 1}, Failure.read_all(tmp_path), set())


def test_preempted_only_if_nobody_failed() -> None:
    assert verdict({0: EXIT_PREEMPTED, 1: EXIT_PREEMPTED}, [], set()) == Ending(code=EXIT_PREEMPTED)
    ending = verdict({0: EXIT_PREEMPTED, 1: 3}, [], set())
    assert ending.code == 1 and "left no reason" in ending.reason


def test_sigterm_before_a_rank_listens_is_a_preemption_where_the_run_can_save() -> None:
    codes = {0: EXIT_PREEMPTED, 1: -signal.SIGTERM}
    assert verdict(codes, [], set(), preempted=True) == Ending(code=EXIT_PREEMPTED)
    assert verdict(codes, [], set()).reason == "zeromesh: rank 1 was ended by SIGTERM; nothing was saved"


def test_sigterm_is_handed_on_also_where_it_comes_before_the_ranks() -> None:
    command = [sys.executable, "-S", "-c", f"import sys; {PARENT_GONE}"]
    with Forwarder() as sigterm:
        os.kill(os.getpid(), signal.SIGTERM)
        with LocalProcesses(command, 2, grace_s=60.0) as processes:
            sigterm.to(processes)
            assert set(processes.wait().values()) == {-signal.SIGTERM}
    assert sigterm.asked
