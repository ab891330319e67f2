"""Strategies for Lightning's Trainer and for Fabric that shard models.

Processes, devices and samplers are those of Lightning's DDP strategies. A checkpoint is a directory. It has models and
optimizers as `zm.Checkpoints`, which load on any ranks and under any strategy, and all else in one file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partialmethod
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy as TrainerDDP
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from zeromesh.engine.api import engine_of
from zeromesh.engine.hooks import install, install_on_method
from zeromesh.engine.optim import by_engine, check_optimizer
from zeromesh.engine.steps import accumulate
from zeromesh.engine.whole import sliced_like, whole_state
from zeromesh.errors import CheckpointError, InputError
from zeromesh.integrations.methods import (
    UNEVEN,
    clip_grads,
    give_shards,
    refuse,
    require_plain,
    require_sharding,
    shard_model,
    with_mixed_precision,
)
from zeromesh.integrations.saved import checkpoints_of
from zeromesh.integrations.versions import require_attributes, require_known
from zeromesh.sharding.value import Sharding

require_known("lightning")

AVERAGES = frozenset({"WeightAveraging", "StochasticWeightAveraging"})
"""Lightning's callbacks that average weights, and their subclasses. Some versions have only one of the two."""

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods that are forwards. Fabric makes them so itself only if a strategy puts a wrapper around the module."""

REST = "rest"
"""Key in the state of a model's checkpoint. Its value is the name of the file with all that is neither model nor
optimizer."""

MODEL = "model"
"""The directory, in a checkpoint of the Trainer, of the module and its optimizers."""

OPTIONS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "precision",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
)
"""Options of Lightning's DDP strategies that are not about DistributedDataParallel or files."""


def _require_options(options: Mapping[str, Any]) -> None:
    why = f"of the options of Lightning's DDPStrategy there are {', '.join(OPTIONS)}"
    refuse([name for name in options if name not in OPTIONS], why)


def _require_no_averages(callbacks: Iterable[object]) -> None:
    """Raises InputError for Lightning's callbacks that average weights: they copy the module before it is sharded."""
    for callback in callbacks:
        if AVERAGES.intersection(kind.__name__ for kind in type(callback).__mro__):
            raise InputError(
                f"{type(callback).__name__} copies the module before it is sharded, so it would average whole tensors "
                f"with slices: leave the callback out, and keep the average in the module as a list of clones, "
                f"[p.detach().clone() for p in self.parameters()], made in on_fit_start and updated in "
                f"on_train_batch_end"
            )


def _sharding_of(sharding: Sharding, precision: str, device: torch.device) -> Sharding:
    mixed = precision.removesuffix("-mixed") if precision.endswith("-mixed") else None
    return with_mixed_precision(sharding, "fp16" if mixed == "16" else mixed).on(device.type)


# ---- a checkpoint: a directory of `zm.Checkpoints` for each model, and one file that their states name. If saving over
# an old checkpoint is interrupted, one of the two is intact; with several models, loading may say that neither is.


def _save(
    directory: Path,
    models: Mapping[str, nn.Module],
    optimizers: Sequence[Optimizer],
    rest: Mapping[str, Any],
    *,
    step: int,
    name: str,
    first: bool,
) -> None:
    held = _held(models, optimizers)
    whole = whole_state(rest)  # a moving average, say, may be in slices
    if first:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(whole, directory / name)
    for key, own in held.items():
        with checkpoints_of(directory / key, models[key], own) as checkpoints:
            checkpoints.save(step, {REST: name})
            checkpoints.wait()
    if first:
        for file in directory.glob(f"{REST}-*.pt"):
            if file.name != name:
                file.unlink()


def _load(
    directory: Path, models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer], weights_only: bool | None
) -> dict[str, Any]:
    names = set()
    for key, own in _held(models, optimizers).items():
        restored = checkpoints_of(directory / key, models[key], own).load(
            directory / key, optimizers=bool(own), random_states=bool(own)
        )
        assert restored is not None  # None is for other calls, without a path
        names.add(restored.state.get(REST))
    if len(names) > 1 or not (directory / str(*names)).is_file():
        raise CheckpointError(
            f"{directory} must hold models of one save and the file that they name; they name "
            f"{sorted(map(str, names))}: a save over an older one was interrupted, or it is no checkpoint of "
            f"Lightning's; load another"
        )
    found: dict[str, Any] = torch.load(
        directory / str(*names), map_location="cpu", weights_only=weights_only is not False
    )
    return found


def _held(models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, list[Optimizer]]:
    """Returns, by model, the optimizers that update it."""
    held = {name: [one for one in optimizers if engine_of(model) in by_engine(one)] for name, model in models.items()}
    if not all(any(one in own for own in held.values()) for one in optimizers):
        raise InputError("an optimizer is saved and loaded with the model that it updates: give that model too")
    return held


