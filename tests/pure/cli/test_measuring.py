"""Input that probe, selftest and bench refuse before any process starts; and the overlap that simulate replaces."""

from __future__ import annotations

from typing import Any

import pytest

from bench.__main__ import app as bench_app
from tests.pure.measure.probed import raw
from zeromesh.cli.app import run as run_command
from zeromesh.cli.measuring import mesh_of
from zeromesh.cluster.read import parse_cluster


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No torchrun around the tests, and nothing left in the working directory."""
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_SIZE"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def bench(zeromesh):
    return lambda *arguments: zeromesh(*arguments, main=lambda: run_command(bench_app))


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("zeromesh", "probe --ranks -2", "--ranks must be at least 1, got -2"),
        ("zeromesh", "probe --mesh 4", "expected sizes by axis name"),
        ("zeromesh", "probe --mesh node=2 --ranks 2", "--mesh or --ranks, not both"),
        ("zeromesh", "probe --ranks 2 --rounds 3", "at least 4 rounds, got 3"),
        ("zeromesh", "probe --ranks 2 --model llama-7b --kernels liger", "must be one of eager, compiled"),
        ("zeromesh", "probe --ranks 2 --kernels compiled", "--kernels compiled is measured at the shapes of a model"),
        ("zeromesh", "selftest --steps 0", "--steps must be at least 1"),
        ("bench", "--steps 0", "at least 1 step"),
        ("bench", "2,2", "expected sizes by axis name"),
        ("bench", "--dtype fp16", "dtype must be one of fp32, bf16"),
        ("bench", "--model 70M", "unknown model size '70M'; did you mean 7M"),
        ("bench", "--accumulation 0", "micro_batches must be at least 1"),
        ("bench", "--strategy node=4 node=2", "stage"),
        ("bench", "node=2 --output nowhere/bench.json", "nowhere is no folder"),
    ],
)
def test_wrong_input_is_one_message(request, command, arguments, message):
    code, _, error = request.getfixturevalue(command)(*arguments.split())
    assert code == 2
    assert message in error.replace("\n", "")


def test_ranks_of_a_torchrun_say_it_once(monkeypatch, zeromesh, bench):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    code, _, error = zeromesh("probe", "--mesh", "node=2")
    assert code == 2 and not error
    monkeypatch.setenv("RANK", "0")
    for command, arguments, message in (
        (zeromesh, "probe --mesh node=2", "has 2 ranks; 4 are there"),
        (zeromesh, "probe --ranks 2", "torchrun brings its own"),
        (bench, "node=2 --model tiny", "leave torchrun out"),
    ):
        code, _, error = command(*arguments.split())
        assert code == 2 and message in error


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("look", 0), ("failed", 1)])
def test_a_failed_check_is_an_exit_code(monkeypatch, zeromesh, tmp_path, status, code):
    from zeromesh.measure import selftest

    environment: dict[str, Any] = {"zeromesh": "1", "torch": "2", "device": "cpu", "backend": "gloo", "mesh": "node=2"}
    found = (("parity", "ok", "same"), ("links", status, "slow"))
    checks = tuple(selftest.Check(name=name, status=status, detail=detail) for name, status, detail in found)
    environment |= {"hosts": {"a": 2}}
    result = selftest.Result(environment=environment, checks=checks, seconds=1.0, cluster="", raw={})
    monkeypatch.setattr(selftest, "selftest", lambda *_, **__: result)
    ended, printed, _ = zeromesh("selftest", "--ranks", "2", "-o", "found.json")
    assert ended == code
    assert "links" in printed and str(tmp_path / "found.json") in printed.replace("\n", "")


@pytest.mark.parametrize(("loaded", "spread"), [(3.0, 1.0), (1.0, 3.0)])
def test_a_probe_that_cannot_be_trusted_is_shown_and_refused(monkeypatch, zeromesh, tmp_path, loaded, spread):
    from zeromesh.measure import probe

    monkeypatch.setattr(probe, "on_all_ranks", lambda *_, **__: raw(loaded=loaded, spread=spread))
    arguments = ("probe", "--mesh", "cluster=2,node=2", "-o", "here.toml")
    code, out, error = zeromesh(*arguments)
    assert code == 2
    assert "all_gather" in out and not (tmp_path / "here.toml").exists()
    assert "all_gather over node (2 ranks): the first and the second half" in error
    assert zeromesh(*arguments, "--accept-noise")[0] == 0
    assert (tmp_path / "here.toml").exists()
    code, _, error = zeromesh(*arguments[:-1], "nowhere/here.toml", "--accept-noise")
    assert code == 2 and "nowhere is no folder" in error.replace("\n", "")


def test_the_kernels_that_a_probe_measures_are_in_its_answer_and_file(monkeypatch, zeromesh, tmp_path):
    from zeromesh.measure import probe

    monkeypatch.setattr(probe, "on_all_ranks", lambda task, options, mesh: raw() | {"works": options["works"]})
    arguments = "probe --mesh cluster=2,node=2 --model llama-7b --kernels compiled -o here.toml"
    code, printed, _ = zeromesh(*arguments.split())
    said = "llama-7b with compiled kernels, 1 sequences of 2048 tokens"
    assert code == 0 and said in printed.replace("\n", " ")
    assert said in (tmp_path / "here.toml").read_text()


def test_levels_that_ranks_find_are_written_with_their_sources(monkeypatch, zeromesh, tmp_path):
    from zeromesh.measure import probe

    found = {
        "mesh": {"cluster": 2, "node": 2},
        "sources": {"node": "hosts of the ranks", "cluster": "all ranks"},
        "missing": ["SLURM names no switches above the hosts"],
    }
    asked = []

    def measured(task, options, mesh):
        asked.append((task, options["find"], mesh))
        return raw() | {"found": found}

    monkeypatch.setattr(probe, "on_all_ranks", measured)
    code, printed, _ = zeromesh("probe", "--ranks", "4", "-o", "here.toml")
    assert code == 0
    assert asked == [("zeromesh.measure.probe:measure", True, {"node": 4})]
    assert "node: hosts of the ranks" in printed and "not found: SLURM names no switches" in printed
    text = (tmp_path / "here.toml").read_text()
    assert text.startswith("# not found: SLURM names no switches")
    cluster = parse_cluster(text)
    assert cluster.axes == (("node", 2), ("cluster", 2))
    assert dict(cluster.sources)["level.node.size"] == "hosts of the ranks"


@pytest.mark.parametrize(
    ("count", "rank"), [("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")]
)
def test_processes_that_do_not_know_of_each_other_start_nothing(monkeypatch, zeromesh, tmp_path, count, rank):
    """`srun -n 8 zeromesh selftest` would be eight tests of one machine each."""
    for arguments in ("selftest", "selftest --mesh node=8", "probe"):
        monkeypatch.setenv(count, "8")
        code, _, error = zeromesh(*arguments.split())
        assert code == 2 and f"set RANK=${rank} WORLD_SIZE=${count}" in error.replace("\n", " ")
        assert not any(tmp_path.iterdir())
        monkeypatch.setenv(count, "1")
        assert mesh_of("node=8", 0) == {"node": 8}
