"""Times this project's own collectives over each level of a mesh, on all groups of the level at once, as in training.

Rounds go over operations and sizes in turn, so that a busy moment of the machine does not affect only one size. A
timing is the slowest rank's. Everything is repeated while every rank computes. On CPU, each rank's processor time for
the transfer is measured as well: the computation beside it loses that time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.cluster.level import OPERATIONS
from zeromesh.comm.collectives import all_gather, all_reduce, reduce_scatter, workspace_bytes
from zeromesh.comm.exchange import AxisGroup
from zeromesh.comm.groups import make_groups
from zeromesh.engine.build import mesh_axes
from zeromesh.errors import MeasurementError
from zeromesh.launch.ranks import Ranks
from zeromesh.measure.fit import SCATTERING
from zeromesh.strategy import Layout

SMALLEST_BYTES = 1 << 14
LARGEST_BYTES = 1 << 26
LARGEST_ON_DEVICE_BYTES = 1 << 29
"""NVLink reaches its rate with messages of hundreds of MiB."""
LEAST_BYTES = 1 << 22
"""A rate needs transfers as long as a block of a model: shaped links let a short one pass at once."""

PATIENCE = 20.0
"""A round may take this many times its planned time."""

GROWTH = 4
SHORTEST_SAMPLE_S = 2e-3
"""Shorter calls are repeated within a sample: after a barrier, ranks start up to about 100 us apart."""

LEAST_BESIDE = 6
"""Least number of rounds beside computation. Each of their messages may wait for as long as a busy process may run."""

HOST_CALLS = 6
"""Least number of calls over which processor time is measured."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """One operation at one size (`sent_bytes` by one rank). A round times `repeats` repeats of `call`."""

    operation: str
    sent_bytes: int
    call: Call
    repeats: int


def measure_links(ranks: Ranks, *, rounds: int, seconds: float, patience: float = PATIENCE) -> dict[str, Any]:
    """A task of `launch`. Returns, by level from the innermost on, timings in seconds by operation and bytes sent,
    without and beside computation, and processor seconds per byte.

    Args:
        rounds: samples of each size.
        seconds: approximate time for each level.
        patience: a round may take this many times as long, since messages have to be long enough.

    Raises:
        MeasurementError: on all ranks, if it would take longer.
    """
    layout = Layout.of(",".join(f"{name}=3" for name, _ in mesh_axes(ranks.mesh, ())), mesh_axes(ranks.mesh, ()))
    groups = make_groups(ranks.mesh, layout.axes)
    return {name: _measure_level(group, ranks, rounds, seconds, patience) for name, group in groups.items()}


def _measure_level(group: AxisGroup, ranks: Ranks, rounds: int, seconds: float, patience: float) -> dict[str, Any]:
    samples = list(_samples(group, ranks, seconds / rounds, patience))
    timings = _timings(samples, ranks, rounds)
    beside = _beside_computation(samples, ranks, rounds, seconds)
    return {
        "backend": dist.get_backend(group.gather.process_group),
        "timings": timings,
        "beside": beside,
        **(_host_seconds(samples, ranks) if ranks.on_cpu else {"host_s_per_byte": None, "host_call_s": 0.0}),
    }


def _beside_computation(
    samples: list[_Sample], ranks: Ranks, rounds: int, seconds: float
) -> dict[str, dict[int, list[float]]]:
    """As `_timings`, while every rank computes; with fewer rounds if a scheduler makes messages wait.

    On processor cores it times only the shortest messages. Predictions there divide the cores among ranks and need only
    a latency. And long messages of ranks without a core to themselves wait for seconds (4 ranks on 2 cores: 40 s a
    round).
    """
    shortest = {operation: min(s.sent_bytes for s in samples if s.operation == operation) for operation in OPERATIONS}
    once = [
        replace(sample, repeats=1)
        for sample in samples
        if not ranks.on_cpu or (sample.operation in SCATTERING and sample.sent_bytes == shortest[sample.operation])
    ]
    with _computing(ranks):
        start = time.perf_counter()
        _timings(once, ranks, 1)
        fitting = int(seconds / 4 / _agreed(time.perf_counter() - start))
        return _timings(once, ranks, max(LEAST_BESIDE, min(4 * rounds, fitting)))


def _timings(samples: list[_Sample], ranks: Ranks, rounds: int) -> dict[str, dict[int, list[float]]]:
    """Returns the slowest rank's seconds in each round, by operation and bytes sent."""
    times = torch.zeros(len(samples), rounds, dtype=torch.float64)
    for index in range(rounds):
        for row, sample in enumerate(samples):
            times[row, index] = _timed(sample.call, sample.repeats, ranks)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    found: dict[str, dict[int, list[float]]] = {}
    for sample, row in zip(samples, times.tolist(), strict=True):
        found.setdefault(sample.operation, {})[sample.sent_bytes] = row
    return found


