"""How ranks are started, watched and ended; with a shell as the rank and no namespaces."""

import os
import select
import shutil
import signal
import time

import pytest

from zeromesh.errors import RanksFailedError
from zeromesh.launch.processes import Launch, describe_failure, raise_failed, run_ranks

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


def test_more_output_than_a_pipe_holds_on_both_streams():
    (result,) = run("head -c 1000000 /dev/zero | tr '\\0' x; head -c 1000000 /dev/zero | tr '\\0' y >&2")
    assert (len(result.stdout), len(result.stderr)) == (1_000_000, 1_000_000)


def test_lines_are_seen_as_they_come():
    seen = []
    run("echo one; echo two >&2; printf three", on_line=lambda *line: seen.append(line))
    assert sorted(seen) == [(0, "stderr", "two"), (0, "stdout", "one"), (0, "stdout", "three")]


def test_a_failure_ends_the_others_and_is_named_as_the_cause():
    results = run("sleep 60", "echo 'the reason' >&2; exit 3", "sleep 60")
    assert [r.ended_because for r in results] == ["rank 1 failed", None, "rank 1 failed"]
    assert results[1].returncode == 3
    assert all(r.wall_s < 60 for r in results)
    with pytest.raises(RanksFailedError, match=r"3 of 3 .* rank 1 exited with 3; .*\nrank 1:\nthe reason"):
        raise_failed(results)


def test_the_others_run_on_where_that_is_asked_for():
    results = run("exit 3", "sleep 60", stop_on_failure=False, timeout_s=0.5)
    assert [r.ended_because for r in results] == [None, "it ran past the timeout of 0.5 s"]


def test_a_timeout_may_be_longer_than_one_wait():
    (result,) = run("exit 0", timeout_s=1e7)
    assert result.ended_because is None


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


def test_a_signal_is_named():
    (result,) = run("kill -9 $$")
    assert describe_failure([result]) == "1 of 1 ranks failed: rank 0 died of SIGKILL\nrank 0:\n(it printed nothing)"
