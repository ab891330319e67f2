"""The first day on GPUs: everything that can be learnt on this machine's devices, in one result file and one page.

    python tools/first_day.py --out runs/gpu          # or: make gpu

Each part is a process of its own with a time limit; one that fails does not keep the others from running. What must
hold is judged from what they write, and the page says what did, what did not, and what to send back. Where torch sees
no device it says so in one line and exits with 2; else with 0 if all has held and 1 if not.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULT = "gpu.md", "gpu.json"
MOST_LINES = 40
"""Of the end of a failed part's output that the result file keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold.

    Args:
        what: for a person.
        required, found: what was to be, and what was.
        held: whether it did.
    """

    what: str
    required: str
    found: str
    held: bool


Judge = Callable[[Mapping[str, Any]], list[Check]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process.

    Args:
        name: of its files.
        what: it shows.
        command: after the interpreter.
        judge: of the JSON that it leaves.
        file: that JSON, in the directory of the results; empty where it leaves none.
        limit_s: after which it is ended.
        devices: how many it needs.
        of_cuda: whether it is written for CUDA, which ROCm's torch is too.
    """

    name: str
    what: str
    command: tuple[str, ...]
    judge: Judge
    file: str = ""
    limit_s: float = 1800.0
    devices: int = 1
    of_cuda: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a part; without a code it was ended at its limit."""

    name: str
    what: str
    command: str
    code: int | None
    seconds: float
    checks: tuple[Check, ...]
    output: tuple[str, ...] = ()
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        return self.code == 0 and all(check.held for check in self.checks)


def parts(directory: Path, devices: int, kind: str = "cuda") -> list[Part]:
    """All that this many devices of this kind can show."""

    def bench(name: str) -> tuple[str, ...]:
        return (f"benchmarks/{name}.py", "--out", str(directory / f"{name}.json"))

    topology = f"node={devices}"
    return [
        part
        for part in (
            Part(
                name="tests",
                what="The engine on a device, four ranks sharing it over gloo: parity, memory, kernels",
                command=("-m", "pytest", "tests/gpu", "-q", "-ra"),
                judge=lambda result: [],
                of_cuda=True,
            ),
            Part(
                name="kernels",
                what="Quantised messages: bytes a second beside a copy",
                command=bench("kernels"),
                judge=judge_kernels,
                file="kernels.json",
                of_cuda=True,
            ),
            Part(
                name="device",
                what="One process against plain PyTorch and FSDP2: step time and memory",
                command=bench("device"),
                judge=judge_device,
                file="device.json",
                of_cuda=True,
                limit_s=3600.0,
            ),
            Part(
                name="selftest",
                what=f"{devices} ranks: numbers, bytes, memory, links and predicted times",
                command=(
                    "-m",
                    "zeromesh.cli",
                    "selftest",
                    "--ranks",
                    str(devices),
                    "-o",
                    str(directory / "selftest.json"),
                ),
                judge=judge_selftest,
                file="selftest.json",
                devices=1,
            ),
            Part(
                name="bench",
                what=f"Training steps over {devices} devices beside what the simulator predicts",
                command=("-m", "zeromesh.cli", "bench", topology, "-d", str(directory / "bench"), "--model", "60M"),
                judge=lambda result: [],
                file="bench/result.json",
                limit_s=3600.0,
                devices=2,
            ),
        )
        if devices >= part.devices and (kind == "cuda" or not part.of_cuda)
    ]


def judge_kernels(result: Mapping[str, Any]) -> list[Check]:
    """At least 85 % of a copy's rate, of the longest tensor of each format and dtype."""
    longest: dict[str, Mapping[str, Any]] = {}
    for row in sorted(result["results"], key=lambda row: int(row["tensor_bytes"])):
        longest[f"int{row['bits']} of {row['dtype']}"] = row
    checks = []
    for name, row in longest.items():
        slowest, share = min(row["share_of_copy"].items(), key=lambda pair: float(pair[1]))
        checks.append(
            Check(
                what=f"kernels of {name}, {row['tensor_bytes']:,} bytes",
                required="at least 0.85 of a copy's rate",
                found=f"{share:.2f}, {slowest}",
                held=share >= 0.85,
            )
        )
    return checks