@contextmanager
def _computing(ranks: Ranks) -> Iterator[None]:
    """Multiplies matrices in a thread while the context is open; on a device, in a separate stream."""
    ended = threading.Event()
    matrix = torch.randn(256, 256) if ranks.on_cpu else torch.randn(2048, 2048, device=ranks.device)
    stream = None if ranks.on_cpu else torch.Stream(ranks.device)

    def compute() -> None:
        with stream or nullcontext():
            while not ended.is_set():
                matrix @ matrix
                if stream is not None:
                    stream.synchronize()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _samples(group: AxisGroup, ranks: Ranks, budget_s: float, patience: float) -> Iterator[_Sample]:
    """Yields samples of growing size, to `LEAST_BYTES` and further while a round over all is within the budget."""
    workspace = torch.empty(workspace_bytes(group), dtype=torch.uint8, device=ranks.device)
    size, used_s, shortest_s = SMALLEST_BYTES, 0.0, 0.0
    largest = LARGEST_BYTES if ranks.on_cpu else LARGEST_ON_DEVICE_BYTES
    while True:
        made = _calls(group, size, workspace, ranks.device)
        this_s = once_s = 0.0
        for operation, (call, sent) in made.items():
            call()  # connections are made at first use
            repeats, once = _repeats(call, ranks)
            this_s += once * repeats
            once_s += once
            yield _Sample(operation=operation, sent_bytes=sent, call=call, repeats=repeats)
        used_s += this_s
        shortest_s = shortest_s or once_s
        # Extrapolates the time of longer messages. Latencies are subtracted, since all sizes have them. Small sizes are
        # skipped: their times are noisy.
        if LEAST_BYTES // 64 <= size < LEAST_BYTES and once_s > 2 * shortest_s:
            _require_time((once_s - shortest_s) / (size - SMALLEST_BYTES) * LEAST_BYTES, budget_s, patience)
        if size == largest or (size >= LEAST_BYTES and used_s + GROWTH * this_s > budget_s):
            return
        size = min(GROWTH * size, largest)


def _repeats(call: Call, ranks: Ranks) -> tuple[int, float]:
    """Returns the number of calls in a sample and the seconds of each. There are as many as make the barrier's seconds
    negligible."""
    repeats = 1
    while True:
        once = _agreed(min(_timed(call, repeats, ranks) for _ in range(2)))
        wanted = int(SHORTEST_SAMPLE_S / once)
        if wanted <= 1.5 * repeats:
            return repeats, once
        repeats = wanted


def _require_time(round_s: float, budget_s: float, patience: float) -> None:
    """Raises MeasurementError, on all ranks alike, if messages that are long enough take too much time."""
    if round_s > patience * max(budget_s, 0.5):  # below half a second it may be noise
        raise MeasurementError(
            f"a round of messages of {LEAST_BYTES >> 20} MiB would take about {round_s:.0f} s, and is to take "
            f"{budget_s:.2g} s: a probe of so slow a link takes {round_s / budget_s:.0f} times the seconds of a level "
            f"(probe --seconds, bench --probe-seconds)"
        )


def _calls(group: AxisGroup, size: int, workspace: torch.Tensor, device: torch.device) -> dict[str, tuple[Call, int]]:
    chunk = size // 4 // group.size
    region = torch.zeros(chunk * group.size, device=device)  # its sums stay 0
    out = torch.empty(chunk, device=device)
    sent = 4 * chunk * (group.size - 1)
    return {
        "all_gather": (lambda: all_gather(region, group), sent),
        "reduce_scatter": (lambda: reduce_scatter(region, out, group, workspace=workspace, scale=1 / group.size), sent),
        "all_reduce": (lambda: all_reduce(region, group, workspace=workspace), 2 * sent),
    }


def _timed(call: Call, repeats: int, ranks: Ranks) -> float:
    """Seconds of one call on this rank; all ranks start together."""
    ranks.settle_stream()  # does not wait for products in their own stream
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    ranks.settle_stream()
    return (time.perf_counter() - start) / repeats


def _agreed(seconds: float) -> float:
    """Returns the slowest rank's value, since decisions that follow must be the same on all ranks."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _host_seconds(samples: list[_Sample], ranks: Ranks) -> dict[str, float]:
    """Processor seconds of one rank with all its threads, per byte that it sends and per call. They are a line through
    the longest transfer and one of at most an eighth of it, averaged over ranks and operations."""
    slopes, calls = [], []
    for operation in sorted({sample.operation for sample in samples}):
        of_one = [sample for sample in samples if sample.operation == operation]
        long = max(of_one, key=lambda sample: sample.sent_bytes)
        short = max((s for s in of_one if 8 * s.sent_bytes <= long.sent_bytes), key=lambda sample: sample.sent_bytes)
        long_s, short_s = (_processor_seconds(sample, ranks) for sample in (long, short))
        slope = (long_s - short_s) / (long.sent_bytes - short.sent_bytes)
        if slope <= 0:  # noise: the longer one cannot cost less
            slope = long_s / long.sent_bytes
        slopes.append(slope)
        calls.append(short_s - slope * short.sent_bytes)
    return {"host_s_per_byte": sum(slopes) / len(slopes), "host_call_s": max(0.0, sum(calls) / len(calls))}


def _processor_seconds(sample: _Sample, ranks: Ranks) -> float:
    """Processor seconds of one call, averaged over the ranks."""
    repeats = max(HOST_CALLS, sample.repeats)
    dist.barrier()
    start = time.process_time()
    for _ in range(repeats):
        sample.call()
    total = torch.tensor([(time.process_time() - start) / repeats], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / ranks.world
