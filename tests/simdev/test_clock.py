"""The clocked mode: kernels, events, copies and collectives on a wall clock, and a model that trains on it.

Times between events are the device's, and exact where a stream has not been idle: kernels are arithmetic. Times of
copies and collectives are the machine's, and those that the host sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh as zm
from tests.simdev.ranks import CLOCK, clocked
from zeromesh import simdev
from zeromesh.errors import InputError
from zeromesh.simdev.device import LaunchOrder

KERNEL_S = 0.1
"""The product below takes so long."""

COPY_BYTES = int(KERNEL_S * CLOCK.host_copy_bytes_per_s)


def kernel() -> None:
    """2 * 500 * 1000 * 100 FLOPs."""
    torch.empty(500, 1000, device="simdev") @ torch.empty(1000, 100, device="simdev")


def mark() -> torch.Event:
    event = torch.Event("simdev", enable_timing=True)
    event.record()
    return event


def begin() -> torch.Event:
    """The end of a kernel that the stream is busy with."""
    kernel()
    return mark()


def seconds(first: torch.Event, second: torch.Event) -> float:
    """Between two events of the device; the host waits for both."""
    first.synchronize()
    second.synchronize()
    return first.elapsed_time(second) / 1e3


@clocked(1)
def test_kernels_of_one_stream_add_up_and_take_what_they_compute_or_move():
    first = begin()
    kernel()
    kernel()
    second = mark()
    numbers, sums = torch.empty(3_000_000, device="simdev"), torch.empty(3_000_000, device="simdev")
    sums.add_(numbers)  # reads two, writes one
    third = mark()
    assert seconds(first, second) == pytest.approx(2 * KERNEL_S)
    assert seconds(second, third) == pytest.approx(3 * 12e6 / CLOCK.memory_bytes_per_s)


@pytest.mark.parametrize("waits", [False, True])
@clocked(1)
def test_kernels_of_two_streams_overlap_unless_one_waits_for_an_event(waits):
    other, first = torch.Stream("simdev"), begin()
    kernel()
    own = mark()
    other.wait_event(own if waits else first)
    with other:
        kernel()
        end = mark()
    assert seconds(first, own) == pytest.approx(KERNEL_S)
    assert seconds(first, end) == pytest.approx(KERNEL_S * (1 + waits))


def ways_to_wait() -> dict[str, Callable[[], object]]:
    value, source = torch.ones((), device="simdev"), torch.empty(8, device="simdev")
    return {
        "device": torch.accelerator.synchronize,
        "stream": torch.accelerator.current_stream().synchronize,
        "event": lambda: mark().synchronize(),
        "item": value.item,
        "copy": source.cpu,
    }


@pytest.mark.parametrize("way", ["device", "stream", "event", "item", "copy"])
@clocked(1)
def test_the_host_runs_ahead_until_it_waits(way):
    wait = ways_to_wait()[way]
    torch.accelerator.synchronize()
    began = time.perf_counter()
    kernel()
    end = mark()
    ahead = time.perf_counter() - began
    assert not end.query() or ahead > CLOCK.dilation * KERNEL_S
    wait()
    assert end.query() and torch.accelerator.current_stream().query()
    assert time.perf_counter() - began >= CLOCK.dilation * KERNEL_S


@pytest.mark.parametrize("both_up", [False, True])
@clocked(1)
def test_a_copy_up_and_one_down_overlap_and_two_up_do_not(both_up):
    up, down = (torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    first_on_device, second_on_device = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="simdev") for _ in range(2))
    other, first = torch.Stream("simdev"), begin()
    other.wait_event(first)
    first_on_device.copy_(up, non_blocking=True)
    own = mark()
    with other:
        if both_up:
            second_on_device.copy_(up, non_blocking=True)
        else:
            down.copy_(second_on_device, non_blocking=True)
        end = mark()
    both = max(seconds(first, own), seconds(first, end))
    if both_up:
        assert both >= 2 * KERNEL_S
    else:
        assert KERNEL_S <= both < 1.9 * KERNEL_S


@clocked(1)
def test_an_operator_of_the_host_keeps_its_thread_and_not_the_device():
    memory = simdev.module.host_memory(COPY_BYTES)
    began = time.perf_counter()
    first = begin()
    memory.add_(1)  # reads and writes
    assert time.perf_counter() - began >= CLOCK.dilation * 2 * COPY_BYTES / CLOCK.host_memory_bytes_per_s
    assert first.query()


@clocked(2)
def test_a_collective_runs_beside_kernels_and_ends_once_all_ranks_have_come_to_it():
    values = torch.empty(1 << 20, device="simdev")
    dist.all_reduce(values)
    torch.accelerator.synchronize()
    dist.barrier()
    first = begin()
    for _ in range(3 * dist.get_rank()):  # so the first rank's waits for them
        kernel()
    work = dist.all_reduce(values, async_op=True)
    for _ in range(4):
        kernel()
    computed = mark()
    work.get_future().wait()
    end = mark()
    assert not work.is_completed()
    took = seconds(first, computed)
    assert took == pytest.approx((4 + 3 * dist.get_rank()) * KERNEL_S)
    assert seconds(first, end) < took + 2 * KERNEL_S
    assert work.is_completed()


@pytest.mark.parametrize("order", ["none", "implicit"])
@clocked(2)
def test_collectives_of_two_communicators_wait_for_each_other_in_implicit_order_alone(order: LaunchOrder):
    values, words = torch.empty(1 << 20, device="simdev"), torch.empty(1 << 20, device="simdev")
    groups = [dist.new_group([0, 1], backend=simdev.BACKEND) for _ in range(2)]
    for group in groups:
        dist.all_reduce(words, group=group)
    torch.accelerator.synchronize()
    dist.barrier()
    busy, idle, first = torch.Stream("simdev"), torch.Stream("simdev"), begin()
    for stream in (busy, idle):
        stream.wait_event(first)
    with simdev.launch_order(order):
        with busy:
            for _ in range(5):
                kernel()
            dist.all_reduce(values, group=groups[0])
        with idle:
            dist.all_reduce(words, group=groups[1])
            end = mark()
    assert (seconds(first, end) >= 5 * KERNEL_S) == (order == "implicit")


def plain() -> nn.Sequential:
    with torch.device("simdev"):
        return nn.Sequential(*(nn.Linear(640, 640, bias=False) for _ in range(3)))


@clocked(1)
def test_a_trace_names_the_waits_for_steps_on_the_host():
    """The host itself waits, and the computation's stream stands still."""
    model, batch = zm.shard(plain(), None, "host=1,node=3"), torch.empty(8, 640, device="simdev")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with zm.record_trace(model) as recording:
        for _ in range(3):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = recording.steps[-1]
    assert trace.seconds(name="wait for step", kind="wait") > 0.5 * trace.step_s > 2 * trace.seconds(kind="compute")


@clocked(1)
def test_a_process_keeps_its_clock():
    assert simdev.start(clock=CLOCK).virtual
    with pytest.raises(InputError, match=r"clocked by .*cannot become virtual"):
        simdev.start(virtual=True)
    with pytest.raises(InputError, match="must be positive"):
        simdev.Clock(flops=0.0, memory_bytes_per_s=1.0)
