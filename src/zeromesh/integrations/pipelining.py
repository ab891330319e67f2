"""Lets torch.distributed.pipelining drive stages whose modules are sharded, each over its own ranks.

A stage runs each backward in its `backward_maybe_with_nosync`, which is told whether it is the step's last. Torch
handles FSDP2 and DDP there, and we wrap it in `zm.accumulate`. Everything else of schedules and stages is torch's.

[Note: Halves] Zero-bubble schedules run a backward in two halves: first for the gradients of a stage's inputs, later
for those of its parameters. Torch's functions for both go by the module's visible parameters, but a sharded module does
not compute with these. We pass its leaves instead. The second half runs unit by unit, so that each unit is gathered
while the gradients of its parameters are computed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.stage import _PipelineStageBase

from zeromesh.checkpoint.tensors import checksums_of
from zeromesh.engine.api import engine_of
from zeromesh.engine.control import Control
from zeromesh.engine.engine import Engine, Pipeline
from zeromesh.engine.leaf import Leaf
from zeromesh.engine.units import DTYPES
from zeromesh.errors import InputError
from zeromesh.modules import clean_name
from zeromesh.schedule.state import Backward

StageT = TypeVar("StageT", bound=_PipelineStageBase)

ParamGroups = list[dict[str, Any]]
"""The type in which torch's halves of a backward hand over parameters, and autograd nodes with the gradients there."""


def pipeline(stages: Sequence[StageT], *, untied: bool = False) -> list[StageT]:
    """Lets torch's pipeline schedules drive sharded stages. All ranks of the pipeline call it, after `zm.shard`.

    Axes that reduce once a step do so in the last backward of each `schedule.step`. Inside `zm.accumulate(model,
    last=False)` they do not reduce. Zero-bubble schedules are supported. `zm.clip_grad_norm_` of this rank's stages
    takes one norm over all stages, and a GradScaler skips a step on all stages.

    Args:
        stages: all of this rank's stages. Their modules are sharded over the data-parallel ranks of their stage.
        untied: train equal weights of two stages separately, as embedding and head of a model that was tied.

    Returns:
        The same stages, for a schedule.

    Raises:
        ModelError: a stage's module is not sharded.
        InputError: there are no stages, they have different groups, a stage computes its gradients itself
            (`dw_builder`), a stage's module is sharded over ranks of other stages, or it shares parameters with another
            stage (by its configuration, or because an embedding equals a weight of another stage).
        MismatchError: one of these was raised on another rank of the pipeline.

    Example::

        stages = zm.pipeline([PipelineStage(model, index, num_stages, device, group=mesh.get_group("pp"))])
        schedule = Schedule1F1B(stages[0], n_microbatches=8, loss_fn=loss_fn)
    """
    group = stages[0].group if stages else None
    group = group or dist.group.WORLD
    if group is None:
        raise InputError("a pipeline needs torch's process group: call torch.distributed.init_process_group first")
    source = dist.get_global_rank(group, 0)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    device = torch.device(stages[0].device if stages else "cpu")
    control = Control(group=group, size=size, rank=rank, source=source, device=device)
    engines = control.together(lambda: _engines(stages, group), call="zm.pipeline", left="Nothing was changed")
    if not untied:
        _require_untied(stages, engines, control)
    held = {stage.stage_index: weakref.ref(engine) for stage, engine in zip(stages, engines, strict=True)}
    own = [DTYPES[buffer.spec.grad_dtype] for each in engines for unit in each.units for buffer in unit.trained]
    everyone = control.gather(own)
    widest = max(chain([torch.float32], *everyone), key=lambda dtype: dtype.itemsize)
    idle = tuple(rank for rank, dtypes in enumerate(everyone) if not dtypes)
    shared = Pipeline(group=group, stages=held, norm_dtype=widest, idle=idle)
    for stage, engine in zip(stages, engines, strict=True):
        engine.join(shared)
        stage.backward_maybe_with_nosync = _Backwards(engine, stage.backward_maybe_with_nosync)  # type: ignore[method-assign]  # of this object alone
    return list(stages)


