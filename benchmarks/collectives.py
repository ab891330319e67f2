"""Times this project's collectives beside torch's own, on gloo.

On this machine (starts its own ranks), or under torchrun, behind whatever network that spans::

    python benchmarks/collectives.py --world 4
    torchrun --nproc-per-node 4 benchmarks/collectives.py --sizes 8MiB

Candidates are interleaved, so that a busy moment of the machine does not hit one alone. For each it prints the median
and the fastest wall time of the slowest rank, the CPU time of all ranks together, and bytes per second and rank at the
median.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zeromesh.comm import AxisGroup, all_gather, all_reduce, make_groups, reduce_scatter, workspace_bytes
from zeromesh.strategy import Layout
from zeromesh.units import parse_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One candidate at one size; times in seconds, size of the whole region."""

    operation: str
    candidate: str
    world: int
    dtype: str
    region_bytes: int
    median_s: float
    best_s: float
    cpu_s: float
    spread: float

    def __str__(self) -> str:
        rate = self.region_bytes * (self.world - 1) / self.world / self.median_s / 1e6
        return (
            f"{self.operation:15}{self.candidate:10}{self.dtype:5}{self.region_bytes / 2**20:9.3f} MiB "
            f"{self.median_s * 1e3:9.2f} ms (best {self.best_s * 1e3:8.2f}, +-{self.spread * 100:3.0f} %) "
            f"cpu {self.cpu_s * 1e3:8.2f} ms {rate:8.0f} MB/s"
        )


def candidates(group: AxisGroup, region: torch.Tensor) -> dict[tuple[str, str], Call]:
    """(operation, candidate) -> the call to time, on buffers that are made here."""
    size, chunk = group.size, region.numel() // group.size
    own = region[group.rank * chunk : (group.rank + 1) * chunk]
    received, summed = torch.empty_like(region), torch.empty(chunk)
    workspace = torch.empty(workspace_bytes(group), dtype=torch.uint8)
    native = group.reduce.process_group
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_to_all_sum() -> None:
        dist.all_to_all_single(received, region, group=native)
        torch.sum(received.view(size, chunk), 0, dtype=torch.float32, out=summed)

    return {
        ("all_gather", "zeromesh"): lambda: all_gather(region, group),
        ("all_gather", "torch"): lambda: gather(region, own, group=native),
        ("reduce_scatter", "zeromesh"): lambda: reduce_scatter(region, summed, group, workspace=workspace),
        ("reduce_scatter", "torch"): lambda: scatter(received[:chunk], region, group=native),
        ("reduce_scatter", "all-to-all"): all_to_all_sum,
        ("all_reduce", "zeromesh"): lambda: all_reduce(region, group, workspace=workspace, scale=1.0),
        ("all_reduce", "torch"): lambda: dist.all_reduce(region, group=native),
    }


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(group: AxisGroup, dtype: str, region_bytes: int, repeats: int, only: str) -> list[Result]:
    """Times all candidates at one size, in turn; the same result on every rank."""
    region = torch.zeros(region_bytes // DTYPES[dtype].itemsize, dtype=DTYPES[dtype])
    calls = {key: call for key, call in candidates(group, region).items() if only in key[0]}
    walls = torch.zeros(len(calls), repeats + 1, dtype=torch.float64)
    cpus = torch.zeros_like(walls)
    for repeat in range(repeats + 1):
        for index, call in enumerate(calls.values()):
            dist.barrier()
            cpu, start = cpu_s(), time.perf_counter()
            call()
            walls[index, repeat] = time.perf_counter() - start
            cpus[index, repeat] = cpu_s() - cpu
    dist.all_reduce(walls, dist.ReduceOp.MAX)
    dist.all_reduce(cpus)
    return [
        _result(key, group, dtype, region_bytes, walls[index, 1:].tolist(), cpus[index, 1:].tolist())
        for index, key in enumerate(calls)
    ]


def _result(
    key: tuple[str, str], group: AxisGroup, dtype: str, region_bytes: int, walls: list[float], cpus: list[float]
) -> Result:
    low, median, high = statistics.quantiles(walls, n=4)
    return Result(
        operation=key[0],
        candidate=key[1],
        world=group.size,
        dtype=dtype,
        region_bytes=region_bytes,
        median_s=median,
        best_s=min(walls),
        cpu_s=statistics.median(cpus),
        spread=(high - low) / 2 / median,
    )


def run(rank: int, world: int, store: str | None, arguments: argparse.Namespace) -> None:
    """One rank of the benchmark."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*")
    if store is None:
        dist.init_process_group("gloo")
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        file = dist.FileStore(store, world)  # type: ignore[attr-defined]  # torch does not list it in __all__
        dist.init_process_group("gloo", store=file, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("line",))
    group = make_groups(mesh, Layout.of("line=3", [("line", world)]).axes)["line"]
    for dtype in arguments.dtypes:
        for size in arguments.sizes:
            for result in measure(group, dtype, int(parse_bytes(size)), arguments.repeats, arguments.only):
                if dist.get_rank() == 0:
                    print(json.dumps(asdict(result)) if arguments.json else result, flush=True)
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks to start here; torchrun's own otherwise")
    parser.add_argument("--sizes", nargs="+", default=["64KiB", "1MiB", "4MiB", "16MiB"], help="of the whole region")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=sorted(DTYPES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parsed = parser.parse_args(arguments)
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, parsed)
        return
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=run, args=(rank, parsed.world, f"{directory}/store", parsed), daemon=True)
            for rank in range(parsed.world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
