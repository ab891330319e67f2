"""`state_dict()` and `load_state_dict()` of a sharded model: slices of whole tensors, under the original names.

torch.distributed.checkpoint saves and loads the result of `state_dict()`, under any layout on the other side::

    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from zeromesh.engine.engine import Engine
from zeromesh.engine.param import ShardedParameter, Slice, loaded_operand, refuse_transforms
from zeromesh.errors import CheckpointError
from zeromesh.modules import clean_name


def install_state_dict(model: nn.Module, engine: Engine) -> None:
    """Registers the hooks; they hold the engine weakly."""
    reference = weakref.ref(engine)

    def shown(_: nn.Module, state: dict[str, Any], prefix: str, __: dict[str, Any]) -> None:
        found = reference()
        if found is not None:
            found.require_one_of_a_name()
            for key in [key for key in state if key.startswith(prefix)]:  # the order is kept
                state[prefix + clean_name(key.removeprefix(prefix))] = state.pop(key)

    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Gives names back the parts that wrappers have added."""
        given = {clean_name(key.removeprefix(prefix)): key for key in state if key.startswith(prefix)}
        for name, part in module.named_modules(remove_duplicate=False) if reference() is not None else ():
            # Not `named_parameters`, which checkpoint wrappers override.
            for key in (*part._parameters, *part._buffers):
                actual = f"{name}.{key}" if name else key
                if clean_name(actual) in given:
                    state[prefix + actual] = state.pop(given[clean_name(actual)])

    for module in model.modules():
        _install_part(module, reference)
    model.register_state_dict_post_hook(shown)  # type: ignore[no-untyped-call]  # torch leaves these so
    model.register_load_state_dict_pre_hook(renamed)  # type: ignore[no-untyped-call]
    _teach_torch()
    refuse_transforms()


def _install_part(module: nn.Module, reference: weakref.ref[Engine]) -> None:
    """Has a module that owns parameters show slices in its state, also inside a forward, and load slices and whole
    tensors. Torch's own loading finds them in place, and with `assign` puts them where they are."""
    own = {key: param for key, param in module._parameters.items() if isinstance(param, ShardedParameter)}
    if not own:
        return

    def shown(_: nn.Module, state: dict[str, Any], prefix: str, __: dict[str, Any]) -> None:
        found = reference()
        if found is not None:
            found.at_rest()
            for key, param in own.items():
                if prefix + key in state:
                    state[prefix + key] = param.shown()

    def taken(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        found = reference()
        if found is None:
            return
        for key, param in own.items():
            value = state.get(prefix + key)
            if isinstance(value, Tensor) and value.shape == (param.elements.numel,) != param.shape:
                raise CheckpointError(
                    f"load_state_dict of {param.elements} was given this rank's part alone, as `.local` is: "
                    f"give it slices, as state_dict() has them, or whole tensors"
                )
            if isinstance(value, Tensor) and value.shape == param.shape and value is not param:
                given = loaded_operand(param.elements, value, "load_state_dict")
                found.changing(param)
                if given.data_ptr() != param.local.data_ptr():
                    param.local.copy_(given)
                state[prefix + key] = param

    module.register_state_dict_post_hook(shown)  # type: ignore[no-untyped-call]  # torch leaves these so
    module.register_load_state_dict_pre_hook(taken)  # type: ignore[no-untyped-call]


@cache
def _teach_torch() -> None:
    """`get_model_state_dict` and its like, which gather DTensors alone, get whole tensors for a full state dict.
    `dcp.async_save`, which copies tensors by their storage, gets copies of slices."""
    states: Any = torch_state_dict
    stager: Any = StateDictStager
    finish, copy_of = states._maybe_full_or_cpu_state_dict, stager._offload_tensor

    def finish_whole(state: dict[str, Any], info: Any) -> Any:
        from zeromesh.engine.whole import gathered  # of full_state_dict=

        return finish(gathered(state, info), info)

    def stage(self: Any, tensor: Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(tensor, Slice):
            return copy_of(self, tensor, *args, **options)
        from zeromesh.engine.whole import staged  # of dcp.async_save

        return staged(tensor)

    states._maybe_full_or_cpu_state_dict = finish_whole
    stager._offload_tensor = stage
