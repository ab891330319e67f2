"""`make gpu`: what becomes of its parts' results, on processes that stand for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import first_day
from tools.first_day import Check, Part, judge_device, judge_kernels, judge_selftest, judged, main, page, parts, run

ROOT = Path(__file__).parents[3]
SETTING = {"devices": 8, "device": "Fast [one]", "torch": "2.13", "zeromesh": "0.1", "at": "now"}


def part(code: str, *, judge: Any = lambda result: [], file: str = "", limit_s: float = 60.0) -> Part:
    return Part(name="part", what="Something", command=("-c", code), judge=judge, file=file, limit_s=limit_s)


def writing(path: Path, result: object) -> str:
    return f"import pathlib; pathlib.Path({str(path)!r}).write_text({json.dumps(result)!r}); print('done so')"


def below_ten(result: Any) -> list[Check]:
    return [Check(what="n | m", required="below 10", found=str(result["n"]), held=result["n"] < 10)]


@pytest.mark.parametrize(("n", "held"), [(9, True), (10, False)])
def test_a_part_is_judged_by_what_it_leaves(tmp_path: Path, n: int, held: bool) -> None:
    outcome = run(part(writing(tmp_path / "f.json", {"n": n}), judge=below_ten, file="f.json"), tmp_path)
    assert outcome.held == held and outcome.code == 0 and outcome.result == {"n": n}
    assert (tmp_path / "part.log").read_text() == "done so\n"
    text = page(SETTING, [outcome])
    assert ("Everything held" in text) == held and ("**no**" in text) == (not held)
    assert "8 x Fast [one], torch 2.13" in text and "n \\| m" in text
    assert ("```\ndone so\n```" in text) == (not held), "of what did not hold, the end of what it said"


@pytest.mark.parametrize(
    ("broken", "code", "said"),
    [
        (part("import sys; print('no such card'); sys.exit(3)"), 3, "no such card"),
        (part("print('begun', flush=True); import time; time.sleep(60)", limit_s=2.0), None, "begun"),
        (part("print('all well')", judge=below_ten, file="f.json"), 0, "all well"),
    ],
    ids=["failed", "out of time", "without a result"],
)
def test_a_part_that_breaks_is_told_and_holds_nothing(
    tmp_path: Path, broken: Part, code: int | None, said: str
) -> None:
    outcome = run(broken, tmp_path)
    assert not outcome.held and outcome.code == code and outcome.output == (said,)
    text = page(SETTING, [outcome])
    assert "Did not hold: part." in text and said in text
    assert ("ran out of time" in text) == (code is None)


def test_a_result_of_another_form_is_not_taken_for_a_good_one(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"m": 1}')
    _, (check,) = judged(part("", judge=below_ten, file="f.json"), tmp_path)
    assert not check.held and "KeyError: 'n'" in check.found


def test_what_the_measuring_programs_write_is_understood(tmp_path: Path) -> None:
    """Their own files, made on the processor, where kernels are torch's and no goal holds."""
    out = tmp_path / "kernels.json"
    command = ["benchmarks/kernels.py", "--device", "cpu", "--mib", "1", "--repeats", "1", "--out", str(out)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    checks = judge_kernels(json.loads(out.read_text()))
    assert len(checks) == 4 and {check.required for check in checks} == {"at least 0.85 of a copy's rate"}
    assert "int8 of fp32" in checks[0].what


def test_goals_of_a_device() -> None:
    row = {"peer": "plain", "setting": "bf16", "ratio": 1.02}
    state = {"side": "zeromesh", "setting": "bf16", "state_predicted_bytes": 1000, "state_allocated_bytes": 1000}
    slow, bytes_ = judge_device({"times": [row], "peaks": [{"side": "plain", "setting": "bf16"}, state]})
    assert not slow.held and slow.found == "1.020" and bytes_.held and bytes_.found == "1,000"
    fast, other = judge_device({"times": [row | {"ratio": 1.0}], "peaks": [state | {"state_allocated_bytes": 1008}]})
    assert fast.held and not other.held
    found = [
        {"name": "parity", "status": "failed", "detail": "off"},
        {"name": "links", "status": "warning", "detail": "-"},
    ]
    assert [check.held for check in judge_selftest({"checks": found})] == [False, True]


def test_parts_fit_the_machine(tmp_path: Path) -> None:
    assert [each.name for each in parts(tmp_path, 1)] == ["tests", "kernels", "device", "selftest"]
    several = parts(tmp_path, 8)
    assert [each.name for each in several][-2:] == ["selftest", "bench"] and "node=8" in several[-1].command
    assert [each.name for each in parts(tmp_path, 8, "xpu")] == ["selftest", "bench"]
    for each in several:
        assert each.command[0] in ("-m",) or (ROOT / each.command[0]).exists()


def test_without_a_device_it_says_so_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().out.count("\n") == 1 and not (tmp_path / "out").exists()


def test_all_parts_end_in_one_file_and_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = part("print('fine')"), part("raise SystemExit(1)")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(first_day, "setting_of", lambda devices: SETTING | {"device_type": "cuda"})
    for chosen, code in (([good], 0), ([good, bad], 1)):
        monkeypatch.setattr(first_day, "parts", lambda *_, chosen=chosen: chosen)
        assert main(["--out", str(tmp_path)]) == code
        result = json.loads((tmp_path / "gpu.json").read_text())
        assert result["held"] == (code == 0) and len(result["parts"]) == len(chosen)
        assert (tmp_path / "gpu.md").read_text().startswith("# zeromesh on these devices")
