"""Which memory is registered, with whom and for how long, on a backend that only remembers."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeromesh as zm
from tests.dist.parity import mesh_of
from tests.dist.pool import on_ranks
from zeromesh.comm import nccl
from zeromesh.engine import build
from zeromesh.engine.api import engine_of


class Device:
    """Stands for the accelerator: its pool, and the backends of its communicators."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.type = events, "cuda"
        self.inside = False

    @contextmanager
    def use(self, pool: object, device: object) -> Any:
        self.inside = True
        yield
        self.inside = False

    def backend(self, name: str) -> Any:
        return mock.Mock(
            mem_allocator="allocator",
            register_mem_pool=lambda pool, symm: self.events.append(f"register {name}"),
            deregister_mem_pool=lambda pool: self.events.append(f"deregister {name}"),
        )


def make(events: list[str], **options: Any) -> tuple[Any, int]:
    """A sharded model, and the bytes of its slots that came from the pool."""
    device, pooled = Device(events), [0]
    allocate, register = build._bytes, nccl.registered

    def watched(count: int, where: torch.device) -> torch.Tensor:
        pooled[0] += count * device.inside
        return allocate(count, where)

    @contextmanager
    def on_device(groups: Any, where: torch.device) -> Any:
        groups = [_Group(group, device) for group in groups]
        with register(groups, device) as found:  # type: ignore[arg-type]
            yield found

    with (
        mock.patch.object(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}"),
        mock.patch.object(torch.cuda, "use_mem_pool", device.use),
        mock.patch.object(nccl, "registered", on_device),
        mock.patch.object(build, "_bytes", watched),
    ):
        model = zm.shard(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), mesh_of(2, 2), "node=3,cluster=2", **options
        )
    return model, pooled[0]


class _Group:
    def __init__(self, group: Any, device: Device) -> None:
        for lane in ("gather", "reduce"):
            channel = mock.Mock()
            channel.process_group._get_backend.return_value = device.backend(f"{group.name} {lane}")
            setattr(self, lane, channel)


ALL = [f"{axis} {lane}" for axis in ("node", "cluster") for lane in ("gather", "reduce")]


@on_ranks(4)
def test_slots_come_from_a_pool_that_all_communicators_know_until_it_is_freed():
    events: list[str] = []
    model, pooled = make(events, register=True)
    plan = engine_of(model).schedule.memory
    assert pooled == plan.gather.total_bytes + plan.reduce.total_bytes > 0
    assert events == [f"register {name}" for name in ALL]
    assert all(line.predicted_bytes == line.allocated_bytes for line in zm.memory_report(model))
    with mock.patch.object(torch.accelerator, "synchronize", lambda device: events.append("synchronize")):
        del model
        gc.collect()
    assert events[4:] == ["synchronize", *(f"deregister {name}" for name in ALL)]


@on_ranks(4)
def test_it_is_asked_for_by_option_or_environment():
    for environment, options, expected in (
        ({}, {}, 0),
        ({"ZEROMESH_REGISTER": "1"}, {}, 4),
        ({}, {"register": False}, 0),
    ):
        events: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("ZEROMESH_REGISTER", raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            model, pooled = make(events, **options)
        assert len(events) == expected and bool(pooled) == bool(expected)
        with mock.patch.object(torch.accelerator, "synchronize"):
            del model
            gc.collect()
    model = zm.shard(nn.Linear(8, 8), mesh_of(2, 2), "node=3,cluster=1", register=True)  # where there is no pool
    model(torch.ones(2, 8)).sum().backward()
    assert all(line.predicted_bytes == line.allocated_bytes for line in zm.memory_report(model))
