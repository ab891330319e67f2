"""What probe, selftest and bench refuse, before any process starts; and the overlap that simulate and bench replace."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path

import pytest

from zeromesh.cli.app import main
from zeromesh.cli.measuring import mesh_of


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No torchrun around the tests, and nothing left in the working directory."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["zeromesh", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("probe", "--ranks", "1"), "links need at least 2 ranks"),
        (("probe", "--ranks", "-2"), "--ranks must be at least 1, got -2"),
        (("probe", "--mesh", "4"), "expected sizes by axis name"),
        (("probe", "--mesh", "node=2", "--ranks", "2"), "--mesh or --ranks, not both"),
        (("probe", "--ranks", "2", "--rounds", "3"), "at least 4 rounds, got 3"),
        (("probe", "--lab", "2@fast,2"), "expected a rate"),
        (("selftest", "--steps", "0"), "--steps must be at least 1"),
        (("bench", "--steps", "0"), "at least 1 step"),
        (("bench", "2,2"), "expected sizes by axis name"),
        (("bench", "--overlap", "most"), "--overlap must be one of"),
        (("bench", "--dtype", "fp16"), "dtype must be one of fp32, bf16"),
        (("bench", "--model", "70M"), "unknown model size '70M'; did you mean 7M"),
        (("bench", "--accumulation", "0"), "micro_batches must be at least 1"),
        (("bench", "--strategy", "node=4", "node=2"), "stage"),
        (("bench", "--only", "infiniband"), "nothing is left to run"),
    ],
)
def test_wrong_input_is_one_message(monkeypatch, capsys, arguments, message):
    assert run(monkeypatch, *arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed


def test_ranks_of_a_torchrun_say_it_once(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert run(monkeypatch, "probe", "--mesh", "node=2") == 2
    assert not capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert run(monkeypatch, "probe", "--mesh", "node=2") == 2
    assert "has 2 ranks; 4 are there" in capsys.readouterr().err
    assert run(monkeypatch, "probe", "--ranks", "2") == 2
    assert "torchrun and --lab bring their own" in capsys.readouterr().err
    for arguments in (("probe", "--lab", "2@1gbit,2"), ("bench", "node=2", "--model", "tiny")):
        assert run(monkeypatch, *arguments) == 2
        assert "leave torchrun out" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("look", 0), ("failed", 1)])
def test_a_failed_check_is_an_exit_code(monkeypatch, capsys, tmp_path, status, code):
    from zeromesh.measure import selftest

    environment = {
        "zeromesh": "1",
        "torch": "2",
        "device": "cpu",
        "backend": "gloo",
        "mesh": "node=2",
        "hosts": {"a": 2},
    }
    checks = (
        selftest.Check(name="parity", status="ok", detail="same"),
        selftest.Check(name="links", status=status, detail="slow"),
    )
    result = selftest.Result(environment=environment, checks=checks, seconds=1.0, cluster="", raw={})
    monkeypatch.setattr(selftest, "selftest", lambda *_, **__: result)
    assert run(monkeypatch, "selftest", "--ranks", "2", "-o", "found.json") == code
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["passed"] == (code == 0)
    assert [check["status"] for check in written["checks"]] == ["ok", status]
    assert "links" in capsys.readouterr().out


def test_an_estimate_starts_nothing(monkeypatch, capsys):
    assert run(monkeypatch, "bench", "cluster=2,node=2", "--estimate") == 0
    assert capsys.readouterr().out.startswith("36 of 36 cells to measure, about ")
    assert not Path("zeromesh-bench/setting.json").exists()  # so that steps of another number can follow


def test_a_bench_needs_a_directory(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    assert run(monkeypatch, "bench", "cluster=2,node=2", "--estimate", "-d", str(tmp_path / "file")) == 2
    assert "results need a directory that can be written to" in capsys.readouterr().err


def test_ranks_that_are_started_here_are_one_for_each_device(monkeypatch):
    for devices, ranks in ((8, 8), (1, 6), (0, 6)):
        monkeypatch.setattr("zeromesh.comm.device.visible_devices", lambda devices=devices: devices)
        monkeypatch.setattr("os.cpu_count", lambda: 6)
        assert prod(mesh_of("", 0, None).values()) == ranks


def test_overlap_of_the_ablation(monkeypatch, capsys):
    """AMSP's: the less is hidden, the longer the step; the bytes are the same."""
    setting = ("--model", "gpt2", "--cluster", "a100-8x-100g", "--world", "16", "--seq-len", "512")
    batch = ("--global-batch-tokens", "65536", "--micro-batch", "4", "--strategy", "zero3", "--json")
    found = []
    for overlap in ("none", "gather", "all"):
        assert run(monkeypatch, "simulate", *setting, *batch, "--overlap", overlap) == 0
        found.append(json.loads(capsys.readouterr().out))
    exposed = [one["exposed_comm_s"] for one in found]
    assert exposed[0] > exposed[1] > exposed[2]
    assert [one["step_s"] for one in found] == sorted((one["step_s"] for one in found), reverse=True)
    assert found[0]["axes"] == found[2]["axes"]
    assert run(monkeypatch, "simulate", *setting, *batch, "--overlap", "some") == 2
    assert "--overlap must be one of all, gather, none" in capsys.readouterr().err
