"""How ranks are started, watched and ended, with small scripts as ranks; which failure is reported."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from zeromesh.cli.train import Ending, verdict
from zeromesh.errors import (
    CommunicationError,
    ConfigError,
    InputError,
    MismatchError,
    NonFiniteError,
    OptimizerError,
    RanksFailedError,
)
from zeromesh.integrations.elastic import EXIT_PREEMPTED, asked_by, noticing
from zeromesh.launch.failure import Failure
from zeromesh.launch.processes import Launch, RankResult, describe_failure, local_launches, raise_failed, run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open") or shutil.which("setpriv") is None, reason="needs Linux and util-linux's setpriv"
)


def run(*scripts, timeout_s=500.0, **options):
    launches = [
        Launch(rank=rank, argv=("sh", "-c", script), env={**os.environ, "RANK": str(rank)})
        for rank, script in enumerate(scripts)
    ]
    return run_ranks(launches, timeout_s=timeout_s, **options)


def has_ended(pid):
    """Whether process `pid`, which was sent SIGKILL, is gone before it would end by itself."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 40.0)[0])
    finally:
        os.close(process)


def test_output_and_exit_code_of_each_rank():
    results = run("echo out $RANK; echo err $RANK >&2", "printf 'no newline'")
    assert [(r.rank, r.returncode, r.stdout, r.stderr) for r in results] == [
        (0, 0, "out 0\n", "err 0\n"),
        (1, 0, "no newline", ""),
    ]
    assert not any(result.failed for result in results)
    raise_failed(results)
    (result,) = run("kill -9 $$", timeout_s=1e7)  # longer than one wait
    assert describe_failure([result]) == "1 of 1 ranks failed: rank 0 died of SIGKILL\nrank 0:\n(it printed nothing)"
    # More output than a pipe holds on both streams.
    (result,) = run("head -c 1000000 /dev/zero | tr '\\0' x; head -c 1000000 /dev/zero | tr '\\0' y >&2")
    assert (len(result.stdout), len(result.stderr)) == (1_000_000, 1_000_000)
    # Lines are seen as they come.
    seen = []
    run("echo one; echo two >&2; printf three", on_line=lambda *line: seen.append(line))
    assert sorted(seen) == [(0, "stderr", "two"), (0, "stdout", "one"), (0, "stdout", "three")]


def test_the_others_end_with_the_first_that_fails():
    results = run("sleep 60", "echo 'the reason' >&2; exit 3", "sleep 60")
    assert [r.ended_because for r in results] == ["rank 1 failed", None, "rank 1 failed"]
    assert results[1].returncode == 3
    assert all(r.wall_s < 60 for r in results)
    with pytest.raises(RanksFailedError, match=r"3 of 3 .* rank 1 exited with 3; .*\nrank 1:\nthe reason"):
        raise_failed(results)


def test_the_timeout_kills_what_ignores_a_request_to_end():
    start = time.monotonic()
    (result,) = run("trap '' TERM; while :; do sleep 60; done", timeout_s=1.5, grace_s=0.3)
    assert time.monotonic() - start >= 1.8
    assert (result.returncode, result.ended_because) == (-signal.SIGKILL, "it ran past the timeout of 1.5 s")
    assert "was ended since it ran past the timeout of 1.5 s" in (describe_failure([result]) or "")


def test_what_a_rank_started_ends_with_it():
    (result,) = run("sleep 60 & echo $!")
    assert result.returncode == 0
    assert has_ended(int(result.stdout))


def test_a_daemon_that_holds_the_output_open_does_not_hold_up_the_result(tmp_path):
    fifo = tmp_path / "ready"
    os.mkfifo(fifo)
    start = time.monotonic()
    (result,) = run(f"setsid sh -c 'echo > {fifo}; exec sleep 60' & daemon=$!; read line < {fifo}; echo $daemon")
    os.kill(int(result.stdout), signal.SIGKILL)
    assert time.monotonic() - start < 60


def test_an_error_in_the_caller_ends_all_ranks():
    pids = []

    def stop(rank, stream, line):
        pids.append(int(line))
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(*["echo $$; sleep 60"] * 2, on_line=stop)
    assert len(pids) == 2
    assert all(map(has_ended, pids))


