"""What quantised wires do to a training run: the demo's loss on held-out files, beside that of the run without them.

    python benchmarks/losses.py --out benchmarks/results/losses.json

Trains `examples/demo.toml` once for each strategy, on local processes. Losses do not depend on how busy the machine is;
they do on the standard library's files, which the demo trains on, and a little on the processor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from zeromesh.measure.setting import read_setting

CONFIG = Path(__file__).parents[1] / "examples" / "demo.toml"
LOSSLESS = "node=3,cluster=3"
QUANTISED = ("node=3,cluster=3@int8/int4", "node=3@int8/int4,cluster=3@int8/int4")


def train(strategy: str, steps: int) -> dict[str, float]:
    """The loss on the last step's batch, before it, and on held-out files after it."""
    with tempfile.TemporaryDirectory() as directory:
        values = {"strategy": strategy, "run.steps": steps, "run.directory": directory, "eval.every": steps}
        options = [option for key, value in values.items() for option in ("--set", f"{key}={value}")]
        subprocess.run([Path(sys.executable).with_name("zeromesh"), "train", CONFIG, *options], check=True)
        last = json.loads(Path(directory, "metrics.jsonl").read_text().splitlines()[-1])
    return {"loss": last["loss"], "eval_loss": last["eval_loss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=[LOSSLESS, *QUANTISED], help="the first is the measure")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    losses = {strategy: train(strategy, args.steps) for strategy in args.strategies}
    lossless = losses[args.strategies[0]]["eval_loss"]
    rows = [
        {"strategy": strategy, **row, "over_first": round(row["eval_loss"] / lossless, 4)}
        for strategy, row in losses.items()
    ]
    record = {"setting": read_setting(), "steps": args.steps, "rows": rows}
    print(json.dumps(record, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
