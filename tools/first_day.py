"""Checks within minutes what this machine's GPUs can show, and writes one result file, one page and one log.

    PYTHONPATH=src python3 tools/first_day.py --budget-s 570     # any interpreter with torch and pytest; or: make gpu
    python3 tools/first_day.py --only fake ranks

Parts run in the order of their value. Each part has its own process group, which is ended at the part's limit or when
the budget is spent. Results are written after every part, and the measuring programs write theirs after every row. So a
run that is cut off leaves all results up to then. If torch sees no device, the parts that need none run on the CPU, to
show that they work, and the exit code is 2. Otherwise it is 0 if everything held and 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULT, LOG = "gpu.md", "gpu.json", "gpu.log"
LEAST_S = 10.0
"""A part does not begin with less time left than this."""

GRACE_S = 10.0
"""Seconds between SIGTERM, on which torchrun ends its workers, and SIGKILL."""

NO_DEVICE = 2
"""The exit code if torch sees no device."""

AS_RANK = "--as-rank"
"""The first argument of this script if it runs as a rank of the part `ranks`."""

# Any version of pytest will do, with any plugins. Warnings of another torch are no errors.
PYTEST = (
    "-m pytest -q -ra --maxfail 5 -p no:benchmark -p no:cacheprovider -o minversion=6 -o filterwarnings=default "
    "-o addopts=--import-mode=importlib"
)
TORCHRUN = "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold: its name, the goal, the figure found, and whether the goal is met."""

    what: str
    required: str
    found: str
    held: bool


