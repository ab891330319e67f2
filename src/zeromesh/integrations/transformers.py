"""Hugging Face's Trainer over sharded models.

The model is sharded when training, evaluation or prediction begins. By then a Trainer's constructor has done all its
changes to the model (adapters, fused heads, reference models).

A checkpoint is the Trainer's own, with the model as `from_pretrained` takes it. Instead of `optimizer.pt` it has a
directory of `zm.Checkpoints` with masters and optimizer states, which loads on other ranks and under other strategies.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from zeromesh.checkpoint.checkpoints import Checkpoints
from zeromesh.checkpoint.full_state import full_state_dict
from zeromesh.checkpoint.safetensors import INDEX, SINGLE
from zeromesh.engine.api import engine_of
from zeromesh.engine.optim import ELEMENTWISE, steps_elementwise
from zeromesh.errors import CheckpointError, InputError, ModelError, OptimizerError
from zeromesh.integrations.huggingface import load_safetensors
from zeromesh.integrations.methods import (
    ELSEWHERE,
    UNEVEN,
    clip_unscaled,
    is_sharded,
    refuse,
    require_plain,
    require_processes,
    require_sharding,
    shard_model,
    with_mixed_precision,
)
from zeromesh.integrations.saved import checkpoints_of, is_peft
from zeromesh.integrations.versions import require_known, require_overridden
from zeromesh.modules import find_blocks, lacks_values
from zeromesh.sharding.value import Sharding

require_known("transformers")

if TYPE_CHECKING:
    from transformers import Trainer as _Mixed
else:
    _Mixed = object

STATES = "zeromesh"
"""The directory, in a checkpoint of the Trainer, that holds masters and optimizer states."""

SCHEDULER = "scheduler"
SAMPLES = "samples_per_step"


class TrainerMixin(_Mixed):  # type: ignore[misc]  # mypy does not follow transformers
    """Makes a Trainer shard; it comes first among the bases: ``class ShardedSFT(TrainerMixin, trl.SFTTrainer): pass``.

    Args:
        sharding: how the model is sharded. If it has no `param_dtype`, arguments `bf16=True` and `fp16=True` set it.

    Raises:
        InputError: the arguments also ask for another way of sharding, or for work that cannot be done to slices.
        ModelError: the model is sharded already.
        OptimizerError: the optimizer mixes elements of a parameter, or was made for the model before it is sharded.
        MeshError: the mesh has another number of ranks than the job.
    """

    model: Any
    model_wrapped: Any
    optimizer: Any
    _compiling: dict[str, Any] | None

    def __init__(self, *args: Any, sharding: Sharding, **kwargs: Any) -> None:
        require_sharding(sharding)
        self.sharding = sharding
        super().__init__(*args, **kwargs)
        if is_peft(self.model) and "ref" in self.model.peft_config:
            raise ModelError(
                "the Trainer has given the model a second adapter, 'ref', and would change between them, which "
                "changes what is trained and cannot be done once it is sharded: give it the model without adapters and "
                "peft_config=..., or a ref_model where it takes one"
            )
        self._require_optimizer()

    def shard_model(self) -> None:
        """Shards `self.model`, and a frozen reference model, if they are not sharded yet. All ranks call it.

        Training, evaluation, prediction and loading begin with this call.
        """
        if not is_sharded(self.model):
            chosen = with_mixed_precision(self.sharding, self.args.mixed_precision)
            self._sharding = chosen.on(self.args.device.type)
            self.model = self.model_wrapped = self._shard(self.model)
        reference = getattr(self, "ref_model", None)
        if isinstance(reference, nn.Module) and not is_sharded(reference):
            self._shard(reference.requires_grad_(False))

    def _shard(self, model: Any) -> Any:
        if self._compiling is not None:
            for block in find_blocks(model):
                block.compile(**self._compiling)
        shard_model(self._sharding, model)
        # Adds autocast, and marks the model so that `prepare` leaves it alone later, without DistributedDataParallel.
        return self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)

    # ---- where sharding begins

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        self.shard_model()
        return super().create_optimizer(model)

    @override
    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.shard_model()
        return super()._inner_training_loop(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.shard_model()
        return super().evaluation_loop(*args, **kwargs)

    @override
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does not move whole tensors if there is a mesh or some have no values: shards will be there."""
        if self.sharding.mesh is None and not any(map(lacks_values, model.parameters())):
            super()._move_model_to_device(model, device)

    # ---- wrong input

    def create_accelerator_and_postprocess(self) -> None:
        refuse(["deepspeed"] if self.args.deepspeed_plugin is not None else [])  # before it sets itself up
        super().create_accelerator_and_postprocess()
        self._require_alone()
        plugin = self.accelerator.state.dynamo_plugin
        self._compiling = None if plugin.backend == DynamoBackend.NO else plugin.to_kwargs()
        plugin.backend = DynamoBackend.NO  # compile blocks, not the whole model: between blocks parameters come and go
        if self.sharding.mesh is not None:  # shards are on its devices; loaders still place and hand out batches
            prepare = self.accelerator.prepare_model
            self.accelerator.prepare_model = partial(prepare, device_placement=False)
        self.accelerator.clip_grad_norm_ = partial(clip_unscaled, self.accelerator)

    def _require_alone(self) -> None:
        args = self.args
        require_plain(self.model)
        refused = {
            "fsdp": bool(args.fsdp) or self.is_fsdp_enabled,
            "parallelism_config": args.parallelism_config is not None,
            "bf16_full_eval": args.bf16_full_eval,
            "fp16_full_eval": args.fp16_full_eval,
            "save_on_each_node": args.save_on_each_node,
            "sync_ref_model": getattr(args, "sync_ref_model", False),
            "even_batches=False": not self.accelerator.even_batches,
        }
        named = [name for name, given in refused.items() if given]
        refuse(named, _INSTEAD.get(named[0], ELSEWHERE) if named else "")
        if args.n_gpu > 1:
            raise InputError(
                f"this process sees {args.n_gpu} GPUs, over which the Trainer would copy the model: start one process "
                f"for each with torchrun"
            )
        require_processes(self.sharding, self.accelerator.num_processes)

    def _require_optimizer(self) -> None:
        if self.optimizer is not None:
            raise OptimizerError(
                "optimizers=(...) holds an optimizer of the model as it is before it is sharded, so the sharded one "
                "would never be updated: give optimizer_cls_and_kwargs=(class, options), or override create_optimizer"
            )
        kind, _ = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        overridden = type(self).create_optimizer is not TrainerMixin.create_optimizer
        if not overridden and not (isinstance(kind, type) and issubclass(kind, Optimizer) and steps_elementwise(kind)):
            raise OptimizerError(
                f"each rank holds a slice of every parameter, so the optimizer must work element by element; "
                f"optim={self.args.optim.value} ({getattr(kind, '__name__', kind)}) is not known to: use adamw_torch, "
                f"adamw_torch_fused, sgd, adagrad, rmsprop or another of torch's {', '.join(sorted(ELEMENTWISE))} "
                f"(optimizer_cls_and_kwargs), or override create_optimizer and vouch for yours with zm.elementwise"
            )

    # ---- checkpoints

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if is_sharded(self.model) and not self.args.should_save:  # their part of `_save`
            if hasattr(self.model, "save_pretrained"):
                self.model.save_pretrained(output_dir or self.args.output_dir, is_main_process=False)
            else:
                full_state_dict(self.model)
        super().save_model(output_dir, _internal_call)

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        gathers = state_dict is None and is_sharded(self.model) and self.args.should_save
        if gathers and not hasattr(self.model, "save_pretrained"):
            state_dict = full_state_dict(self.model)
        super()._save(output_dir, state_dict)

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = {SCHEDULER: self.lr_scheduler.state_dict(), SAMPLES: self._samples_per_step()}
        with self._checkpoints(output_dir) as checkpoints:
            checkpoints.save(self.state.global_step, state)
            checkpoints.wait()

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.shard_model()
        if self._has(resume_from_checkpoint, STATES):
            return  # they come with the optimizer's states
        if is_peft(self.model) or not self._has(resume_from_checkpoint, SINGLE, INDEX):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_safetensors(self.model, resume_from_checkpoint)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._has(checkpoint, STATES):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        with self._checkpoints(checkpoint) as checkpoints:
            # The Trainer itself sets random states, after it has skipped the batches that were trained on.
            found = checkpoints.load(os.path.join(checkpoint, STATES), random_states=False)
        assert found is not None  # None is for other calls, without a path
        self._require_same_samples(checkpoint, found.state)
        self.lr_scheduler.load_state_dict(found.state[SCHEDULER])

    @override
    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if is_peft(self.model) or best is None:
            super()._load_best_model()
        else:
            load_safetensors(self.model, best)

    def _checkpoints(self, directory: str) -> Checkpoints:
        held = self.optimizer
        own = held.optimizer if isinstance(held, AcceleratedOptimizer) else held
        return checkpoints_of(os.path.join(directory, STATES), self.model, [own])

    def _has(self, checkpoint: str, *names: str) -> bool:
        """Whether the first rank finds a file or directory of one of these names in a checkpoint."""
        return engine_of(self.model).control.say(any(os.path.exists(os.path.join(checkpoint, name)) for name in names))

    def _samples_per_step(self) -> int:
        processes = 1 if self.accelerator.split_batches else self.args.world_size
        return int(self._train_batch_size * self.args.gradient_accumulation_steps * processes)

    def _require_same_samples(self, checkpoint: str, state: dict[str, Any]) -> None:
        """Raises CheckpointError if a step takes another number of samples than when it was saved: the Trainer skips
        data by counting this run's steps."""
        saved, own = state.get(SAMPLES), self._samples_per_step()
        if saved != own and not self.args.ignore_data_skip:
            raise CheckpointError(
                f"{checkpoint} was written with {saved} samples a step, and this run takes {own} (processes x "
                f"per_device_train_batch_size x gradient_accumulation_steps), so it would go on at another place in "
                f"the data: set them so that their product is {saved}, or pass ignore_data_skip=True"
            )


_NO_CAST = (
    "a sharded model cannot be cast; with bf16=True, or Sharding(param_dtype=...), it computes in that everywhere"
)
_INSTEAD = {
    "bf16_full_eval": _NO_CAST,
    "fp16_full_eval": _NO_CAST,
    "save_on_each_node": "all ranks write one checkpoint, to a directory that all of them see",
    "sync_ref_model": "it mixes the model's parameters with the reference's, which are sharded in another way",
    "even_batches=False": UNEVEN,
}


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]  # transformers is not followed by mypy
    """transformers' Trainer with one more argument: `sharding`."""


require_overridden("transformers", TrainerMixin, transformers.Trainer)
