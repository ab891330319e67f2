"""What one rank computes and moves in its memory while all others of its machine do the same."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.measure.ranks import Ranks
from zeromesh.measure.setting import processor_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAMPLE_S = 0.3


def measure_machine(ranks: Ranks) -> dict[str, Any]:
    """A task of `launch`: the device's name, memory, rates (means over all ranks), and cores for each rank on CPU."""
    here = _ranks_on_this_machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = _host_memory() / here if ranks.on_cpu else torch.cuda.get_device_properties(ranks.device).total_memory
    return {
        "name": _name(ranks.device),
        "memory_bytes": memory,
        "memory_bytes_per_s": _copy_rate(ranks),
        "peak_flops": {name: _product_rate(ranks, dtype) for name, dtype in DTYPES.items()},
        "cores": cores / here if ranks.on_cpu else None,
        "ranks_per_machine": here,
    }


def _name(device: torch.device) -> str:
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {torch.get_num_threads()} thread(s)"


def _ranks_on_this_machine() -> int:
    """Counts by the kernel's boot id: emulated clusters have several hosts' networks and one kernel."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    machine = boot_id.read_text().strip() if boot_id.exists() else platform.node()
    machines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(machines, machine)
    return machines.count(machine)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _copy_rate(ranks: Ranks) -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    numel = (16 << 20) if ranks.on_cpu else (256 << 20)
    source = torch.ones(numel, device=ranks.device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), 2 * source.nbytes, ranks)


def _product_rate(ranks: Ranks, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of a few square products."""
    dims = (256, 512, 1024) if ranks.on_cpu else (2048, 4096, 8192)
    return max(_product(ranks, dtype, dim) for dim in dims)


def _product(ranks: Ranks, dtype: torch.dtype, dim: int) -> float:
    one, other = (torch.randn(dim, dim, device=ranks.device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    return _rate(lambda: torch.matmul(one, other, out=out), 2 * dim**3, ranks)


def _rate(call: Callable[[], object], amount: float, ranks: Ranks) -> float:
    """`amount` per second, the mean over the ranks, all calling at once."""
    call()
    ranks.settle()
    dist.barrier()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SAMPLE_S:
        call()
        ranks.settle()
        count += 1
    rate = torch.tensor([amount * count / (time.perf_counter() - start)], dtype=torch.float64)
    dist.all_reduce(rate)
    return float(rate) / ranks.world
