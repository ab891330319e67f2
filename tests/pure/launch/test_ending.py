"""How a run of local processes ended: the first failure is reported. The ranks here are small scripts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from zeromesh.cli.train import Ending, verdict
from zeromesh.errors import CommunicationError, ConfigError, InputError, MismatchError, NonFiniteError, OptimizerError
from zeromesh.integrations.elastic import EXIT_PREEMPTED, noticing_sigterm, was_asked
from zeromesh.launch.failure import Failure
from zeromesh.launch.processes import RankResult, local_launches, run_ranks

FOREVER = "while True: signal.pause()"


def run(script: str, world: int = 3, grace_s: float = 0.1) -> tuple[RankResult, ...]:
    script = f"import os, signal, sys\nrank = int(os.environ['RANK'])\n{script}"
    launches = local_launches([sys.executable, "-S", "-c", script], world, {"NAMED": "here"})
    return run_ranks(launches, grace_s=grace_s, asks=True)


def codes(results: tuple[RankResult, ...]) -> list[int]:
    return [result.returncode for result in results]


def ended(*returncodes: int) -> list[RankResult]:
    return [
        RankResult(rank=rank, returncode=code, stdout="", stderr="", wall_s=0.0)
        for rank, code in enumerate(returncodes)
    ]


def test_all_ranks_know_themselves_print_here_and_end_with_0(capfd: pytest.CaptureFixture[str]) -> None:
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NAMED"
    results = run(f"sys.stdout.write(' '.join(os.environ[name] for name in {names}) + chr(10))")  # in one piece
    assert verdict(results, []) == Ending(code=0)
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 0 3 3 here", "1 1 3 3 here", "2 2 3 3 here"]


def test_one_failure_ends_the_others_which_are_not_asked_to_save() -> None:
    results = run(f"if rank == 1: sys.exit(1)\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n{FOREVER}")
    assert codes(results) == [-signal.SIGKILL, 1, -signal.SIGKILL]
    assert [result.ended_because for result in results] == ["rank 1 failed", None, "rank 1 failed"]


def test_others_may_finish_within_the_grace() -> None:
    results = run("sys.exit(75 if rank else 1)", grace_s=60.0)
    assert codes(results) == [1, 75, 75] and not any(result.ended_because for result in results)


def test_a_rank_that_is_killed_is_named_and_nobody_waits() -> None:
    start = time.monotonic()
    results = run(f"if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n{FOREVER}", grace_s=500.0)
    assert time.monotonic() - start < 500
    assert verdict(results, []) == Ending(
        code=1, reason="zeromesh: rank 2 was ended by SIGKILL; the machine may be out of memory", again=True
    )


def fail(rank: int, error: Exception, directory: Path) -> None:
    Failure.now(rank, error, f"Traceback of rank {rank}").write(directory)


def test_the_first_failure_is_reported_not_its_consequences(tmp_path: Path) -> None:
    fail(2, ValueError("the cause"), tmp_path)
    fail(0, RuntimeError("connection closed by peer"), tmp_path)
    ending = verdict(ended(1, 0, 1), Failure.read_all(tmp_path))
    assert ending.reason.startswith("Traceback of rank 2\nzeromesh: rank 2 failed: ValueError: the cause\n")
    assert (ending.code, ending.again) == (1, True)


def test_each_message_is_reported_once_the_cause_first(tmp_path: Path) -> None:
    fail(3, CommunicationError("all_gather failed"), tmp_path)
    for rank in (2, 0):
        fail(rank, MismatchError("ranks have drifted apart"), tmp_path)
    fail(1, OptimizerError("no gradient"), tmp_path)
    ending = verdict(ended(1, 1, 1, 1), Failure.read_all(tmp_path))
    assert ending.reason.splitlines() == [
        "zeromesh: ranks 0, 2 failed: ranks have drifted apart",
        "zeromesh: rank 1 failed: no gradient",
        "zeromesh: rank 3 failed: all_gather failed",
    ]


def test_an_error_that_says_it_all_has_no_traceback(tmp_path: Path) -> None:
    fail(1, CommunicationError("all_gather failed"), tmp_path)
    ending = verdict(ended(1, 1), Failure.read_all(tmp_path))
    assert ending == Ending(code=1, reason="zeromesh: rank 1 failed: all_gather failed", again=True)


def test_a_run_that_is_to_stop_is_not_started_again(tmp_path: Path) -> None:
    fail(0, NonFiniteError("step 3: the loss is nan"), tmp_path)
    assert not verdict(ended(1, 1), Failure.read_all(tmp_path)).again


def test_wrong_input_on_a_rank_is_the_users_one_message(tmp_path: Path) -> None:
    for rank in range(3):
        fail(rank, ConfigError("data.files matches nothing"), tmp_path)
    with pytest.raises(InputError, match=r"^data.files matches nothing$"):
        verdict(ended(1, 1, 1), Failure.read_all(tmp_path))
    with pytest.raises(InputError, match=r"^ranks 0, 1, 2 failed: data.files matches nothing$"):
        verdict(ended(1, 1, 1, 1), Failure.read_all(tmp_path))


def test_preempted_only_if_nobody_failed() -> None:
    assert verdict(ended(EXIT_PREEMPTED, EXIT_PREEMPTED), []) == Ending(code=EXIT_PREEMPTED)
    ending = verdict(ended(EXIT_PREEMPTED, 3), [])
    assert ending.code == 1 and "left no reason" in ending.reason


def test_sigterm_before_a_rank_listens_is_a_preemption_where_the_run_can_save() -> None:
    results = ended(EXIT_PREEMPTED, -signal.SIGTERM)
    assert verdict(results, [], preempted=True) == Ending(code=EXIT_PREEMPTED)
    assert verdict(results, []).reason == "zeromesh: rank 1 was ended by SIGTERM; nothing was saved"


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_sigterm_is_handed_on_also_where_it_comes_before_the_ranks(delay_s: float) -> None:
    with noticing_sigterm():
        if delay_s:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        assert codes(run(FOREVER, 2, grace_s=60.0)) == [-signal.SIGTERM] * 2
        assert was_asked()
