"""Shards that lie in the host's memory for a while, so that others may use the device's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from zeromesh.comm.host import padded
from zeromesh.engine.api import engine_of
from zeromesh.engine.engine import Engine
from zeromesh.engine.hosted import take_host_memory
from zeromesh.engine.leaf import bytes_of
from zeromesh.engine.optim import take_slices
from zeromesh.errors import ModelError

KINDS = {"master": 1, "owed": 1, "grads": 2, "params": 3, "kept": 3}
"""The lowest stage of the host with which each kind of shard leaves the device."""


@contextmanager
def parked(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer] = (), host: str = "host=3") -> Iterator[None]:
    """Moves a model's shards to the host's memory, and back at the end of the context, for example for rollouts.

    All ranks call it together, between two steps and after `zero_grad()`. Inside, reading the model's parameters
    raises. With "host=1" and "host=2", forwards without a backward work inside.

    Args:
        model: a sharded model.
        optimizers: optimizers whose states move as well, as CPU tensors inside. Values that owners keep
            (`zm.by_owner`), quantised states, and memory that a numpy array shares stay.
        host: "host=1" moves masters and states, "host=2" also gradients, "host=3" also parameters, slots and workspace.

    Raises:
        ModelError: on all ranks, if gradients wait for a step, the model is already parked, its memory is registered,
            or the machine has too little memory.

    Example::

        with zm.parked(model, optimizer):
            rollouts = generate(prompts)  # by an engine that needs the device
    """
    if host not in ("host=1", "host=2", "host=3"):
        raise ModelError(f"zm.parked takes host=1, host=2 or host=3; got {host!r}")
    engine, stage = engine_of(model), int(host[-1])
    engine.at_rest(follow=True)
    engine.require_stepped("zm.parked")
    if engine.backend.registered:
        raise ModelError("zm.parked cannot move registered memory: shard the model without register=True")
    control, device = engine.control, engine.backend.device
    kept, dropped = _storages(engine, stage)
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    states = [
        (state, key)
        for optimizer in optimizers
        for state in optimizer.state.values()
        for key, value in state.items()
        if type(value) is Tensor and value.dim() and value.device == device
    ]
    sizes = [*(storage.nbytes() for storage in kept), *(state[key].nbytes for state, key in states)]
    less = "park less (host=1), or use more machines"
    link, _ = take_host_memory(sum(map(padded, sizes)), control, device, call="zm.parked", less=less)
    copies = [link.arena.take(padded(size), torch.uint8)[:size] for size in sizes]
    for storage, copy in zip(kept, copies, strict=False):
        copy.copy_(bytes_of(storage), non_blocking=True)
    for (state, key), copy in zip(states, copies[len(kept) :], strict=True):
        state[key] = copy.view(state[key].dtype).view(state[key].shape).copy_(state[key], non_blocking=True)
    sizes = [storage.nbytes() for storage in (*kept, *dropped)]
    for storage in (*kept, *dropped):
        storage.resize_(0)
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    engine.backend.beside().park(control, whole=stage == 3)
    try:
        yield
    finally:
        for storage, size in zip((*kept, *dropped), sizes, strict=True):
            storage.resize_(size)
        for storage, copy in zip(kept, copies, strict=False):
            bytes_of(storage).copy_(copy, non_blocking=True)
        for storage in dropped:
            bytes_of(storage).zero_()
        for state, key in states:
            state[key] = state[key].to(device, copy=True)
        engine.backend.beside().park(None)
        engine.interpreter.forget()
        for optimizer in optimizers:
            take_slices(optimizer)


def _storages(engine: Engine, stage: int) -> tuple[list[UntypedStorage], list[UntypedStorage]]:
    """Storages of shards that leave the device, and storages that hold nothing between steps; each once. Memory shared
    with numpy or another process stays, since torch cannot free it."""
    shards = [
        tensor
        for unit in engine.units
        for buffer in unit.buffers
        for kind, tensor in buffer.persistent().items()
        if KINDS.get(kind, 4) <= stage and not buffer.lies_on_host(kind)
    ]
    working = engine.backend.working_buffers() if stage == 3 else []
    storages = ([tensor.untyped_storage() for tensor in tensors] for tensors in (shards, working))
    kept, dropped = ({s.data_ptr(): s for s in each if s.data_ptr() and s.resizable()} for each in storages)
    return [*kept.values()], [*dropped.values()]
