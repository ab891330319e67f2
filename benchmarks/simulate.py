"""Times the simulator: one full event-by-event step, and how the time grows with units, levels and micro-batches.

    python benchmarks/simulate.py [--write benchmarks/results/simulate.json]

The best of several runs in one process, CPU seconds, so that other load on the machine counts little. Goal: a
1,024-device step of a 65B model in under 100 ms.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from zeromesh.cluster import Cluster, preset
from zeromesh.measure.setting import read_setting
from zeromesh.model import ModelSpec, Recomputation, UnitKind
from zeromesh.model import preset as model_preset
from zeromesh.simulator import FixedWorkload, simulate

GOAL_S = 0.1
REPEATS = 7


def best_s(model: ModelSpec, cluster: Cluster, strategy: str, micro_batches: int, *, record: bool = False) -> float:
    """CPU seconds of one simulation."""
    workload = FixedWorkload(
        seq_len=4096,
        global_batch_tokens=4096 * cluster.world * micro_batches,
        recomputation=Recomputation.FULL,
    )
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        simulate(model, cluster, strategy, workload, record=record)
        times.append(time.process_time() - start)
    return min(times)


def with_blocks(model: ModelSpec, blocks: int) -> ModelSpec:
    """`model` with another number of blocks."""
    units = tuple(replace(u, count=blocks) if u.kind is UnitKind.BLOCK else u for u in model.units)
    return replace(model, units=units)


def measure() -> dict[str, object]:
    """All figures, in milliseconds."""
    llama, a800, frontier = model_preset("llama-65b"), preset("a800-8x-hdr").take(1024), preset("frontier-mi250x")
    levels = {1: (a800.take(8), "node=3,cluster=0"), 2: (a800, "node=3,cluster=1")}
    levels[3] = (frontier.take(1024), "package=3,node=3,cluster=1")
    step_s = best_s(llama, a800, "node=3,cluster=1", 1, record=True)
    return {
        "setting": read_setting(),
        "step_65b_1024_devices_ms": 1e3 * step_s,
        "goal_ms": 1e3 * GOAL_S,
        "by_blocks_ms": {n: 1e3 * best_s(with_blocks(llama, n), a800, "node=3,cluster=1", 1) for n in (10, 20, 40, 80)},
        "by_levels_ms": {n: 1e3 * best_s(llama, *setup, 1) for n, setup in levels.items()},
        "by_micro_batches_ms": {n: 1e3 * best_s(llama, a800, "node=3,cluster=1", n) for n in (1, 4, 16, 64)},
        "all_events_16_micro_batches_ms": 1e3 * best_s(llama, a800, "node=3,cluster=1", 16, record=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    result = measure()
    text = json.dumps(result, indent=2)
    print(text)
    if options.write:
        options.write.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
