"""What a sharded model was predicted to hold and send, and what it does hold and has sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeromesh.comm import Sent
from zeromesh.engine.api import engine_of
from zeromesh.engine.engine import Engine
from zeromesh.schedule import sent_bytes_per_axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of one device, in bytes."""

    name: str
    predicted: int
    measured: int


class WireCounter:
    """Counts the bytes that this rank hands to the transport.

    Args:
        model: sharded.

    Attributes:
        sent_bytes: of the last step counted, by axis.
    """

    def __init__(self, model: nn.Module) -> None:
        self._engine = engine_of(model)
        self.sent_bytes: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        for group in self._engine.backend.groups.values():
            group.record = self._record

    def _record(self, sent: Sent) -> None:
        self._running[sent.axis] += sent.sent_bytes

    @contextmanager
    def step(self) -> Iterator[None]:
        """Counts what is inside, one step: refreshes that run ahead into the next one are waited for."""
        self._engine.interpreter.quiesce()
        self._running.clear()
        yield
        self._engine.interpreter.quiesce()
        self.sent_bytes = Counter(self._running)


def compare_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Compared]:
    """Bytes of this device: model states and working buffers as planned, and as they are allocated."""
    engine = engine_of(model)
    memory = engine.schedule.memory
    buffers = [buffer for unit in engine.units for buffer in unit.buffers]
    params = _storages(buffer.params for buffer in buffers)
    masters = _storages(buffer.master for buffer in buffers if buffer.master is not None)
    grads = _storages(buffer.grads for buffer in buffers if buffer.grads is not None)
    moments = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]
    return [
        Compared(name="parameters", predicted=memory.params_bytes, measured=sum(params.values())),
        Compared(name="gradients", predicted=memory.grads_bytes, measured=sum(grads.values())),
        Compared(
            name="optimizer's copy of the parameters",
            predicted=memory.master_bytes,
            measured=sum(size for start, size in masters.items() if start not in params),
        ),
        Compared(
            name="optimizer's two moments",
            predicted=_moment_bytes(engine),
            measured=sum(tensor.numel() * tensor.itemsize for tensor in moments),
        ),
        Compared(
            name="working buffers",
            predicted=memory.buffers_bytes,
            measured=sum(_working(engine, held=params | masters | grads).values()),
        ),
    ]


def compare_traffic(model: nn.Module, counter: WireCounter, *, micro_batches: int, recompute: bool) -> list[Compared]:
    """Bytes that this device sends on each axis in one step: as the schedule has them, and as counted."""
    engine = engine_of(model)
    predicted = sent_bytes_per_axis(engine.schedule, micro_batches=micro_batches, recompute=recompute)
    return [
        Compared(
            name=f"{axis.name}, {axis.size} ranks, stage {axis.stage.value}",
            predicted=predicted[axis.name],
            measured=counter.sent_bytes[axis.name],
        )
        for axis in engine.schedule.layout.axes
    ]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by address of the distinct pieces of memory behind some tensors."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _working(engine: Engine, held: dict[int, int]) -> dict[int, int]:
    """Slots, kept copies and scratch, by address; without the model states themselves."""
    backend = engine.backend
    buffers = [buffer for unit in engine.units for buffer in unit.buffers]
    views = [view for buffer in buffers for view in (buffer.full, buffer.waiting, buffer.kept) if view is not None]
    scratch = [
        part for one in (backend.gather_scratch, backend.reduce_scratch) for part in (one.staging, one.workspace)
    ]
    found = _storages([*views, *scratch])
    return {address: size for address, size in found.items() if address not in held}


def _moment_bytes(engine: Engine) -> int:
    """Two moments of the master's dtype for each element of this rank's state shard, padding left out: optimizers see
    parameters, not buffers."""
    total = 0
    for buffer in (buffer for unit in engine.units for buffer in unit.buffers if buffer.master is not None):
        shard = buffer.state_range
        elements = max(0, min(shard.stop, buffer.spec.numel) - shard.start)
        total += 2 * elements * (buffer.master.itemsize if buffer.master is not None else 0)
    return total