def judge_device(result: Mapping[str, Any]) -> list[Check]:
    """Steps at most 1 % longer than plain PyTorch's; model state as predicted, to the byte."""
    checks = [
        Check(
            what=f"step against {row['peer']}, {row['setting']}",
            required="at most 1.01 of its time",
            found=f"{row['ratio']:.3f}",
            held=row["ratio"] <= 1.01,
        )
        for row in result["times"]
    ]
    for row in result["peaks"]:
        if "state_predicted_bytes" in row:
            predicted, allocated = row["state_predicted_bytes"], row["state_allocated_bytes"]
            checks.append(
                Check(
                    what=f"bytes of model state, {row['setting']}",
                    required=f"{predicted:,}, as predicted",
                    found=f"{allocated:,}",
                    held=predicted == allocated,
                )
            )
    return checks


def judge_selftest(result: Mapping[str, Any]) -> list[Check]:
    """Its own checks."""
    return [
        Check(
            what=check["name"],
            required="ok",
            found=f"{check['status']}: {check['detail']}",
            held=check["status"] != "failed",
        )
        for check in result["checks"]
    ]


def run(part: Part, directory: Path) -> Outcome:
    """Runs it, leaves all that it says in NAME.log, and judges what it leaves."""
    begin, log = time.monotonic(), directory / f"{part.name}.log"
    with log.open("w") as output:
        try:
            code: int | None = subprocess.run(
                [sys.executable, *part.command],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                timeout=part.limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    result, checks = judged(part, directory)
    outcome = Outcome(
        name=part.name,
        what=part.what,
        command=" ".join(part.command),
        code=code,
        seconds=round(time.monotonic() - begin, 1),
        checks=tuple(checks),
        result=result,
        output=tuple(log.read_text(errors="replace").splitlines()[-MOST_LINES:]),
    )
    print(f"{'held' if outcome.held else 'DID NOT HOLD':12} {part.name} ({outcome.seconds:.0f} s)", flush=True)
    return outcome


def judged(part: Part, directory: Path) -> tuple[Mapping[str, Any], list[Check]]:
    """What the part has left, and what that says; nothing it left is a check that failed, and so is what is not as this
    knows it."""
    if not part.file:
        return {}, []
    path = directory / part.file
    try:
        result = json.loads(path.read_text())
        return result, part.judge(result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        return {}, [Check(what="its result file", required=f"figures in {part.file}", found=found, held=False)]


def page(setting: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The page, in Markdown."""
    failed = [outcome.name for outcome in outcomes if not outcome.held]
    verdict = f"Did not hold: {', '.join(failed)}." if failed else "Everything held."
    lines = ["# zeromesh on these devices", "", f"{verdict} {where(setting)}", ""]
    for outcome in outcomes:
        ended = "ran out of time" if outcome.code is None else f"exit code {outcome.code}"
        lines += [f"## {outcome.name}: {'held' if outcome.held else 'did not hold'}", "", f"{outcome.what}.", ""]
        lines += [f"`{outcome.command}`: {ended} after {outcome.seconds:.0f} s.", ""]
        if outcome.checks:
            lines += ["| | check | required | found |", "|---|---|---|---|"]
            lines += [
                f"| {'ok' if c.held else '**no**'} | {_cell(c.what)} | {_cell(c.required)} | {_cell(c.found)} |"
                for c in outcome.checks
            ]
            lines.append("")
        if not outcome.held:
            lines += ["```", *outcome.output, "```", ""]
    lines += [f"Send back `{RESULT}`, which has all figures, with the `.log` of what did not hold.", ""]
    return "\n".join(lines)


def where(setting: Mapping[str, Any]) -> str:
    """For a person."""
    return (
        f"{setting['devices']} x {setting['device']}, torch {setting['torch']}, zeromesh {setting['zeromesh']}, "
        f"{setting['at']}."
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def setting_of(devices: int) -> dict[str, Any]:
    """Versions and devices."""
    import torch

    from zeromesh.launch.device import device_name
    from zeromesh.measure.setting import read_setting

    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return {
        **read_setting(),
        "host": platform.node(),
        "devices": devices,
        "device_type": kind.type,
        "device": device_name(torch.device(kind.type, 0)),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="the directory of the results")
    args = parser.parse_args(arguments)
    from zeromesh.launch.device import visible_devices

    devices = visible_devices()
    if not devices:
        print("make gpu: torch sees no device here, so nothing was run; `make test` needs none")
        return 2
    directory: Path = args.out.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    setting = setting_of(devices)
    outcomes = [run(part, directory) for part in parts(directory, devices, setting["device_type"])]
    result = {"setting": setting, "held": all(outcome.held for outcome in outcomes), "parts": [*map(asdict, outcomes)]}
    (directory / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    (directory / PAGE).write_text(page(setting, outcomes))
    print(f"all figures: {directory / RESULT}; what held: {directory / PAGE}")
    return 0 if result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
