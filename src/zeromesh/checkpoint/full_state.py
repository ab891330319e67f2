"""Gathers whole tensors from a sharded model, and loads them into one."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.checkpoint.states import extra_names, extra_states, set_extra_states
from zeromesh.engine.api import engine_of
from zeromesh.engine.control import Control, broadcast_bytes
from zeromesh.engine.engine import Engine
from zeromesh.engine.flat import FlatShards
from zeromesh.engine.leaf import local_of
from zeromesh.engine.param import ShardedParameter
from zeromesh.engine.whole import whole_state
from zeromesh.errors import ModelError, nearest
from zeromesh.modules import clean_name, is_sharded


def full_state_dict(model: nn.Module | Any, *, names: Container[str] | None = None) -> Any:
    """Gathers whole parameters (in the master's dtype), buffers and modules' extra states on rank 0's CPU.

    Every rank calls it. At most one flat buffer is whole on a device at a time.

    Args:
        model: a sharded model; or dicts, lists and tuples of slices (such as a moving average). For the latter, rank 0
            gets the same structure with whole tensors, and other ranks get None for each slice.
        names: the parameters to gather, the same on every rank. Default: all.

    Returns:
        Tensors by original name, in the model's order, with a tied parameter under each of its names. Other ranks get
        an empty dict.

    Raises:
        InputError: on all ranks, if some have different slices in the dicts, lists and tuples, or none.
        ModelError: the model has parameters that were added after `zm.shard`.
    """
    if not isinstance(model, nn.Module):
        return whole_state(model)
    engine = engine_of(model)
    require_own(engine)
    engine.at_rest()
    state: dict[str, Any] = {}
    for buffer in buffers_of(engine):
        wanted = [place for place in buffer.places if names is None or any(n in names for n in place.info.names)]
        if not wanted:
            continue
        values = _gather(engine, buffer)
        for place in wanted if _control_of(engine, buffer).rank == 0 else ():
            whole = values[place.start : place.stop].view(place.shape)
            if place.info.spread is not None:  # a collective of the first ranks of all meshes
                whole = place.info.spread.over(whole).full_tensor()
            if engine.control.first:
                state.update(dict.fromkeys(place.info.names, whole.to("cpu", copy=True)))
    if engine.control.first:
        state.update({name: b.detach().to("cpu", copy=True) for name, b in persistent_buffers(model)})
        state |= extra_states(model)
        state = {name: state[name] for name in _in_order(model) if name in state}
        state = state if names is None else {name: value for name, value in state.items() if name in names}
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads rank 0's whole tensors into a sharded model. Other ranks' `state` is ignored.

    Raises:
        ModelError: on every rank, if names are missing or unknown, or a shape differs; nothing is changed then.
    """
    engine = engine_of(model)
    require_names(engine)
    _require_match(engine, model, state)
    engine.at_rest()
    for buffer in buffers_of(engine):
        values = torch.zeros(buffer.padded, dtype=buffer.optimizer_shard[0].dtype, device=buffer.device)
        control = _control_of(engine, buffer)
        for place in buffer.places if control.rank == 0 else ():
            given = state[place.info.names[0]] if engine.control.first else torch.empty(place.global_shape)
            whole = given.to(values.device, values.dtype)
            for group in control.beyond:  # to the first rank of each mesh
                broadcast_bytes(whole, group)
            values[place.start : place.stop].copy_(whole[place.region.index].flatten())
        control.broadcast(values)
        buffer.fill(values)
    for name, held in persistent_buffers(model):
        if engine.control.first:
            held.copy_(state[name])
        engine.control.broadcast(held)
        for group in engine.control.beyond:
            broadcast_bytes(held, group)
    set_extra_states(model, engine.control.say({name: state.get(name) for name in extra_names(model)}))
    engine.changed()


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that are whole on every rank, by name: buffers, and frozen parameters in other dtypes."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        whole = {key: p.data for key, p in module._parameters.items() if p is not None and not is_sharded(p)}
        kept = {key: b for key, b in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, held in (whole | kept).items():
            if held is not None:
                yield clean_name(f"{prefix}.{key}" if prefix else key), local_of(held)


def _in_order(model: nn.Module) -> Iterator[str]:
    """The names of a state dict, in order. `state_dict()` itself would pass slices to hooks that want whole tensors."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key in (*module._parameters, *module._buffers, "_extra_state"):
            yield clean_name(f"{prefix}.{key}" if prefix else key)


def require_own(engine: Engine) -> None:
    """Raises ModelError for parameters that were added to the model after it was sharded, since saving would leave them
    out; also as `require_names`."""
    require_names(engine)
    for name, _ in engine.added():
        raise ModelError(
            f"{name} was added to the model after zm.shard, so it would not be saved: "
            f"change the model first, then shard it"
        )


def require_names(engine: Engine) -> None:
    """Raises ModelError if a name means another tensor than in `zm.shard`, whose names saved tensors have."""
    engine.require_one_of_a_name()
    model, own = engine.model(), dict[str, str]()
    for place in (place for buffer in buffers_of(engine) for place in buffer.places):
        own.update(dict.fromkeys(place.info.names, place.info.name))
    for name, param in () if model is None else model.named_parameters(remove_duplicate=False):
        if isinstance(param, ShardedParameter) and own.get(clean_name(name)) != param.full_name:
            raise ModelError(
                f"{name} is the parameter that zm.shard found as {param.full_name}, and is saved and loaded as that: "
                f"reorder, share or remove modules first, then shard the model"
            )


def buffers_of(engine: Engine) -> Iterator[FlatShards]:
    for unit in engine.units:
        yield from unit.buffers


def _control_of(engine: Engine, buffer: FlatShards) -> Control:
    return engine.homes[buffer.spec.part].control


def _gather(engine: Engine, buffer: FlatShards) -> Tensor:
    """Returns the whole flat buffer on the first rank. One replica of each shard adds it to zeros there."""
    shard, axes = buffer.optimizer_shard
    values = torch.zeros(buffer.padded, dtype=shard.dtype, device=buffer.device)
    sharded = {axis.name for axis in axes}
    if all(index == 0 for name, index in buffer.coordinates.items() if name not in sharded):
        values[buffer.range_of(axes)] = shard
    return _control_of(engine, buffer).reduce(values.view(torch.uint8)).view(shard.dtype)  # backends know fewer dtypes


def _require_match(engine: Engine, model: nn.Module, state: Mapping[str, Any]) -> None:
    """The first rank compares; all ranks raise."""
    message = ""
    if engine.control.first:
        shapes = {n: p.global_shape for b in buffers_of(engine) for p in b.places for n in p.info.names}
        shapes |= {name: buffer.shape for name, buffer in persistent_buffers(model)}
        extra = dict.fromkeys(extra_names(model))
        message = _mismatch({name: tuple(shape) for name, shape in shapes.items()} | extra, state)
    message = engine.control.say(message)
    if message:
        raise ModelError(message)


def _mismatch(shapes: Mapping[str, tuple[int, ...] | None], state: Mapping[str, Any]) -> str:
    for name in state:
        if name not in shapes:
            return f"the model has no parameter or buffer {name!r}: {nearest(name, shapes)}"
    for name, shape in shapes.items():
        if name not in state:
            return f"the state has no {name!r}, which the model has: {nearest(name, state)}"
        if shape is not None and tuple(state[name].shape) != shape:
            return f"{name} must have shape {shape}; the state's has {tuple(state[name].shape)}"
    return ""
