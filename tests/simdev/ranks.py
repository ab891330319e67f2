"""Processes that have the simulated device, which a process has for as long as it lives: pools of this tier alone."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch.distributed as dist

from tests.dist import pool
from tests.dist.pool import Pool
from zeromesh import simdev
from zeromesh.engine import control

TIMEOUT_S = 600.0
"""Limit of a call: the first one may wait for the compiler."""

CLOCK = simdev.Clock(
    flops=1e9, memory_bytes_per_s=1e9, host_copy_bytes_per_s=1e8, host_memory_bytes_per_s=1e8, dilation=2.0
)

P = ParamSpec("P")


@functools.cache
def _pool(kind: str) -> Pool:
    made = Pool()
    atexit.register(made.remove)
    return made


def on_devices(world: int) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """A test that runs on every rank of a world of this size; each has a device, in real mode."""
    return _decorator(world, "real", on_device)


def clocked(world: int) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """A test that runs on every rank of a world of this size; each has a device with a wall clock, `CLOCK`."""
    return _decorator(world, "clocked", on_clocked_device)


def alone(*, virtual: bool = False) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """A test that runs in one process with a device, which may make itself a rank of any world."""
    return _decorator(1, "virtual" if virtual else "alone", alone_virtual if virtual else alone_real)


def _decorator(world: int, kind: str, begin: Callable[[], None]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    def decorate(fn: Callable[P, None]) -> Callable[P, None]:
        pool._bodies[fn.__module__, fn.__qualname__] = fn

        @functools.wraps(fn)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            _pool(kind).run(
                world,
                run,
                begin.__name__,
                fn.__module__,
                fn.__qualname__,
                args,
                kwargs,
                timeout_s=TIMEOUT_S,
                spoils=world == 1,
            )

        return test

    return decorate


def run(begin: str, module: str, name: str, args: Any, kwargs: Any) -> None:
    """On a rank: the device, then the test."""
    import importlib

    importlib.import_module(module)
    globals()[begin]()
    control.HOST_WORLD = 0  # ranks exchange words on the device, as more of them do
    pool._bodies[module, name](*args, **kwargs)


def on_device(clock: simdev.Clock | None = None) -> None:
    """The device, and in the place of the pool's a default group for its tensors too."""
    simdev.start(clock=clock)
    if simdev.BACKEND in str(dist.get_backend_config()):
        return
    rank, world, store = dist.get_rank(), dist.get_world_size(), dist.FileStore(f"{pool._joined[0]}-device", -1)
    # A rank that leaves while another still connects to it would end that one's join.
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{each}" for each in range(world)])
    dist.destroy_process_group()
    dist.init_process_group(f"cpu:gloo,simdev:{simdev.BACKEND}", store=store, rank=rank, world_size=world)


def on_clocked_device() -> None:
    on_device(CLOCK)


def alone_real() -> None:
    simdev.start()
    dist.destroy_process_group()


def alone_virtual() -> None:
    simdev.start(virtual=True)
    dist.destroy_process_group()
