"""Launches of the host for a unit off gloo: on each axis and in each direction at most ten kernels and collectives,
for any strategy and number of ranks. Chains of the engine run on one process; their work for a backend and a device is
counted, and nothing is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pure.strategy.mixes import NAMES, mixes, notation
from zeromesh.comm import collectives, transport
from zeromesh.comm.exchange import AxisGroup, Channel
from zeromesh.engine.chain import Binding, Scratch
from zeromesh.engine.flat import FlatShards
from zeromesh.engine.units import DTYPES, ParamInfo
from zeromesh.schedule.buffer_layout import BufferLayout
from zeromesh.schedule.memory import MemoryPlan
from zeromesh.schedule.unit import FlatBuffer
from zeromesh.strategy import Layout
from zeromesh.wires.blocks import QuantFormat
from zeromesh.wires.format import Codec

BUDGET = 10
NUMEL = 70_000


class Launches(TorchDispatchMode):
    """By axis; copies and sums by torch are kernels too."""

    def __init__(self) -> None:
        super().__init__()
        self.axis, self.count = "", Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.add()
        return func(*args, **(kwargs or {}))

    def add(self, *_: Any, **__: Any) -> None:
        self.count[self.axis] += 1


class CountingCodec(Codec):
    """A device's transport: each call is one launch for all ranks."""

    def __init__(self, launches: Launches) -> None:
        self.dequantise_each = self.reduce = self.requantise = launches.add  # type: ignore[method-assign]
        self._launches = launches

    dequantise_each = reduce = requantise = None  # type: ignore[assignment]  # each process's own

    def quantise_each(self, sources: Any, messages: Sequence[Tensor], *_: Any, **__: Any) -> Iterator[Tensor]:
        self._launches.add()
        yield from messages


@contextmanager
def counted() -> Iterator[Launches]:
    launches = Launches()
    with (
        mock.patch.object(collectives, "reduce_scatter_single", launches.add),
        mock.patch.object(transport, "gather_single", launches.add),
        mock.patch.multiple(dist, all_reduce=launches.add, all_to_all=launches.add, all_to_all_single=launches.add),
        mock.patch.object(QuantFormat, "codec", lambda *_: CountingCodec(launches)),
        mock.patch.object(QuantFormat, "memory_bytes", lambda *_: 0),  # a device's codec has none
    ):
        yield launches


def launched(strategy: str, sizes: Sequence[int]) -> dict[str, int]:
    """The most launches of a block on an axis, by direction."""
    layout = Layout.of(strategy, list(zip(NAMES, sizes, strict=False)))
    spec = FlatBuffer(numel=NUMEL, param_dtype="bf16", master_dtype="fp32", reduce_dtype="bf16")
    placed = BufferLayout.of(layout, spec)
    info = ParamInfo(names=("weight",), param=nn.Parameter(torch.empty(NUMEL, device="meta")), sites=())
    coordinates = layout.coordinates(layout.world - 1)
    shards = FlatShards.allocate(placed, [info], coordinates, torch.device("cpu"))
    sharded = layout.degree(layout.param_axes) > 1
    waiting = (
        torch.zeros(placed.padded, dtype=DTYPES[placed.slot_dtype]) if layout.degree(layout.grad_axes) > 1 else None
    )
    shards.bind(torch.zeros(placed.padded, dtype=torch.bfloat16) if sharded else None, waiting)
    plan = MemoryPlan.of([[placed]], 1, messages=False)
    scratch = {
        lane: Scratch(*(torch.zeros(n, dtype=torch.uint8) for n in (plan.staging[lane], plan.workspace[lane])))
        for lane in plan.lanes.names
    }
    assert shards.grads is not None
    with counted() as launches:
        groups = {axis.name: group_of(axis.name, axis.size, coordinates, layout) for axis in layout.axes}
        bound = Binding(shards, groups, plan.lanes, scratch, None)
        reduce = bound.reductions()
        micro, boundary = ([step for _, steps in part for step in steps] for part in (reduce.micro, reduce.boundary))
        gathers = bound.refresh() + (bound.unshard(from_kept=False) if sharded else ())
        with torch.no_grad(), launches:
            for kind, chain in (("gather", gathers), ("reduce", micro), ("reduce", boundary)):
                for step in chain:
                    axis = "+".join(group.name for group in step.groups)
                    launches.axis = f"{kind} over {axis}" if axis else launches.axis
                    step.run(accumulate=True)
    return dict(launches.count)


def group_of(name: str, size: int, coordinates: dict[str, int], layout: Layout) -> AxisGroup:
    channel = Channel(process_group=None, serial=1)  # type: ignore[arg-type]
    return AxisGroup(
        name=name,
        ranks=tuple(range(size)),
        rank=coordinates[name],
        transport=transport.Native("cpu"),
        gather=channel,
        reduce=channel,
        timeout_s=1.0,
    )


@pytest.mark.parametrize("sizes", [(2, 2), (8, 64)], ids=str)
@pytest.mark.parametrize("option", ["", ";collective=ho_ring"])
def test_lossless_strategies_are_within_the_budget(sizes: tuple[int, int], option: str) -> None:
    for mix in mixes(2, kept=True):
        found = launched(notation(mix) + option, sizes)
        assert max(found.values()) <= 6, (mix, found)


@pytest.mark.parametrize("wires", ["@int8/int4", "@int4/int8+ef", "@fp32/fp32"])
def test_wires_are_within_the_budget(wires: str) -> None:
    for mix in mixes(2, kept=True):
        found = launched(
            ",".join(f"{name}={stage}{spelt(stage, wires)}" for name, stage in zip(NAMES, mix, strict=False)), (8, 64)
        )
        assert max(found.values()) <= BUDGET, (mix, found)


def spelt(stage: str, wire: str) -> str:
    """A stage 0 sends no parameters."""
    return f"@/{wire.rpartition('/')[2]}" if stage == "0" else wire


@pytest.mark.parametrize("strategy", ["node=3@int8/int4", "node=3", "node=0", "node=1", "node=0@/int8"])
def test_more_ranks_are_no_more_launches(strategy: str) -> None:
    few, many = (launched(strategy, (size,)) for size in (4, 4096))
    assert few.keys() == many.keys() and all(many[axis] <= few[axis] for axis in few)