def _engines(stages: Sequence[_PipelineStageBase], group: dist.ProcessGroup) -> list[Engine]:
    """Returns the engines of the stages. Raises InputError if a stage cannot be driven."""
    if not stages:
        raise InputError("zm.pipeline takes all stages of this rank, as a list; got none")
    engines = [engine_of(stage.submod) for stage in stages]
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    for stage, engine in zip(stages, engines, strict=True):
        name = f"stage {stage.stage_index}"
        if (stage.group or dist.group.WORLD) is not group:
            raise InputError(f"all stages of a rank need one group; that of {name} is not that of the first")
        if stage.dw_builder is not None:
            raise InputError(
                f"{name} has a dw_builder, whose gradients of parameters zeromesh would not see: leave it out, and "
                f"zero-bubble schedules take autograd's"
            )
        if stage.num_stages > 1 and _says_tied(stage.submod) and not _has_tied(engine):
            raise InputError(
                f"the configuration of {name} ties the input embedding to the output head, which are in different "
                f"stages: each would train its own. Untie them (tie_word_embeddings=False)"
            )
        ranks = [] if engine.control.group is None else dist.get_process_group_ranks(engine.control.group)
        shared = sorted(others.intersection(ranks))
        if shared:
            raise InputError(
                f"the module of {name} is sharded over ranks {ranks}, of which {shared} have other stages of the "
                f"pipeline: give zm.shard the mesh of this stage's data-parallel axes, such as mesh['cluster', 'node']"
            )
    return engines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A weight that another stage may have a copy of."""

    stage: int
    name: str
    shape: tuple[int, ...]  # of the whole parameter
    embeds: bool  # whether it is an embedding's

    def __str__(self) -> str:
        return f"{self.name} of stage {self.stage}"


def _require_untied(stages: Sequence[_PipelineStageBase], engines: Sequence[Engine], control: Control) -> None:
    """Raises InputError, on all ranks, if an embedding has the values of a weight in another stage. Nothing else shows
    that the two are copies of one parameter. Collective."""
    own = [list(_tables(stage, engine)) for stage, engine in zip(stages, engines, strict=True)]
    everyone = chain.from_iterable(chain.from_iterable(control.gather(own)))
    shapes = {table.shape for table in everyone if table.embeds}  # weights of other shapes are not compared
    sums: list[tuple[int, _Table]] = []
    for engine, tables in zip(engines, own, strict=True):
        alike = {table.name: table for table in tables if table.shape in shapes}
        sums += [(total, alike[name]) for name, total in checksums_of(engine, list(alike)).items()]
    by_value = defaultdict[tuple[int, tuple[int, ...]], list[_Table]](list)
    for total, table in chain.from_iterable(control.gather(sums)):
        by_value[total, table.shape].append(table)
    for tables in by_value.values():
        if len({table.stage for table in tables}) > 1 and any(table.embeds for table in tables):
            raise InputError(
                f"{' and '.join(sorted(map(str, tables)))} hold the same values, as copies of one tied parameter do, "
                f"and each stage would train its own: keep them in one stage, or, if they are meant to be trained "
                f"apart from now on, say zm.pipeline(stages, untied=True)"
            )


def _tables(stage: _PipelineStageBase, engine: Engine) -> Iterator[_Table]:
    """Yields the weights of embeddings and linear layers, the kinds that models tie."""
    modules = {clean_name(name): module for name, module in stage.submod.named_modules()}
    for unit in engine.units:
        for buffer in unit.trained:
            for param in buffer.optimizer_params:
                module = modules.get(param.full_name.rpartition(".")[0])
                if isinstance(module, nn.Embedding | nn.Linear) and param.dim() > 1:
                    embeds = isinstance(module, nn.Embedding)
                    yield _Table(stage=stage.stage_index, name=param.full_name, shape=tuple(param.shape), embeds=embeds)


def _says_tied(module: nn.Module) -> bool:
    """Whether the configuration ties embedding and head, as Hugging Face's does; a stage has part of such a model."""
    return bool(getattr(getattr(module, "config", None), "tie_word_embeddings", False))


def _has_tied(engine: Engine) -> bool:
    return any(len(place.info.names) > 1 for unit in engine.units for b in unit.buffers for place in b.places)


class _Backwards:
    """Replaces a stage's `backward_maybe_with_nosync`; `plain` is the original, which runs a whole backward."""

    def __init__(self, engine: Engine, plain: Callable[..., Any]) -> None:
        self._engine = weakref.ref(engine)
        self._plain = plain

    def __call__(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> tuple[Any, Any]:
        engine = self._engine()
        assert engine is not None  # the stage holds the module
        last = last_backward and engine.last
        with engine.accumulate(last, engine.weight):
            if backward_type == "input":
                return _inputs(engine, **bwd_kwargs)
            if backward_type == "weight":
                return (), bwd_kwargs["param_groups"].run(engine)
            result: tuple[Any, Any] = self._plain(backward_type, bwd_kwargs, last_backward=last_backward)
            return result


class _Weight:
    """Stands for a unit's trained leaf, which is usually closed, in torch's halves of a backward: [Note: Halves]."""

    requires_grad = True

    def __init__(self, unit: int, leaf: Leaf) -> None:
        self.unit = unit
        self._leaf = leaf
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            view = leaf.view_as(leaf).grad_fn
            assert view is not None
            self.grad_fn = view.next_functions[0][0]  # where the graph of computations with the leaf ends

    @property
    def grad(self) -> Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            return self._leaf.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._leaf.grad = value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """The second half of a backward, after the first halves in `halves`: [Note: Halves]."""

    halves: list[Backward]
    groups: ParamGroups
    weights: dict[Any, _Weight]  # by the node at which their gradient arrives

    def run(self, engine: Engine) -> None:
        engine.run_weights(self.halves, self._bring)

    def _bring(self, unit: int) -> None:
        mine = [group for group in self.groups if unit < 0 or any(w.unit == unit for w in self._of(group))]
        self.groups[:] = [group for group in self.groups if all(group is not own for own in mine)]
        weights: Any = (weight for group in mine for weight in self._of(group))
        stage_backward_weight(weights, mine)

    def _of(self, group: dict[str, Any]) -> list[_Weight]:
        return [self.weights[node] for node in group["params"]]


def _inputs(
    engine: Engine, stage_output: Any, output_grads: Any, input_values: list[Any]
) -> tuple[tuple[Tensor | None, ...], _Weights]:
    leaves = ((index, leaf) for index, unit in enumerate(engine.units) for b in unit.trained for leaf in b.leaves)
    weights = {weight.grad_fn: weight for weight in starmap(_Weight, leaves)}
    shown: Any = iter(weights.values())
    with engine.inputs_only() as halves:
        grads, groups = stage_backward_input(stage_output, output_grads, input_values, shown)
    return grads, _Weights(halves=halves, groups=groups, weights=weights)
