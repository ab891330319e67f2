"""Times this project's collectives and torch's own, on gloo.

It starts its own ranks on this machine, or runs under torchrun, over any network::

    python -m benchmarks.collectives --world 4
    torchrun --nproc-per-node 4 -m benchmarks.collectives --sizes 8MiB
    python -m lab 2@200mbit,2 -- python -m benchmarks.collectives --nodes 2 --sizes 16MiB

Candidates are interleaved, so that a busy moment of the machine does not affect only one. For each it prints the
slowest rank's wall time (median and fastest), the CPU time of all ranks together, and bytes per second and rank at the
median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import on_ranks
from zeromesh.collectives.ho_ring.ring import ho_ring_all_gather, ho_ring_reduce_scatter
from zeromesh.comm.collectives import all_gather, all_reduce, reduce_scatter, workspace_bytes
from zeromesh.comm.exchange import AxisGroup, Exchange
from zeromesh.comm.groups import make_groups
from zeromesh.comm.messages import pieces
from zeromesh.launch.ranks import Ranks
from zeromesh.strategy import Layout
from zeromesh.units import parse_bytes
from zeromesh.wires.blocks import QuantFormat

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Call = Callable[[], object]
Calls = dict[tuple[str, str], Call]
"""The calls to time, by operation and candidate."""

GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch's own, under their newer names if it has these."""


Result = dict[str, Any]
"""One candidate at one size; times in seconds, size of the whole region."""


def shown(result: Result) -> str:
    region, median_s, world = (result[name] for name in ("region_bytes", "median_s", "world"))
    return (
        f"{result['operation']:15}{result['candidate']:11}{result['dtype']:5}{region / 2**20:9.3f} MiB "
        f"{median_s * 1e3:9.2f} ms (best {result['best_s'] * 1e3:8.2f}, +-{result['spread'] * 100:3.0f} %) "
        f"cpu {result['cpu_s'] * 1e3:8.2f} ms {region * (world - 1) / world / median_s / 1e6:8.0f} MB/s"
    )


def on_one_level(group: AxisGroup, region: torch.Tensor) -> Calls:
    size, chunk = group.size, region.numel() // group.size
    own = region[group.rank * chunk : (group.rank + 1) * chunk]
    received, summed = torch.empty_like(region), torch.empty(chunk)
    workspace = torch.empty(workspace_bytes(group), dtype=torch.uint8)
    native = group.reduce.process_group

    def all_to_all_sum() -> None:
        dist.all_to_all_single(received, region, group=native)
        torch.sum(received.view(size, chunk), 0, dtype=torch.float32, out=summed)

    calls: Calls = {
        ("all_gather", "zeromesh"): lambda: all_gather(region, group),
        ("all_gather", "torch"): lambda: GATHER(region, own, group=native),
        ("reduce_scatter", "zeromesh"): lambda: reduce_scatter(region, summed, group, workspace=workspace),
        ("reduce_scatter", "torch"): lambda: SCATTER(received[:chunk], region, group=native),
        ("reduce_scatter", "all-to-all"): all_to_all_sum,
        ("all_reduce", "zeromesh"): lambda: all_reduce(region, group, workspace=workspace, scale=1.0),
        ("all_reduce", "torch"): lambda: dist.all_reduce(region, group=native),
    }
    for bits in (8, 4):
        form = QuantFormat(bits=bits)
        calls["all_gather", str(form)] = partial(all_gather, region, group, form, workspace=workspace)
        calls["reduce_scatter", str(form)] = partial(reduce_scatter, region, summed, group, form, workspace=workspace)
    return calls


def on_two_levels(whole: AxisGroup, node: AxisGroup, cluster: AxisGroup, region: torch.Tensor) -> Calls:
    """Calls on two levels: `node` is the inner group, `cluster` the outer."""
    shard = region.numel() // whole.size
    own = region[whole.rank * shard : (whole.rank + 1) * shard]
    native = whole.gather.process_group
    workspace = torch.empty(workspace_bytes(whole), dtype=torch.uint8)
    out, received, partial = torch.empty(shard), torch.empty_like(own), region.new_empty(region.numel() - shard)

    def scatter(collective: Callable[..., None]) -> Call:
        return lambda: collective(region, out, node, cluster, workspace=workspace)

    return {
        ("all_gather", "torch"): lambda: GATHER(region, own, group=native),
        ("all_gather", "flat ring"): lambda: flat_gather(region, whole),
        ("all_gather", "two-level"): lambda: two_level_gather(region, node, cluster),
        ("all_gather", "ho_ring"): lambda: ho_ring_all_gather(region, node, cluster),
        ("reduce_scatter", "torch"): lambda: SCATTER(received, region, group=native),
        ("reduce_scatter", "flat ring"): lambda: flat_reduce(region, received, partial, whole),
        ("reduce_scatter", "two-level"): scatter(two_level_reduce),
        ("reduce_scatter", "ho_ring"): scatter(ho_ring_reduce_scatter),
    }


def two_level_gather(region: torch.Tensor, node: AxisGroup, cluster: AxisGroup) -> None:
    """Gathers over one level after the other."""
    all_gather(region.chunk(node.size)[node.rank], cluster)
    all_gather(region, node)


def two_level_reduce(
    region: torch.Tensor, out: torch.Tensor, node: AxisGroup, cluster: AxisGroup, *, workspace: torch.Tensor
) -> None:
    """Reduces over one level after the other."""
    part = region.chunk(node.size)[node.rank]
    reduce_scatter(region, part, node, workspace=workspace)
    reduce_scatter(part, out, cluster, workspace=workspace)


