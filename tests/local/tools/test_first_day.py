"""`tools/first_day.py`: its parts' processes, limits and results, on programs that stand for them, and on a CPU."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import run_python
from tools import first_day
from tools.first_day import Check, Part, judge_device, judge_kernels, judge_selftest, main, page, run

ROOT = Path(__file__).parents[3]
SETTING = {"devices": 8, "device": "Fast [one]", "torch": "2.13", "zeromesh": "0.1", "at": "now", "device_type": "cuda"}


def part(code: str, *, name: str = "part", judge: Any = None, limit_s: float = 60.0) -> Part:
    return Part(name=name, command=f"-c {shlex.quote(code)} {{out}}", judge=judge, limit_s=limit_s)


def writing(result: object) -> str:
    return f"import pathlib, sys; pathlib.Path(sys.argv[1]).write_text({json.dumps(result)!r}); print('done so')"


def below_ten(result: Any) -> list[Check]:
    return [Check(what="n | m", required="below 10", found=str(result["n"]), held=result["n"] < 10)]


@pytest.mark.parametrize(("n", "held"), [(9, True), (10, False)])
def test_a_part_is_judged_by_the_file_that_it_leaves(tmp_path: Path, n: int, held: bool) -> None:
    outcome = run(part(writing({"n": n}), judge=below_ten), tmp_path, 60.0)
    assert outcome.held == held and outcome.code == 0 and outcome.result == {"n": n}
    assert (tmp_path / "gpu.log").read_text().endswith("done so\n")
    text = page(SETTING, [outcome], ["bench"])
    assert ("Everything that ran held" in text) == held and ("**no**" in text) == (not held)
    assert "8 x Fast [one], torch 2.13" in text and "n \\| m" in text and "Not run: bench." in text


@pytest.mark.parametrize(
    ("broken", "code", "found"),
    [
        (part("import sys; print('no such card'); sys.exit(3)"), 3, None),
        (part("print('all well')", judge=below_ten), 0, "FileNotFoundError"),
        (part(writing({"m": 1}), judge=below_ten), 0, "KeyError: 'n'"),
    ],
    ids=["failed", "without a result", "a result of another form"],
)
def test_a_part_that_breaks_holds_nothing(tmp_path: Path, broken: Part, code: int, found: str | None) -> None:
    (tmp_path / "part.json").write_text('{"n": 1}')  # of an earlier run
    outcome = run(broken, tmp_path, 60.0)
    assert not outcome.held and outcome.code == code and "Did not hold: part." in page(SETTING, [outcome], [])
    assert [check.found.startswith(found) for check in outcome.checks] == [True] * bool(found)


def test_at_its_limit_all_of_a_part_ends_and_what_it_left_is_kept(tmp_path: Path) -> None:
    started = "import os, subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); "
    outcome = run(part(started + writing({"n": 1}) + "; os.wait()", judge=below_ten), tmp_path, 5.0)
    assert outcome.code is None and not outcome.held and outcome.result == {"n": 1}
    child = int((tmp_path / "gpu.log").read_text().splitlines()[-2])
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_goals_of_a_device() -> None:
    row = {"strategy": "node=3", "peer": "FSDP2", "setting": "bf16", "ratio": 1.02, "host_ratio": 0.5}
    peak = {"side": "node=3", "setting": "bf16", "peak_bytes": 100, "peak_predicted_bytes": 120}
    state = {"state_predicted_bytes": 1000, "state_allocated_bytes": 1000}
    checks = list(judge_device({"times": [row], "peaks": [{"side": "FSDP2", "setting": "bf16"}, peak | state]}))
    what = ["step", "host time", "peak over predicted", "bytes of model state"]
    assert [check.what.split(",")[0] for check in checks] == what
    assert [check.held for check in checks] == [False, True, False, True]
    others = [row | {"ratio": 1.0, "host_ratio": 1.1}, row | {"strategy": "node=0", "peer": "plain", "ratio": 2.0}]
    state["state_allocated_bytes"] = 1008
    checks = list(judge_device({"times": others, "peaks": [peak | {"peak_bytes": 121} | state]}))
    assert [check.held for check in checks] == [True, False, True, False]
    found = [{"name": name, "status": name, "detail": "-"} for name in ("failed", "look")]
    assert [check.held for check in judge_selftest({"checks": found})] == [False, True]
    # Kernels are judged by their longest tensor, each way to round by itself.
    form = {"bits": 8, "dtype": "fp32"}
    rows = [
        form | {"stochastic": stochastic, "tensor_bytes": size, "share_of_copy": {"quantise": share, "reduce": 0.99}}
        for stochastic, size, share in ((False, 2, 0.8), (True, 2, 0.95), (False, 1, 0.9))
    ]
    nearest, stochastic = judge_kernels({"results": rows})
    assert nearest.what.startswith("quantise of int8 of fp32, to nearest, 2 bytes") and nearest.found == "0.8"
    assert not nearest.held and stochastic.held and stochastic.found == "0.95"


def test_parts_within_the_budget_end_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = part("print('fine')", name="good"), part("raise SystemExit(1)", name="bad")
    slow = part("import time; time.sleep(60)", name="slow")
    monkeypatch.setattr(first_day, "setting_of", lambda: SETTING)
    monkeypatch.setattr(first_day, "parts", lambda *_: [good, bad, slow])
    monkeypatch.setattr(first_day, "LEAST_S", 1.0)

    def ran(*arguments: str) -> tuple[int, list[tuple[str, int | None]], list[str]]:
        code = main(["--out", str(tmp_path), *arguments])
        result = json.loads((tmp_path / "gpu.json").read_text())
        assert result["held"] == (code == 0) and (tmp_path / "gpu.md").exists()
        return code, [(each["name"], each["code"]) for each in result["parts"]], result["not_run"]

    assert ran("--only", "good") == (0, [("good", 0)], ["bad", "slow"])
    assert ran("--skip", "slow") == (1, [("good", 0), ("bad", 1)], ["slow"])
    assert ran("--skip", "bad", "--budget-s", "6") == (1, [("good", 0), ("slow", None)], ["bad"])
    with pytest.raises(SystemExit):
        main(["--only", "god"])


BARE = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "tools", "zeromesh")]:
    del sys.modules[name]  # this process is a fork of one that may have imported them with what is lacking here
import zeromesh.measure.selftest
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_runs_on_the_cpu_and_says_so(tmp_path: Path) -> None:
    """As on a bare machine, which has torch, numpy and jinja2. One of the two parts; the other is the self-test, which
    has tests of its own."""
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    for name in ("pydantic", "typer", "rich"):
        (lacking / f"{name}.py").write_text("raise ModuleNotFoundError(__name__)\n")
    around = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(lacking)])}
    words = ("-c", BARE, ROOT / "tools/first_day.py", "--out", tmp_path, "--only", "fake")
    done = run_python(*words, env=around, cwd=tmp_path)
    assert done.returncode == 2, done
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["held"] and result["not_run"] == ["ranks"], (tmp_path / "gpu.log").read_text()
    (row,) = result["parts"][0]["result"]["times"]
    assert row["strategy"] == "node=3" and row["host_ratio"] > 0
