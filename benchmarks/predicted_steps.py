"""Steps of one process, predicted from what a probe measures of their shapes, and measured: make bench-predicted_steps.

Rounds take the probe and the steps of every setting in turn, so that a slow minute of the machine hits both. Three
rounds take about two minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from bench.rows import planned_s
from zeromesh.launch.job import make_folder
from zeromesh.launch.ranks import join_ranks
from zeromesh.measure.kernels import measure_kernels
from zeromesh.measure.machine import measure_machine
from zeromesh.measure.probe import from_raw
from zeromesh.measure.setting import read_setting
from zeromesh.measure.steps import Batch, Training

MODELS = ("7M", "30M")
DTYPES = ("fp32", "bf16")
TOKENS = 64
SEQUENCES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    batches = [Batch(model=m, dtype=d, sequences=SEQUENCES, tokens=TOKENS) for m in MODELS for d in DTYPES]
    found: dict[Batch, dict[str, list[float]]] = {
        batch: {"measured": [], "plain": [], "probed": []} for batch in batches
    }
    with make_folder() as folder, join_ranks({"node": 1}, folder / "meeting", threads=1) as ranks:
        for _ in range(arguments.rounds):
            for batch in batches:
                measured = found.setdefault(batch, {"measured": [], "plain": [], "probed": []})
                machine = measure_machine(ranks)
                kernels = measure_kernels(ranks, batch.work)
                training = Training(ranks, batch, None)
                training.timed(2)
                measured["measured"] += training.timed(arguments.steps)
                for name, kept in (("plain", []), ("probed", kernels)):
                    raw = {"machine": machine, "kernels": kept, "levels": {}}
                    measured[name].append(planned_s("node=0", from_raw(raw, {"node": 1}, "here").cluster, batch))
    rows = [_row(batch, measured) for batch, measured in found.items()]
    for row in rows:
        print(
            f"{row['model']:>4} {row['dtype']}: {row['measured_s'] * 1e3:7.1f} ms measured; from shapes "
            f"{row['probed_s'] * 1e3:7.1f} ms ({row['error']:+.0%}), from large products {row['plain_error']:+.0%}"
        )
    print(f"median error {statistics.median(abs(row['error']) for row in rows):.1%}")
    if arguments.output:
        arguments.output.write_text(json.dumps({"environment": read_setting(), "rows": rows}, indent=1) + "\n")


def _row(batch: Batch, measured: dict[str, list[float]]) -> dict[str, object]:
    middle = {name: statistics.median(seconds) for name, seconds in measured.items()}
    return {
        "model": batch.model,
        "dtype": batch.dtype,
        "measured_s": middle["measured"],
        "probed_s": middle["probed"],
        "error": middle["probed"] / middle["measured"] - 1,
        "plain_error": middle["plain"] / middle["measured"] - 1,
    }


if __name__ == "__main__":
    main()