Judge = Callable[[Mapping[str, Any]], Iterable[Check]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str  # also the name of its result file, NAME.json
    command: str  # after the interpreter; {out} stands for the result file
    judge: Judge | None = None  # checks the result file; None if the exit code says all
    limit_s: float = 120.0  # its process group is ended after this time
    here: bool = True  # whether this machine can run it


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a part ended; `code` is None if it was ended at its limit."""

    name: str
    code: int | None
    seconds: float
    checks: tuple[Check, ...]
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        return self.code == 0 and all(check.held for check in self.checks)


def parts(devices: int, kind: str) -> list[Part]:
    """Returns the parts for a machine, in the order of their value; without a device, only those that a CPU can run."""
    cuda, share = devices > 0 and kind == "cuda", devices < 2
    device = f"-m benchmarks.device --out {{out}} --device {'cuda' if devices else 'cpu'}"
    tiny = "--settings bf16+masters --model tiny --sequences 1 --tokens 16 --pairs 2"
    sizes = "--settings bf16+masters --pairs 6" if devices else tiny
    strategies = "node=3 node[4]=3,node[2]=1 node=0 node=3@int8/int4" if devices else "node=3"
    mesh = f"node={devices}" if not share else "cluster=2,node=2" if devices else "node=2"
    ranks = devices if not share else 4 if devices else 2
    selftest = f"{TORCHRUN} --nproc-per-node {ranks} tools/first_day.py {AS_RANK} {mesh} {{out}}"
    every = [
        # Runs steps on the device, beside plain PyTorch and FSDP2 in one process.
        Part(name="smoke", command=f"{device} {tiny}", judge=judge_state, here=cuda),
        # Runs one rank of eight that sends nothing, beside FSDP2.
        Part(
            name="fake",
            command=f"{device} {sizes} --ranks 8 --peers FSDP2 --strategies {strategies}",
            judge=judge_device if devices else judge_state,
            limit_s=240.0,
            here=cuda or not devices,
        ),
        # Checks numbers, bytes and memory of every stage over the device's own collectives.
        Part(
            name="ranks",
            command=selftest + " share" * share,
            judge=judge_selftest,
            limit_s=150.0 if share else 600.0,
        ),
        Part(
            name="kernels",
            command="-m benchmarks.kernels --mib 256 64 --repeats 10 --out {out}",
            judge=judge_kernels,
            here=cuda,
        ),
        # Keeps a rank's states in the host's memory, then its gradients too, beside FSDP2 with CPUOffloadPolicy.
        Part(
            name="host",
            command=f"{device} --settings bf16+masters --pairs 4 --model 1.3B --sequences 2 --ranks 8 "
            "--peers FSDP2+host --strategies host=1,node=3 host=2,node=3",
            judge=judge_state,
            limit_s=150.0,
            here=cuda,
        ),
        # In the next two parts four ranks share a device. They check the allocator's bytes, then numbers under delays.
        Part(name="memory", command=f"{PYTEST} tests/gpu/test_memory.py", limit_s=600.0, here=cuda),
        Part(
            name="parity",
            command=f"{PYTEST} tests/gpu/test_kernels.py tests/gpu/test_parity.py",
            limit_s=1800.0,
            here=cuda,
        ),
        # Measures one process at length, beside plain PyTorch and FSDP2.
        Part(name="device", command=device, judge=judge_device, limit_s=3600.0, here=cuda),
        # Compares training steps with the simulator's prediction.
        Part(
            name="bench",
            command=f"-m bench {mesh} -o {{out}} --model 60M",
            limit_s=3600.0,
            here=devices > 1,
        ),
    ]
    return [part for part in every if part.here]


def judge_kernels(result: Mapping[str, Any]) -> Iterable[Check]:
    """Checks that the longest tensor of each format, rounding and dtype reaches 85 % of a copy's rate."""
    longest: dict[str, Mapping[str, Any]] = {}
    for row in sorted(result["results"], key=lambda row: int(row["tensor_bytes"])):
        rounding = "stochastic" if row["stochastic"] else "to nearest"
        longest[f"int{row['bits']} of {row['dtype']}, {rounding}"] = row
    for name, row in longest.items():
        slowest, share = min(row["share_of_copy"].items(), key=lambda pair: float(pair[1]))
        yield _within(f"{slowest} of {name}, {row['tensor_bytes']:,} bytes, over a copy's rate", share, least=0.85)


def judge_state(result: Mapping[str, Any]) -> Iterable[Check]:
    """Checks that model state has the predicted bytes exactly."""
    for row in result["peaks"]:
        if "state_predicted_bytes" in row:
            predicted, found = row["state_predicted_bytes"], row["state_allocated_bytes"]
            what = f"bytes of model state, of {predicted:,} predicted, {row['side']}, {row['setting']}"
            yield _within(what, found, least=predicted, most=predicted)


def judge_device(result: Mapping[str, Any]) -> Iterable[Check]:
    """Checks that steps of `node=3` take at most 1 % longer than a peer's, that host time does not exceed FSDP2's, and
    that peaks are within 10 % of the prediction."""
    for row in result["times"]:
        title = f"{row['strategy']} over {row['peer']}, {row['setting']}"
        if row["strategy"] == "node=3":
            yield _within(f"step, {title}", row["ratio"], most=1.01)
        if row["peer"] == "FSDP2":
            yield _within(f"host time, {title}", row["host_ratio"], most=1.0)
    for row in result["peaks"]:
        if "peak_predicted_bytes" in row:
            share = round(row["peak_bytes"] / row["peak_predicted_bytes"], 3)
            yield _within(f"peak over predicted, {row['side']}, {row['setting']}", share, least=0.9, most=1.1)
    yield from judge_state(result)


def judge_selftest(result: Mapping[str, Any]) -> Iterable[Check]:
    for check in result["checks"]:
        status = check["status"]
        yield Check(what=check["name"], required="ok", found=f"{status}: {check['detail']}", held=status != "failed")


def _within(what: str, found: float, *, least: float = -math.inf, most: float = math.inf) -> Check:
    bounds = {"at least": least, "at most": most}
    required = ", ".join(f"{word} {bound:,}" for word, bound in bounds.items() if math.isfinite(bound))
    return Check(what=what, required=required, found=f"{found:,}", held=least <= found <= most)


def run(part: Part, directory: Path, limit_s: float) -> Outcome:
    """Runs a part, adds all its output to the log, and judges the result file that it leaves."""
    begin, file = time.monotonic(), directory / f"{part.name}.json"
    file.unlink(missing_ok=True)  # left by an earlier run
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    around = {
        "PYTHONPATH": paths,
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "ZEROMESH_TEST_WARNINGS": "default",
    }
    with (directory / LOG).open("a") as log:
        print(f"\n==== {part.name}: {part.command}", file=log, flush=True)
        process = subprocess.Popen(
            [sys.executable, *(text.replace("{out}", str(file)) for text in shlex.split(part.command))],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | around,
            start_new_session=True,
        )
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        end_group(process)
    result, checks = judged(part, file)
    seconds = round(time.monotonic() - begin, 1)
    outcome = Outcome(name=part.name, code=code, seconds=seconds, checks=tuple(checks), result=result)
    print(f"{'held' if outcome.held else 'DID NOT HOLD':12} {part.name} ({outcome.seconds:.0f} s)", flush=True)
    return outcome


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends all processes that are left in a part's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judged(part: Part, file: Path) -> tuple[Mapping[str, Any], list[Check]]:
    """Returns the result file and its checks. A file that is missing or malformed gives one failed check."""
    if part.judge is None:
        return {}, []
    try:
        result = json.loads(file.read_text())
        return result, list(part.judge(result))
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        return {}, [Check(what="its result file", required=f"figures in {file.name}", found=found, held=False)]


def page(setting: Mapping[str, Any], outcomes: Sequence[Outcome], not_run: Sequence[str]) -> str:
    failed = [outcome.name for outcome in outcomes if not outcome.held]
    verdict = f"Did not hold: {', '.join(failed)}." if failed else "Everything that ran held."
    where = f"{setting['devices']} x {setting['device']}, torch {setting['torch']}, zeromesh {setting['zeromesh']}"
    lines = ["# zeromesh on these devices", "", f"{verdict} {where}, {setting['at']}."]
    lines += [f"Not run: {', '.join(not_run)}."] * bool(not_run)
    for outcome in outcomes:
        ended = "ended at its limit" if outcome.code is None else f"exit code {outcome.code}"
        lines += ["", f"## {outcome.name}: {'held' if outcome.held else 'did not hold'}", ""]
        lines += [f"{ended} after {outcome.seconds:.0f} s"]
        if outcome.checks:
            lines += ["", "| | check | required | found |", "|---|---|---|---|"]
        for check in outcome.checks:
            cells = "ok" if check.held else "**no**", check.what, check.required, check.found
            lines.append(f"| {' | '.join(' '.join(cell.replace('|', chr(92) + '|').split()) for cell in cells)} |")
    return "\n".join([*lines, "", f"Send back `{RESULT}`, which has all figures, and `{LOG}`.", ""])


def run_rank(mesh: str, output: str, *share: str) -> int:
    """Runs `zeromesh selftest` as one of torchrun's ranks, without the packages of the command line."""
    if share:
        os.environ["ZEROMESH_SHARE_DEVICES"] = "1"
    from zeromesh.measure.launch import parse_mesh
    from zeromesh.measure.selftest import selftest

    result = selftest(parse_mesh(mesh), Path(output))
    return 0 if result is None or result.passed else 1


def setting_of() -> dict[str, Any]:
    import torch

    from zeromesh.launch.device import CPU, device_name, visible_devices
    from zeromesh.measure.setting import read_setting

    devices = visible_devices()
    kind = torch.accelerator.current_accelerator() if devices else None
    return {
        **read_setting(),
        "host": platform.node(),
        "devices": devices,
        "device_type": kind.type if kind else "cpu",
        "device": device_name(torch.device(kind.type, 0) if kind else CPU),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="the directory of the results")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="for all parts together")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument("--skip", nargs="+", default=[], metavar="PART")
    args = parser.parse_args(arguments)
    end = time.monotonic() + args.budget_s
    setting = setting_of()
    every = {part.name: part for part in parts(setting["devices"], setting["device_type"])}
    unknown = {*args.only, *args.skip} - every.keys()
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}; here there are {', '.join(every)}")
    directory: Path = args.out.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / LOG).write_text("")
    outcomes: list[Outcome] = []
    not_run = list(every)
    for name in [name for name in every if name not in args.skip and (name in args.only or not args.only)]:
        left_s = end - time.monotonic()
        if left_s < LEAST_S:
            break
        outcomes.append(run(every[name], directory, min(every[name].limit_s, left_s)))
        not_run.remove(name)
        held = all(outcome.held for outcome in outcomes)
        result = {"setting": setting, "held": held, "not_run": not_run, "parts": [*map(asdict, outcomes)]}
        (directory / RESULT).write_text(json.dumps(result, indent=1) + "\n")
        (directory / PAGE).write_text(page(setting, outcomes, not_run))
    print(f"all figures: {directory / RESULT}; the checks: {directory / PAGE}; all output: {directory / LOG}")
    if not setting["devices"]:
        print("torch sees no device here: these were the parts that a CPU can run")
        return NO_DEVICE
    return 0 if all(outcome.held for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(run_rank(*sys.argv[2:]) if sys.argv[1:2] == [AS_RANK] else main())
