"""Shared parts of the benchmarks: ranks on this machine, systems that take turns, result files.

They run from the checkout: `make bench-NAME`, or `python -m benchmarks.NAME`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lab import Lab
from zeromesh.files.users import write_whole
from zeromesh.measure.launch import on_all_ranks
from zeromesh.measure.setting import read_setting

ROOT = Path(__file__).resolve().parent.parent


def parser(description: str | None) -> argparse.ArgumentParser:
    """Makes a parser with the option that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("-o", "--out", type=Path, help="the result file")
    return made


def save(out: Path | None, **found: Any) -> None:
    """Prints the results. With a file, also writes them there, with the setting."""
    text = json.dumps({"setting": read_setting()} | found, indent=1, default=str)
    print(text, flush=True)
    if out:
        write_whole(out, text + "\n")


def held(out: Path | None, kind: str) -> list[dict[str, Any]]:
    """Returns the rows that a result file has so far."""
    return json.loads(out.read_text())[kind] if out and out.exists() else []


def add(
    out: Path | None,
    kind: str,
    row: dict[str, Any],
    same: Sequence[str],
    about: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda rows: {},
) -> list[dict[str, Any]]:
    """Adds a row to the result file, with the time and the load of its measurement. Returns all rows.

    Args:
        kind: the rows' key in the file.
        same: names of values; the row replaces rows with the same values.
        about: further entries of the file.
    """
    here = read_setting()
    row = row | {name: here.pop(name) for name in ("at", "load_average")}
    rows = [*(each for each in held(out, kind) if any(each.get(name) != row[name] for name in same)), row]
    if out:
        write_whole(out, json.dumps({"setting": here, **about(rows), kind: rows}, indent=1) + "\n")
    return rows


def on_ranks(task: str, mesh: Mapping[str, int], *, tree: str = "", **options: Any) -> Any:
    """Runs a task on gloo ranks of this machine, with one thread each.

    Args:
        task: "benchmarks.NAME:function", which gets `zeromesh.launch.ranks.Ranks` and the options. Options and result
            are JSON values; the result is the first rank's.
        mesh: sizes by axis, outermost first.
        tree: an emulated cluster, as for `make lab`, which needs root; "": loopback.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if not tree:
        return on_all_ranks(task, options, mesh)
    with Lab(tree) as lab:
        return on_all_ranks(task, options, mesh, start=partial(lab.run, timeout_s=7200))


def in_lab(lab: Lab, module: str, *arguments: object, told: Callable[[str], None]) -> None:
    """Runs a benchmark on all ranks of an emulated cluster; `told` is called with the first rank's lines."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    lab.run(
        command,
        check=True,
        timeout_s=3600,
        on_line=lambda rank, stream, line: told(line) if rank == 0 and stream == "stdout" else None,
    )


def itself(module: str, *arguments: object) -> Any:
    """Runs a benchmark in another process, and returns the JSON that it prints last."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def in_turns(systems: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Returns the seconds of each system, round by round. Every other round takes the systems in reverse order."""
    found: dict[str, list[float]] = {name: [] for name in systems}
    for index in range(rounds + warm_up):
        for name in [*systems][:: -1 if index % 2 else 1]:
            seconds = systems[name]()
            if index >= warm_up:
                found[name].append(seconds)
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Returns ours over theirs: the ratio of the medians, and the quartiles of single rounds' ratios."""
    quartiles = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    own, other = statistics.median(ours), statistics.median(theirs)
    return {
        "ratio": round(own / other, 4),
        "ratio_quartiles": [round(quartile, 4) for quartile in quartiles],
        "ours_s": round(own, 6),
        "peer_s": round(other, 6),
        "pairs": len(ours),
    }