def _given(weights_only: bool | None) -> dict[str, bool]:
    """Passes the option on if it was given: Lightning has it from 2.6 on."""
    return {} if weights_only is None else {"weights_only": weights_only}


def _directory(path: Any) -> Path:
    if "://" in str(path):
        raise InputError(f"checkpoints of sharded models go to a directory that all ranks see; got {path}")
    return Path(path)


class _SyncControl(_BackwardSyncControl):  # type: ignore[misc]  # mypy does not follow lightning
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[object]:
        return accumulate(module, last=False) if enabled else nullcontext()


class FabricStrategy(FabricDDP):  # type: ignore[misc]
    """Strategy for `lightning.Fabric`.

    Args:
        sharding: how models are sharded. If it has no `param_dtype`, Fabric's precision sets it.
        options: for Lightning's DDPStrategy: cluster_environment, process_group_backend, timeout, start_method ...

    Raises:
        InputError: an option configures DistributedDataParallel.
    """

    def __init__(self, *, sharding: Sharding, **options: Any) -> None:
        require_sharding(sharding)
        _require_options(options)
        super().__init__(**options)
        self.sharding = sharding
        self._sharding: Sharding | None = None
        self._shards: Any = WeakIdKeyDictionary()
        require_attributes("lightning", self, "_backward_sync_control")
        self._backward_sync_control = _SyncControl()

    def setup_module(self, module: nn.Module) -> nn.Module:
        require_plain(module)
        if self._sharding is None:
            self._sharding = _sharding_of(self.sharding, self.precision.precision, self.root_device)
        self._shards.update(shard_model(self._sharding, module))
        automatic = getattr(module, "automatic_optimization", True)  # if not, a step runs its own backwards
        for name in STEPS if automatic else ():
            if hasattr(type(module), name):
                install_on_method(engine_of(module), module, name)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        give_shards(optimizer, self._shards)
        return optimizer

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.precision.unscale_gradients(optimizer)
        params = self.precision.main_params(optimizer)
        return clip_grads(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def module_to_device(self, module: nn.Module) -> None:
        """Does not move whole tensors if there is a mesh: shards will be on its devices."""
        if self.sharding.mesh is None:
            super().module_to_device(module)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        models, optimizers, rest = _sorted(state)
        if not models and not optimizers:  # state dicts, say, go to a file as any strategy writes it
            super().save_checkpoint(path, whole_state(state), storage_options, filter)
            return
        if storage_options is not None or filter is not None:
            raise InputError("checkpoints of sharded models take no storage_options and no filter: leave them out")
        directory = _directory(self.broadcast(path))
        name = self.broadcast(f"{REST}-{uuid4().hex}.pt")
        _save(directory, models, optimizers, rest, step=0, name=name, first=self.is_global_zero)
        self.barrier()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads into `state`. Returns saved entries other than models and optimizers that `state` does not ask for."""
        directory = _directory(self.broadcast(path))
        if self.broadcast(directory.is_file()):  # a file has whole tensors
            return super().load_checkpoint(path, state, strict, **_given(weights_only))  # type: ignore[no-any-return]
        if not isinstance(state, dict) or not any(isinstance(value, nn.Module) for value in state.values()):
            raise InputError("to load a checkpoint of sharded models give the dict of what was saved: {'model': model}")
        models, optimizers, rest = _sorted(state)
        saved = _load(directory, models, optimizers, weights_only)
        missing = rest.keys() - saved.keys()
        if strict and missing:
            raise KeyError(f"{directory} has no {', '.join(sorted(missing))}: leave it out, or pass strict=False")
        for name in rest.keys() & saved.keys():
            found = sliced_like(rest[name], saved[name])
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(found)
            else:
                state[name] = found
        return {name: value for name, value in saved.items() if name not in rest}


def _sorted(state: Mapping[str, Any]) -> tuple[dict[str, nn.Module], list[Optimizer], dict[str, Any]]:
    """Splits `state` into models by name, optimizers, and the rest in the form in which it is saved."""
    models = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
    others = {name: value for name, value in state.items() if not isinstance(value, nn.Module | Optimizer)}
    rest = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in others.items()}
    return models, optimizers, rest


class Strategy(TrainerDDP):  # type: ignore[misc]
    """Strategy for `lightning.Trainer`. The LightningModule is sharded as a whole, after its `configure_model`.

    Args:
        sharding: how the module is sharded. If it has no `param_dtype`, the Trainer's precision sets it.
        options: for Lightning's DDPStrategy: cluster_environment, process_group_backend, timeout, start_method ...

    Raises:
        InputError: an option configures DistributedDataParallel.
    """

    model: Any

    def __init__(self, *, sharding: Sharding, **options: Any) -> None:
        require_sharding(sharding)
        _require_options(options)
        super().__init__(**options)
        require_attributes("lightning", self, "_layer_sync")
        require_attributes("lightning", Trainer, "_active_loop")
        self.sharding = sharding
        self._own: Any = None
        self._loaded_ours = False

    # ---- setting up

    def connect(self, model: Any) -> None:
        if model is not self._own:
            require_plain(model)
        super().connect(model)

    def setup(self, trainer: Any) -> None:
        if self._layer_sync is not None:
            refuse(["sync_batchnorm=True"], "convert the module's layers before")
        _require_no_averages(trainer.callbacks)
        self.accelerator.setup(trainer)
        if self.model is not self._own:
            self.model = self.precision_plugin.convert_module(self.model)
            if self.sharding.mesh is None:
                self.model_to_device()
            sharding = _sharding_of(self.sharding, self.precision_plugin.precision, self.root_device)
            shard_model(sharding, self.model)
            if not self.model.automatic_optimization:  # a step calls child modules, each as a forward of its own
                engine = engine_of(self.model)
                parts = [part for part in self.model.children() if part not in engine.called]
                install(engine, 0, parts, engine.precision.param, alone=True)
            _update_properties(self.model, device=self.root_device)  # so that the module's `self.device` is right
            self._own = self.model
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                check_optimizer(optimizer)  # raises now, not at the first step
        self.setup_precision_plugin()
        plugin = self.precision_plugin
        plugin.clip_grad_by_norm = lambda optimizer, most: clip_grads(plugin.main_params(optimizer), most)

    def teardown(self) -> None:
        """Tears down all but the model: Lightning would move its slices to the host, and they must stay here."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # ---- steps

    def _require_as_many_batches(self) -> None:
        """Raises InputError on all ranks if they have different numbers of batches: those with more would wait for
        ever. Lightning's sampler for predictions gives some ranks fewer, since it repeats no samples."""
        engine = engine_of(self.model)
        if not engine.schedule.shards_params:
            return
        batches = sum(self.lightning_module.trainer._active_loop.max_batches)
        own = int(batches) if math.isfinite(batches) else 0  # a loader without length counts as 0
        most, fewest = engine.control.agree([own, -own])
        if most != -fewest:
            raise InputError(
                f"{UNEVEN}; this one has {own} batches, and the ranks have {-fewest} to {most}: choose another "
                f"batch_size, limit the Trainer's batches (limit_predict_batches={-fewest}, say), or give loaders of "
                f"equal length and use_distributed_sampler=False"
            )

    on_validation_start = on_test_start = on_predict_start = _require_as_many_batches

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with accumulate(self.model, last=False):
            yield

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Runs the last micro-batch before the optimizer's step, which checks that gradients have been reduced."""
        result = closure()
        return super().optimizer_step(optimizer, lambda: result, model, **kwargs)

    def _step(self, name: str, context: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a step, in the precision plugin's context, as a forward of the whole module, so that the module's own
        parameters are gathered. With manual optimization it runs as a method, since backwards and optimizer steps
        happen inside it."""
        module = self.lightning_module
        forward = module.forward

        def step(*args: Any, **kwargs: Any) -> Any:
            module.forward = forward  # the step may call it
            return getattr(module, name)(*args, **kwargs)

        with getattr(self.precision_plugin, context)():
            if name == "training_step" and not module.automatic_optimization:
                return module.training_step(*args, **kwargs)
            module.forward = step
            return module(*args, **kwargs)

    training_step = partialmethod(_step, "training_step", "train_step_context")
    validation_step = partialmethod(_step, "validation_step", "val_step_context")
    test_step = partialmethod(_step, "test_step", "test_step_context")
    predict_step = partialmethod(_step, "predict_step", "predict_step_context")

    # ---- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns nothing: `save_checkpoint` saves the model itself."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise InputError("checkpoints of sharded models take no storage_options: leave them out")
        name, path = self.broadcast((f"{REST}-{uuid4().hex}.pt", filepath))
        optimizers = self.optimizers if "optimizer_states" in checkpoint else ()
        models, step = {MODEL: self.model}, checkpoint["global_step"]
        _save(_directory(path), models, optimizers, checkpoint, step=step, name=name, first=self.is_global_zero)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        directory = _directory(self.broadcast(checkpoint_path))
        self._loaded_ours = self.broadcast(directory.is_dir())
        trainer = self.lightning_module.trainer
        found: dict[str, Any]
        if self._loaded_ours:
            trained = trainer.state.fn == TrainerFn.FITTING
            found = _load(directory, {MODEL: self.model}, self.optimizers if trained else (), weights_only)
        else:  # a file of another strategy, with whole tensors
            found = super().load_checkpoint(directory, **_given(weights_only))
        states = found.get("callbacks", {})
        for callback in trainer.callbacks:
            if callback.state_key in states:
                states[callback.state_key] = sliced_like(callback.state_dict(), states[callback.state_key])
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._loaded_ours:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self._loaded_ours:
            super().load_optimizer_state_dict(checkpoint)
