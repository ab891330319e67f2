"""`state_dict()` and `load_state_dict()` of a sharded model: slices of whole tensors, under the original names.

torch.distributed.checkpoint saves and loads what `state_dict()` returns, whatever the layout on the other side::

    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from zeromesh.checkpoint.dcp import SlicedTensor
from zeromesh.checkpoint.piece import Piece
from zeromesh.engine.engine import Engine
from zeromesh.engine.param import ShardedParameter
from zeromesh.errors import ModelError
from zeromesh.model.module_units import clean_name


def install_state_dict(model: nn.Module, engine: Engine) -> None:
    """Registers the hooks; they hold the engine weakly."""
    reference = weakref.ref(engine)

    def shown(module: nn.Module, state: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
        found = reference()
        if found is not None:
            found.interpreter.quiesce()
            _show(state, prefix, _by_name(found))

    def taken(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
        found = reference()
        if found is not None:
            if metadata.get("assign_to_params_buffers"):
                raise ModelError(
                    "load_state_dict(assign=True) would replace the shards of a sharded model; leave it out"
                )
            found.settle()
            _take(module, state, prefix)

    def changed(module: nn.Module, _: Any) -> None:
        found = reference()
        if found is not None:
            found.changed()

    for name, module in model.named_modules():
        if module is not model and any(isinstance(param, ShardedParameter) for param in module._parameters.values()):
            _install_part(module, name, reference)
    model.register_state_dict_post_hook(shown)  # type: ignore[no-untyped-call]  # torch leaves these so
    model.register_load_state_dict_pre_hook(taken)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(changed)  # type: ignore[no-untyped-call]


def _install_part(module: nn.Module, name: str, reference: weakref.ref[Engine]) -> None:
    """Of a module that owns parameters: its own `state_dict` has slices too, and loading is the whole model's."""
    own = {key: param for key, param in module._parameters.items() if isinstance(param, ShardedParameter)}

    def shown(_: nn.Module, state: dict[str, Any], prefix: str, __: dict[str, Any]) -> None:
        found = reference()
        if found is not None:
            found.interpreter.quiesce()
            for key, param in own.items():
                if prefix + key in state:
                    state[prefix + key] = SlicedTensor(_piece(param.full_name, param))

    def refused(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for key, param in own.items():
            value = state.get(prefix + key)
            # The whole model's loading has put the parameters themselves there by now.
            if not isinstance(value, Tensor) or isinstance(value, ShardedParameter):
                continue
            if tuple(value.shape) == tuple(param.global_shape):
                raise ModelError(
                    f"load_state_dict of {name}, a part of a sharded model, would write {param.full_name} into this "
                    f"rank's slice: load into the whole model, model.load_state_dict(state, strict=False), under full "
                    f"names"
                )

    module.register_state_dict_post_hook(shown)  # type: ignore[no-untyped-call]  # torch leaves these so
    module.register_load_state_dict_pre_hook(refused)  # type: ignore[no-untyped-call]


def _by_name(engine: Engine) -> dict[str, ShardedParameter]:
    return {
        name: param
        for unit in engine.units
        for buffer in unit.buffers
        for place, param in zip(buffer.places, buffer.optimizer_params, strict=True)
        for name in place.info.names
    }


def _piece(name: str, param: ShardedParameter) -> Piece:
    return Piece(name=name, shape=tuple(param.global_shape), start=param.flat_start, local=param.local)


def _show(state: dict[str, Any], prefix: str, params: Mapping[str, ShardedParameter]) -> None:
    """Replaces slices in place, keeping the order; names lose the parts that wrappers added."""
    for key in [key for key in state if key.startswith(prefix)]:
        name = clean_name(key.removeprefix(prefix))
        value = state.pop(key)
        if isinstance(value, SlicedTensor):  # of the module that holds it, which may have moved since
            value = SlicedTensor(replace(value.piece, name=name))
        elif name in params:
            value = SlicedTensor(_piece(name, params[name]))
        state[prefix + name] = value


def _take(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Copies what is given for parameters into the shards; torch's own loading then finds them in place."""
    held = {  # not by `named_parameters`, which checkpoint wrappers override
        f"{name}.{key}" if name else key: value
        for name, part in module.named_modules(remove_duplicate=False)
        for key, value in (part._parameters | part._buffers).items()
        if value is not None
    }
    given = {clean_name(key.removeprefix(prefix)): key for key in state if key.startswith(prefix)}
    for actual, param in held.items():
        name = clean_name(actual)
        if name not in given:
            continue
        value = state.pop(given[name])
        if isinstance(param, ShardedParameter) and isinstance(value, Tensor) and value.shape == param.global_shape:
            _copy(name, param, value)
            value = param
        state[prefix + actual] = value


def _copy(name: str, param: ShardedParameter, value: Tensor) -> None:
    local, start = param.local, param.flat_start
    if not local.numel():
        return
    if not isinstance(value, SlicedTensor):
        whole = value.detach().reshape(-1)
        local.copy_(whole[start : start + local.numel()])
        return
    piece = value.piece
    if not piece.start <= start or start + local.numel() > piece.stop:
        raise ModelError(
            f"{name}: load_state_dict needs elements {start} to {start + local.numel()} on this rank, and was given "
            f"slice {piece.start} to {piece.stop} of another layout: save and load it with torch.distributed.checkpoint"
        )
    if piece.local.data_ptr() != local.data_ptr():
        local.copy_(piece.part(start, start + local.numel()).local)
