"""Times the planner and the simulator: a search on three levels, the whole space proven, one step, the command line.

    python benchmarks/search.py --out benchmarks/results/search.json
    python benchmarks/search.py --skip-whole

For each case: CPU and wall seconds (the best of `--repeats`), candidates, simulations, and the gap to the optimum. CPU
seconds are what a quiet machine would take: the planner has one thread. "whole" is every split of every level, searched
until the optimum is proven.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from zeromesh.cluster import Cluster, find_cluster
from zeromesh.measure.setting import read_setting
from zeromesh.model import ModelSpec, UnitKind, preset
from zeromesh.planner import Options, Workload, plan, search
from zeromesh.simulator import FixedWorkload, simulate

SEQ_LEN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case; `cpu_s` and `wall_s` are the best of the repeats."""

    case: str
    cpu_s: float
    wall_s: float
    searched: int = 0
    simulated: int = 0
    gap: float = 0.0
    best: str = ""

    def __str__(self) -> str:
        return (
            f"{self.case:44} cpu {self.cpu_s:8.3f} s  wall {self.wall_s:8.3f} s  {self.searched:>10,} candidates "
            f"{self.simulated:>6} simulated  gap {self.gap:.2%}  {self.best}"
        )


def three_levels(*sizes: int) -> Cluster:
    """The A800 nodes of arXiv 2311.00257 with racks between nodes and cluster."""
    node, outer = find_cluster("a800-8x-hdr").levels
    names = ("node", "rack", "cluster")
    levels = [replace(node, size=sizes[0])]
    levels += [replace(outer, name=name, size=size) for name, size in zip(names[1:], sizes[1:], strict=False)]
    return replace(find_cluster("a800-8x-hdr"), name="x".join(map(str, sizes)), levels=tuple(levels))


def timed(case: str, repeats: int, work: Callable[[], Result]) -> Result:
    """The best of `repeats` runs of `work`, whose own times are ignored."""
    best: Result | None = None
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        result = work()
        result = replace(result, case=case, cpu_s=time.process_time() - cpu, wall_s=time.perf_counter() - wall)
        best = result if best is None or result.cpu_s < best.cpu_s else best
    assert best is not None
    print(best, flush=True)
    return best


def searched(model: ModelSpec, cluster: Cluster, options: Options) -> Result:
    workload = Workload(seq_len=SEQ_LEN, global_batch_tokens=SEQ_LEN * cluster.world * 4)
    found, _ = search(model, cluster, workload, options=options)
    return Result(
        case="",
        cpu_s=0.0,
        wall_s=0.0,
        searched=found.searched,
        simulated=found.simulated,
        gap=found.gap,
        best=str(found.best.candidate),
    )


def planned(model: ModelSpec, cluster: Cluster) -> Result:
    workload = Workload(seq_len=SEQ_LEN, global_batch_tokens=SEQ_LEN * cluster.world)
    found = plan(model, cluster, workload).found
    return Result(case="", cpu_s=0.0, wall_s=0.0, searched=found.searched, simulated=found.simulated, gap=found.gap)


def stepped(model: ModelSpec, cluster: Cluster) -> Result:
    """One step, event by event."""
    workload = FixedWorkload(seq_len=SEQ_LEN, global_batch_tokens=SEQ_LEN * cluster.world)
    simulate(model, cluster, "node=3,cluster=1", workload, record=True)
    return Result(case="", cpu_s=0.0, wall_s=0.0, simulated=1)


def command(*arguments: str) -> Result:
    """A `zeromesh` process; its CPU time is that of the children so far, less what was before."""
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "zeromesh.cli", *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Result(case="", cpu_s=cpu, wall_s=time.perf_counter() - wall)


def commands(repeats: int) -> list[Result]:
    """Processes are timed by what they used themselves."""
    workload = ["--seq-len", "4096", "--global-batch-tokens", "4194304", "--json"]
    cases = {
        "zeromesh plan --help": ["plan", "--help"],
        "zeromesh plan llama-13b on 1,024": ["plan", "--model", "llama-13b", "--cluster", "a800-8x-hdr", *workload],
    }
    results = []
    for case, arguments in cases.items():
        runs = [command(*arguments) for _ in range(repeats)]
        results.append(replace(min(runs, key=lambda run: run.cpu_s), case=case))
        print(results[-1], flush=True)
    return results


def with_blocks(model: ModelSpec, count: int) -> ModelSpec:
    units = [replace(unit, count=count) if unit.kind is UnitKind.BLOCK else unit for unit in model.units]
    return replace(model, units=tuple(units))


def growth(repeats: int) -> list[Result]:
    """With levels, with units, with candidates."""
    model = preset("llama-13b")
    results = []
    for sizes in ((64,), (8, 128), (8, 16, 128)):
        cluster = three_levels(*sizes)
        name = f"{len(sizes)} levels: {cluster.name}"
        results.append(timed(name, repeats, partial(searched, model, cluster, Options())))
    for count in (20, 40, 80, 160):
        cluster = three_levels(8, 128)
        grown = with_blocks(model, count)
        results.append(timed(f"{count} blocks on 8x128", repeats, partial(searched, grown, cluster, Options())))
    for splits in ("none", "once", "all"):
        cluster = three_levels(8, 16, 128)
        options = Options(splits=splits)
        name = f"splits {splits} on 8x16x128"
        results.append(timed(name, 1, partial(searched, model, cluster, options)))
    return results


def proofs() -> list[Result]:
    """Searches until the optimum is proven."""
    model, cluster = preset("llama-65b"), three_levels(8, 16, 128)
    results = []
    for splits in ("none", "once", "all"):
        options = Options(splits=splits, max_simulations=None, front=0)
        name = f"llama-65b on 16,384, splits {splits}, proven"
        results.append(timed(name, 1, partial(searched, model, cluster, options)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-whole", action="store_true", help="leave out the proof over all splits")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    repeats = arguments.repeats
    large = three_levels(8, 16, 128)
    results = [
        *commands(repeats),
        timed("plan llama-13b on 1,024", repeats, lambda: planned(preset("llama-13b"), three_levels(8, 128))),
        timed("search llama-65b on 16,384", repeats, lambda: searched(preset("llama-65b"), large, Options())),
        timed("step of llama-65b on 1,024", repeats, lambda: stepped(preset("llama-65b"), three_levels(8, 128))),
        *growth(repeats),
    ]
    if not arguments.skip_whole:
        results += proofs()
    if arguments.out:
        record = {"setting": read_setting(), "results": [asdict(result) for result in results]}
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
