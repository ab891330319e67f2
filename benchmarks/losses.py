"""The effect of quantised wires on training: the demo's loss on held-out files, with and without them.

    make bench-losses ARGS="--out benchmarks/results/losses.json"

Trains `examples/demo.toml` once for each strategy, on local processes. Losses do not depend on how busy the machine is.
They do depend on the standard library's files, on which the demo trains, and a little on the processor.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT, parser, save

STRATEGIES = ("node=3,cluster=3", "node=3,cluster=3@int8/int4", "node=3@int8/int4,cluster=3@int8/int4")


def train(strategy: str, steps: int) -> dict[str, float]:
    """Returns the loss on the last step's batch, before that step, and the loss on held-out files after it."""
    with tempfile.TemporaryDirectory() as directory:
        values = {"strategy": strategy, "run.steps": steps, "run.directory": directory, "eval.every": steps}
        options = [option for key, value in values.items() for option in ("--set", f"{key}={value}")]
        config = ROOT / "examples" / "demo.toml"
        subprocess.run([sys.executable, "-m", "zeromesh.cli", "train", config, *options], check=True)
        last = json.loads(Path(directory, "metrics.jsonl").read_text().splitlines()[-1])
    return {"loss": last["loss"], "eval_loss": last["eval_loss"]}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--strategies", nargs="+", default=STRATEGIES, help="the first is the measure")
    options.add_argument("--steps", type=int, default=300)
    args = options.parse_args()
    losses = {strategy: train(strategy, args.steps) for strategy in args.strategies}
    lossless = losses[args.strategies[0]]["eval_loss"]
    rows = [
        {"strategy": strategy, **row, "over_first": round(row["eval_loss"] / lossless, 4)}
        for strategy, row in losses.items()
    ]
    save(args.out, steps=args.steps, rows=rows)


if __name__ == "__main__":
    main()
