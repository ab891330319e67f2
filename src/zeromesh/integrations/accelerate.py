"""Hugging Face's Accelerator over sharded models.

`prepare` shards every model that it is given. Optimizers that were made from the model's parameters get the shards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from accelerate.utils.modeling import convert_file_size_to_int
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.checkpoint.full_state import full_state_dict
from zeromesh.engine.api import engine_of
from zeromesh.errors import InputError
from zeromesh.integrations.huggingface import save_safetensors
from zeromesh.integrations.methods import (
    UNEVEN,
    clip_unscaled,
    give_shards,
    refuse,
    require_plain,
    require_processes,
    require_sharding,
    shard_model,
    with_mixed_precision,
)
from zeromesh.integrations.saved import Registered, checkpoints_of
from zeromesh.integrations.versions import require_attributes, require_known
from zeromesh.sharding.value import Sharding

require_known("accelerate")

STATES = "zeromesh_{}"
"""The directory, inside one that `save_state` writes, of a model and its optimizers, by the model's number."""


PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")
OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # mypy does not follow accelerate
    """Accelerate's Accelerator with one more argument.

    Args:
        sharding: how models are sharded. If it has no `param_dtype`, `mixed_precision` sets it.

    Raises:
        InputError: the arguments, or the file of `accelerate config`, also ask for another way of sharding.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]
    step: int

    def __init__(self, *args: Any, sharding: Sharding, **kwargs: Any) -> None:
        require_sharding(sharding)
        refuse([name for name in PLUGINS if kwargs.get(name) is not None])
        super().__init__(*args, **kwargs)
        require_attributes("accelerate", self, "_models", "_optimizers", "step")
        require_processes(sharding, self.num_processes)
        self.sharding = sharding
        self._sharding: Sharding | None = None
        self._shards: Any = WeakIdKeyDictionary()
        """The shard of each parameter, by the parameter that the model had before."""
        refuse([kind.value for kind in OTHERS if self.state.distributed_type == kind])
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            refuse(["dynamo_backend"], "compile the model's blocks before, with their compile()")
        if not self.even_batches:
            refuse(["even_batches=False"], UNEVEN)

    # ---- models and optimizers in `prepare`

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        for model in args:
            if isinstance(model, nn.Module):  # before its optimizer, in whichever order they are given
                self.prepare_model(model)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not getattr(model, "_is_accelerate_prepared", False):
            require_plain(model)
            if self._sharding is None:
                self._sharding = with_mixed_precision(self.sharding, self.mixed_precision).on(self.device.type)
            self._shards.update(shard_model(self._sharding, model))
        # This adds autocast only: DistributedDataParallel is not needed, and shards are on the mesh's devices already.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)  # type: ignore[no-any-return]

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        if not isinstance(optimizer, AcceleratedOptimizer):
            give_shards(optimizer, self._shards)
        return super().prepare_optimizer(optimizer, device_placement)  # type: ignore[no-any-return]

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        return clip_unscaled(self, parameters, max_norm, norm_type)

    # ---- saving and loading

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns whole tensors on the first rank's CPU, and an empty dict on other ranks. All ranks call it."""
        state: dict[str, Any] = full_state_dict(model)
        return state

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Each rank writes its slices. All ranks call it, with a directory that all of them see."""
        if not safe_serialization:
            raise InputError("a sharded model is saved as safetensors: leave out safe_serialization=False")
        most = convert_file_size_to_int(max_shard_size)
        save_safetensors(model, save_directory, max_file_bytes=most, save_original_format=False)  # its default

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> Any:
        """Saves as Accelerate does, but models and optimizers as `zm.Checkpoints`, which load under any layout."""
        with self._without_shards():
            where = super().save_state(output_dir, safe_serialization, **options)
        for _, checkpoints in self._checkpoints(where):
            with checkpoints:
                checkpoints.save(0)
                checkpoints.wait()
        return where

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Loads as Accelerate does, but on any number of ranks and under any strategy."""
        found: list[Any] = []
        hook = self.register_load_state_pre_hook(lambda _, where: found.append(where))
        try:
            with self._without_shards():
                super().load_state(input_dir, load_kwargs, **options)
        finally:
            hook.remove()
        for directory, checkpoints in self._checkpoints(found[0]):
            with checkpoints:
                checkpoints.load(directory, random_states=False)  # accelerate has set those
        for model in self._models:  # accelerate keeps steps in one file per rank; fewer ranks may have saved
            self.step = engine_of(model).control.say(self.step)

    @contextmanager
    def _without_shards(self) -> Iterator[None]:
        """Hides models and optimizers from Accelerate's saving, which would write the first rank's slices for all."""
        names = ("_models", "_optimizers", "_custom_objects")
        held = {name: getattr(self, name) for name in names}
        self.__dict__.update(_models=[], _optimizers=[], _custom_objects=[*map(Registered, held["_custom_objects"])])
        try:
            yield
        finally:
            self.__dict__.update(held)

    def _checkpoints(self, directory: Any) -> Iterator[tuple[str, Checkpoints]]:
        optimizers = [held.optimizer for held in self._optimizers]
        for index, model in enumerate(self._models):
            path = os.path.join(directory, STATES.format(index))
            yield path, checkpoints_of(path, model, optimizers)
