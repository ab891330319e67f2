"""Times the planner and the simulator: a search on three levels, a proof over the whole space, one step, the command
line.

    make bench-search ARGS="--out benchmarks/results/search.json"
    make bench-search ARGS=--skip-whole

For each case it prints CPU and wall seconds (the best of `--repeats`), candidates, simulations, and the gap to the
optimum. CPU seconds are the time on a quiet machine, since the planner has one thread. "whole" is every split of every
level, searched until the optimum is proven.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.harness import parser, save
from zeromesh.cluster.catalogue import find_cluster
from zeromesh.cluster.cluster import Cluster
from zeromesh.model.presets import preset
from zeromesh.model.spec import ModelSpec, UnitKind
from zeromesh.planner.plan import plan
from zeromesh.planner.search import Found, Options, search
from zeromesh.planner.workload import Workload
from zeromesh.simulator.run import simulate
from zeromesh.simulator.workload import FixedWorkload

SEQ_LEN = 4096

Row = dict[str, Any]
"""A case: the best of the repeats, in seconds, and the findings."""


def three_levels(*sizes: int) -> Cluster:
    """The A800 nodes of arXiv 2311.00257, with racks between nodes and cluster."""
    node, outer = find_cluster("a800-8x-hdr").levels
    names = ("node", "rack", "cluster")
    levels = [replace(node, size=sizes[0])]
    levels += [replace(outer, name=name, size=size) for name, size in zip(names[1:], sizes[1:], strict=False)]
    return replace(find_cluster("a800-8x-hdr"), name="x".join(map(str, sizes)), levels=tuple(levels))


def timed(case: str, repeats: int, work: Callable[[], Found | None]) -> Row:
    """CPU seconds are those of this process, and of processes that it has waited for."""
    runs: list[Row] = []
    for _ in range(repeats):
        cpu, wall = _cpu_s(), time.perf_counter()
        found = work()
        row: Row = {"case": case, "cpu_s": _cpu_s() - cpu, "wall_s": time.perf_counter() - wall}
        if found is not None:
            row |= {"searched": found.searched, "simulated": found.simulated, "gap": found.gap}
            row["best"] = str(found.best.candidate)
        runs.append(row)
    best = min(runs, key=lambda row: float(row["cpu_s"]))
    print(best, flush=True)
    return best


def _cpu_s() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def searched(model: ModelSpec, cluster: Cluster, options: Options) -> Found:
    workload = Workload(seq_len=SEQ_LEN, global_batch_tokens=SEQ_LEN * cluster.world * 4)
    return search(model, cluster, workload, options=options)[0]


def planned(model: ModelSpec, cluster: Cluster, sequences: int = 1) -> Found:
    """`sequences` is the number per device and step."""
    tokens = SEQ_LEN * cluster.world * sequences
    return plan(model, cluster, Workload(seq_len=SEQ_LEN, global_batch_tokens=tokens)).found


def stepped(model: ModelSpec, cluster: Cluster) -> None:
    """Simulates one step, event by event."""
    workload = FixedWorkload(seq_len=SEQ_LEN, global_batch_tokens=SEQ_LEN * cluster.world)
    simulate(model, cluster, "node=3,rack=1", workload, record=True)


def command(arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "zeromesh.cli", *arguments.split()], check=True, capture_output=True)


def with_blocks(model: ModelSpec, count: int) -> ModelSpec:
    units = [replace(unit, count=count) if unit.kind is UnitKind.BLOCK else unit for unit in model.units]
    return replace(model, units=tuple(units))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--skip-whole", action="store_true", help="leave out the proof over all splits")
    given = options.parse_args()
    repeats, small, large = given.repeats, preset("llama-13b"), preset("llama-65b")
    two, three = three_levels(8, 128), three_levels(8, 16, 128)
    asked = "--model llama-13b --cluster a800-8x-hdr --seq-len 4096 --global-batch-tokens 4194304"
    rows = [
        timed("zeromesh plan --help", repeats, partial(command, "plan --help")),
        timed("zeromesh plan llama-13b on 1,024", repeats, partial(command, f"plan {asked} --json")),
        timed("plan llama-13b on 1,024", repeats, partial(planned, small, two)),
        timed("plan llama-13b on 16,384", repeats, partial(planned, small, three, 2)),
        timed("plan llama-65b on 16,384", repeats, partial(planned, large, three, 2)),
        timed("search llama-65b on 16,384", repeats, partial(searched, large, three, Options())),
        timed("step of llama-65b on 1,024", repeats, partial(stepped, large, two)),
    ]
    for cluster in (three_levels(64), two, three):
        name = f"{len(cluster.levels)} levels: {cluster.name}"
        rows.append(timed(name, repeats, partial(searched, small, cluster, Options())))
    for count in (20, 40, 80, 160):
        rows.append(
            timed(f"{count} blocks on 8x128", repeats, partial(searched, with_blocks(small, count), two, Options()))
        )
    for splits in ("none", "once", "all"):
        rows.append(timed(f"splits {splits} on 8x16x128", 1, partial(searched, small, three, Options(splits=splits))))
        if not given.skip_whole:
            whole = Options(splits=splits, max_simulations=None, front=0)
            name = f"llama-65b on 16,384, splits {splits}, proven"
            rows.append(timed(name, 1, partial(searched, large, three, whole)))
    save(given.out, results=rows)


if __name__ == "__main__":
    main()
