"""Rates of one rank's computation and memory, while all others on its machine do the same."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zeromesh import modules
from zeromesh.comm.host import HostArena
from zeromesh.cost.constants import default_constants
from zeromesh.files import machine_id, usable_cores
from zeromesh.launch.device import device_name
from zeromesh.launch.ranks import Ranks
from zeromesh.measure.setting import processor_name
from zeromesh.measure.work import DTYPES

SAMPLE_S = 0.3
_STEPPED, _STEPPED_HERE = 128 << 20, 8 << 20
"""Elements in optimizer steps: for a machine with devices, and for each rank without. They exceed caches, which have up
to a gigabyte on servers; an element has 16 bytes with states and gradient."""


def measure_machine(ranks: Ranks) -> dict[str, Any]:
    """A task of `launch`. Returns the device's name, memory and rates, the machine's memory, and cores per rank on CPU.

    On devices a rate is the slowest rank's, since all others wait for it. On CPU, where ranks share cores, it is the
    mean. `by_rank` has every rank's.
    """
    machines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(machines, machine_id())
    here = machines.count(machine_id())
    device = torch.get_device_module(ranks.device)
    memory = _host_memory() / here if ranks.on_cpu else device.get_device_properties(ranks.device).total_memory
    copies = _copy_rates(ranks)
    host_copies = {} if ranks.on_cpu else _host_copy_rates(ranks)
    products = {name: _product_rates(ranks, modules.DTYPES[name]) for name in DTYPES}
    figure = statistics.mean if ranks.on_cpu else min
    return {
        "name": f"{processor_name()}, {torch.get_num_threads()} thread(s)"
        if ranks.on_cpu
        else device_name(ranks.device),
        "memory_bytes": memory,
        "host_memory_bytes": _host_memory(),
        "memory_bytes_per_s": figure(copies),
        "host_copy_bytes_per_s": host_copies.get("at once", figure(copies) / 2),
        "host_copies": host_copies,
        "host_step_bytes_per_s": here * min(_host_step_rates(ranks, here)),
        "peak_flops": {name: figure(each) for name, each in products.items()},
        "by_rank": {"copies": copies, **{f"{name} products": each for name, each in products.items()}},
        "cores": usable_cores() / here if ranks.on_cpu else None,
        "ranks_per_machine": here,
    }


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _copy_rates(ranks: Ranks) -> list[float]:
    """Bytes read and written per second by a copy that no cache holds."""
    numel = (16 << 20) if ranks.on_cpu else (256 << 20)
    source = torch.ones(numel, device=ranks.device)
    target = torch.empty_like(source)
    return rates(lambda: target.copy_(source), 2 * source.nbytes, ranks)


def _host_copy_rates(ranks: Ranks) -> dict[str, float]:
    """Bytes per second that the slowest rank copies in each direction between device and registered memory: in both
    directions "at once", and in each separately."""
    num_bytes = 256 << 20
    arena = HostArena(2 * num_bytes, ranks.device)
    pairs = [(torch.empty(num_bytes, dtype=torch.uint8, device=ranks.device), arena.take(num_bytes, torch.uint8))]
    pairs.append((arena.take(num_bytes, torch.uint8), torch.empty_like(pairs[0][0])))
    streams = [torch.Stream(ranks.device) for _ in pairs]

    def copy(ways: Sequence[int]) -> None:
        for way in ways:
            target, source = pairs[way]
            with streams[way]:
                target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    ways = {"at once": (0, 1), "up": (0,), "down": (1,)}
    return {name: min(rates(functools.partial(copy, own), num_bytes, ranks)) for name, own in ways.items()}


def _host_step_rates(ranks: Ranks, here: int) -> list[float]:
    """Bytes per second, counted as in the cost model, that an optimizer's step moves in a host's memory; `here` ranks
    share the host."""
    numel = _STEPPED_HERE if ranks.on_cpu else _STEPPED // here
    param = torch.nn.Parameter(torch.zeros(numel, device="cpu"))
    param.grad = torch.ones_like(param)
    optimizer, before = torch.optim.AdamW([param], fused=True), torch.get_num_threads()
    torch.set_num_threads(max(1, usable_cores() // here))
    try:
        return rates(optimizer.step, default_constants().optimizer_bytes * numel, ranks)
    finally:
        torch.set_num_threads(before)


def _product_rates(ranks: Ranks, dtype: torch.dtype) -> list[float]:
    """FLOP/s of square products, of the size that is fastest on all ranks together."""
    found: list[list[float]] = []
    for dim in (256, 512, 1024) if ranks.on_cpu else (2048, 4096, 8192):
        flops = 2 * dim**3
        if found and flops / min(found[-1]) > SAMPLE_S:  # processors without bf16 take seconds for a product
            break
        one, other = (torch.randn(dim, dim, device=ranks.device).to(dtype) for _ in range(2))
        found.append(rates(functools.partial(torch.matmul, one, other, out=torch.empty_like(one)), flops, ranks))
    return max(found, key=sum)


def rates(call: Callable[[], object], amount: float, ranks: Ranks) -> list[float]:
    """Returns `amount` per second on each rank, while all call at once."""
    call()
    ranks.settle()
    dist.barrier()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SAMPLE_S:
        call()
        ranks.settle()
        count += 1
    found = torch.zeros(ranks.world, dtype=torch.float64)
    found[ranks.rank] = amount * count / (time.perf_counter() - start)
    dist.all_reduce(found)
    return found.tolist()