FOREVER = "while True: signal.pause()"


def run_script(script: str, world: int = 3, grace_s: float = 0.1) -> tuple[RankResult, ...]:
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
    results = run_script(f"sys.stdout.write(' '.join(os.environ[name] for name in {names}) + chr(10))")  # in one piece
    assert verdict(results, []) == Ending(code=0)
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 0 3 3 here", "1 1 3 3 here", "2 2 3 3 here"]


def test_one_failure_ends_the_others_which_are_not_asked_to_save() -> None:
    listening = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n{FOREVER}"
    results = run_script(f"if rank == 1: sys.exit(1)\n{listening}")
    assert codes(results) == [-signal.SIGKILL, 1, -signal.SIGKILL]
    assert [result.ended_because for result in results] == ["rank 1 failed", None, "rank 1 failed"]


def test_others_may_finish_within_the_grace() -> None:
    results = run_script("sys.exit(75 if rank else 1)", grace_s=60.0)
    assert codes(results) == [1, 75, 75] and not any(result.ended_because for result in results)


def test_a_rank_that_is_killed_is_named_and_nobody_waits() -> None:
    start = time.monotonic()
    results = run_script(f"if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n{FOREVER}", grace_s=500.0)
    assert time.monotonic() - start < 500
    assert verdict(results, []) == Ending(
        code=1, reason="zeromesh: rank 2 was ended by SIGKILL; the machine may be out of memory", again=True
    )


def fail(rank: int, error: Exception, directory: Path) -> None:
    Failure.now(rank, error, f"Traceback of rank {rank}").write(directory)


def test_the_first_failure_is_reported_not_its_consequences(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    fail(2, ValueError("the cause"), tmp_path / "a")
    fail(0, RuntimeError("connection closed by peer"), tmp_path / "a")
    ending = verdict(ended(1, 0, 1), Failure.read_all(tmp_path / "a"))
    assert ending.reason.startswith("Traceback of rank 2\nzeromesh: rank 2 failed: ValueError: the cause\n")
    assert (ending.code, ending.again) == (1, True)
    fail(1, CommunicationError("all_gather failed"), tmp_path / "b")  # which says it all
    ending = verdict(ended(1, 1), Failure.read_all(tmp_path / "b"))
    assert ending == Ending(code=1, reason="zeromesh: rank 1 failed: all_gather failed", again=True)
    fail(0, NonFiniteError("step 3: the loss is nan"), tmp_path / "c")  # as it would be again
    assert not verdict(ended(1, 1), Failure.read_all(tmp_path / "c")).again


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


def test_wrong_input_on_a_rank_is_the_users_one_message(tmp_path: Path) -> None:
    for rank in range(3):
        fail(rank, ConfigError("data.files matches nothing"), tmp_path)
    with pytest.raises(InputError, match=r"^data.files matches nothing$"):
        verdict(ended(1, 1, 1), Failure.read_all(tmp_path))
    with pytest.raises(InputError, match=r"^ranks 0, 1, 2 failed: data.files matches nothing$"):
        verdict(ended(1, 1, 1, 1), Failure.read_all(tmp_path))


def test_preempted_only_if_nobody_failed() -> None:
    """And where a rank is ended by SIGTERM before it listens, if the run was asked to end."""
    assert verdict(ended(EXIT_PREEMPTED, EXIT_PREEMPTED), []) == Ending(code=EXIT_PREEMPTED)
    ending = verdict(ended(EXIT_PREEMPTED, 3), [])
    assert ending.code == 1 and "left no reason" in ending.reason
    results = ended(EXIT_PREEMPTED, -signal.SIGTERM)
    assert verdict(results, [], preempted=True) == Ending(code=EXIT_PREEMPTED)
    assert verdict(results, []).reason == "zeromesh: rank 1 was ended by SIGTERM; nothing was saved"


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_sigterm_is_handed_on_also_where_it_comes_before_the_ranks(delay_s: float) -> None:
    with noticing(signal.SIGTERM):
        if delay_s:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        assert codes(run_script(FOREVER, 2, grace_s=60.0)) == [-signal.SIGTERM] * 2
        assert asked_by() == signal.SIGTERM