FLAT_BYTES = 256 << 10
"""Bytes of the pieces of a pipelined flat ring over all ranks, with which two levels are compared."""


def flat_gather(region: torch.Tensor, group: AxisGroup) -> None:
    """An all-gather along one ring of all ranks."""
    exchange = Exchange(group, group.gather, "flat_gather", region.numel())
    chunks, numel = region.chunk(group.size), FLAT_BYTES // region.element_size()
    following, preceding = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    arriving = [chunks[(group.rank - step) % group.size] for step in range(1, group.size)]
    waits = [(piece, exchange.post_recv(piece, preceding)) for chunk in arriving for piece in pieces(chunk, numel)]
    for piece in pieces(chunks[group.rank], numel):
        exchange.before_finish(exchange.post_send(piece, following))
    last = len(waits) - len(pieces(chunks[0], numel))
    for index, (piece, wait) in enumerate(waits):
        wait()
        if index < last:
            exchange.before_finish(exchange.post_send(piece, following))
    exchange.finish()


def flat_reduce(region: torch.Tensor, out: torch.Tensor, partial: torch.Tensor, group: AxisGroup) -> None:
    """A reduce-scatter along one ring of all ranks; `partial` has room for the other ranks' chunks."""
    exchange = Exchange(group, group.reduce, "flat_reduce", region.numel())
    chunks, numel = region.chunk(group.size), FLAT_BYTES // region.element_size()
    following, preceding = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    waits = []
    for step, arriving in enumerate(partial.chunk(group.size - 1)):
        index = (group.rank - 2 - step) % group.size
        for sent, own in zip(pieces(arriving, numel), pieces(chunks[index], numel), strict=True):
            waits.append((sent, own, exchange.post_recv(sent, preceding)))
    for piece in pieces(chunks[preceding], numel):
        exchange.before_finish(exchange.post_send(piece, following))
    outs = pieces(out, numel)
    last = len(waits) - len(outs)
    for index, (piece, own, wait) in enumerate(waits):
        wait()
        if index < last:
            exchange.before_finish(exchange.post_send(piece.add_(own), following))
        else:
            torch.add(piece, own, out=outs[index - last])
    exchange.finish()


def measure(calls: Calls, region: torch.Tensor, dtype: str, repeats: int) -> list[Result]:
    """Times all candidates at one size, in turns. Returns the same result on every rank."""
    walls = torch.zeros(len(calls), repeats + 1, dtype=torch.float64)
    cpus = torch.zeros_like(walls)
    for repeat in range(repeats + 1):
        for index, call in enumerate(calls.values()):
            dist.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            call()
            walls[index, repeat] = time.perf_counter() - start
            cpus[index, repeat] = time.process_time() - cpu
    dist.all_reduce(walls, dist.ReduceOp.MAX)
    dist.all_reduce(cpus)
    return [
        _result(key, dtype, region.nbytes, walls[index, 1:].tolist(), cpus[index, 1:].tolist())
        for index, key in enumerate(calls)
    ]


def _result(key: tuple[str, str], dtype: str, region_bytes: int, walls: list[float], cpus: list[float]) -> Result:
    low, median, high = statistics.quantiles(walls, n=4)
    return {
        "operation": key[0],
        "candidate": key[1],
        "world": dist.get_world_size(),
        "dtype": dtype,
        "region_bytes": region_bytes,
        "median_s": median,
        "best_s": min(walls),
        "cpu_s": statistics.median(cpus),
        "spread": (high - low) / 2 / median,
    }


def run(ranks: Ranks, **given: Any) -> list[Result]:
    """A task of all ranks."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*")
    arguments, world = argparse.Namespace(**given), ranks.world
    everyone = make_groups(ranks.mesh, Layout.of("line=3", [("line", world)]).axes)["line"]
    calls_on = partial(on_one_level, everyone)
    if arguments.nodes > 1:
        calls_on = partial(on_two_levels, everyone, *_levels(world, arguments.nodes))
    found: list[Result] = []
    for dtype in arguments.dtypes:
        for size in arguments.sizes:
            numel = int(parse_bytes(size)) // DTYPES[dtype].itemsize // world * world
            region = torch.zeros(numel, dtype=DTYPES[dtype])
            calls = {key: call for key, call in calls_on(region).items() if arguments.only in key[0]}
            found += measure(calls, region, dtype, arguments.repeats)
    return found


def _levels(world: int, nodes: int) -> tuple[AxisGroup, AxisGroup]:
    sizes = [("node", world // nodes), ("cluster", nodes)]
    mesh = init_device_mesh("cpu", (nodes, world // nodes), mesh_dim_names=("cluster", "node"))
    groups = make_groups(mesh, Layout.of("node=3,cluster=3", sizes).axes)
    return groups["node"], groups["cluster"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks to start here; torchrun's own otherwise")
    parser.add_argument("--nodes", type=int, default=1, help="compare two-level forms over that many nodes")
    parser.add_argument("--sizes", nargs="+", default=["64KiB", "1MiB", "4MiB", "16MiB"], help="of the whole region")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=sorted(DTYPES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parsed = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", parsed.world))
    for result in on_ranks("benchmarks.collectives:run", {"line": world}, **vars(parsed)) or ():
        print(json.dumps(result) if parsed.json else shown(result))


if __name__ == "__main__":
    main()
