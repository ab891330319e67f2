"""What is saved and loaded together: a model, or all stages of a pipeline under the names of the whole model.

To a checkpoint the ranks of a pipeline are one more axis that the model is spread over: [Note: Beyond] of
`zeromesh.engine.control`. A rank writes and reads what its own stages have, and knows what there is in the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from torch import nn

from zeromesh.checkpoint import extra
from zeromesh.checkpoint.collect import MODEL, buffers_of
from zeromesh.checkpoint.full_state import persistent_buffers
from zeromesh.checkpoint.manifest import TensorEntry
from zeromesh.engine.api import engine_of
from zeromesh.engine.control import Control, gather_over
from zeromesh.engine.engine import Engine
from zeromesh.engine.pipeline import Pipeline, require_joint
from zeromesh.errors import InputError
from zeromesh.pieces.piece import DTYPE_NAMES

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor as a checkpoint has it.

    Args:
        names: there; of a tied parameter all.
        entry: without chunks.
        is_parameter: and no buffer.
    """

    names: tuple[str, ...]
    entry: TensorEntry
    is_parameter: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """This rank's part of what is saved and loaded.

    Args:
        models: a model, or this rank's stages.
        engines: theirs.
        control: all ranks of all stages.
        stages: of a pipeline, what each of all its stages has.
        common: names of what several stages have, which must be the same in all.
    """

    models: tuple[nn.Module, ...]
    engines: tuple[Engine, ...]
    control: Control
    stages: Mapping[int, Sequence[Saved]] = field(default_factory=dict)
    common: frozenset[str] = frozenset()

    @classmethod
    def of(cls, models: nn.Module | Sequence[nn.Module], directory: str | os.PathLike[str]) -> Self:
        """All ranks call it, with this rank's.

        Args:
            models: a model, or this rank's stages of a pipeline.
            directory: where they are saved.

        Raises:
            ModelError: one is not sharded.
            InputError: there are none; they are not all of this rank's stages; stages that cannot be saved as one
                model, on all ranks.
        """
        own = (models,) if isinstance(models, nn.Module) else tuple(models)
        engines = tuple(map(engine_of, own))
        pipeline = next((engine.pipeline for engine in engines if engine.pipeline is not None), None)
        if pipeline is None:
            if len(own) != 1:
                raise InputError(
                    f"a checkpoint is of one model, or of all stages of a pipeline, for which call zm.pipeline(stages) "
                    f"first; got {len(own)} models that are in none"
                )
            return cls(models=own, engines=engines, control=engines[0].control)
        _require_joint(engines, pipeline, os.fspath(directory))
        control = engines[0].control
        indices = [index for engine in engines for index, held in pipeline.stages.items() if held() is engine]
        held = {i: tuple(_tensors(model, engine)) for i, model, engine in zip(indices, own, engines, strict=True)}
        extras = {i: extra.extra_names(model) for i, model in zip(indices, own, strict=True)}
        stages: dict[int, Sequence[Saved]] = {}
        states = list[str]()
        for found, names in gather_over(pipeline.group, (held, extras)):
            stages |= found
            states += [extra.PREFIX + name for each in names.values() for name in each]
        common = _common(stages) | {name for name in states if states.count(name) > 1}
        control = replace(control, beyond=(*control.beyond, pipeline.group))
        return cls(models=own, engines=engines, control=control, stages=stages, common=common)

    def along(self, value: T) -> list[T]:
        """Every value along the pipeline; this rank's alone without one."""
        pipeline = self.engines[0].pipeline
        return gather_over(None if pipeline is None else pipeline.group, value)

    def tensors(self) -> list[Saved]:
        """All of the model's parameters and buffers, in whatever stage."""
        if self.stages:
            return [tensor for stage in sorted(self.stages) for tensor in self.stages[stage]]
        return [t for model, engine in zip(self.models, self.engines, strict=True) for t in _tensors(model, engine)]


def _require_joint(engines: Sequence[Engine], pipeline: Pipeline, directory: str) -> None:
    """Raises InputError on all ranks of the pipeline unless they can save together.

    Before anything is exchanged over all: the ranks of one line of the pipeline alone are sure to be there.
    """
    problem = ""
    try:
        require_joint(engines)
    except InputError as error:
        problem = str(error)
    worlds = [engine.control.world for engine in engines]
    found = gather_over(pipeline.group, (problem, worlds, directory))
    for rank, (reason, _, _) in enumerate(found):
        if reason:
            raise InputError(
                problem or f"zm.Checkpoints must be given its stages on all ranks; on rank {rank}: {reason}"
            )
    if len({world for _, worlds, _ in found for world in worlds}) > 1:
        raise InputError(
            f"stages that are saved as one model must each be spread over as many ranks, of data and of tensor "
            f"parallelism together; along the pipeline these are over {[worlds for _, worlds, _ in found]}: a stage "
            f"that has no DTensor needs the ranks of 'tp' in its mesh, at stage 0"
        )
    directories = sorted({where for _, _, where in found})
    if len(directories) > 1:
        raise InputError(
            f"all stages of a pipeline are saved in one directory; its ranks name {', '.join(directories)}: give all "
            f"ranks the same"
        )


def _tensors(model: nn.Module, engine: Engine) -> Iterator[Saved]:
    for buffer in buffers_of(engine):
        for param, place in zip(buffer.optimizer_params, buffer.places, strict=True):
            names = tuple(MODEL + name for name in place.info.names)
            shape = param.piece(names[0], param.local).shape
            entry = TensorEntry(dtype=DTYPE_NAMES[param.local.dtype], shape=shape, chunks=())
            yield Saved(names=names, entry=entry, is_parameter=True)
    for name, held in persistent_buffers(model):
        entry = TensorEntry(dtype=DTYPE_NAMES[held.dtype], shape=tuple(held.shape), chunks=())
        yield Saved(names=(MODEL + name,), entry=entry, is_parameter=False)


def _common(stages: Mapping[int, Sequence[Saved]]) -> frozenset[str]:
    """The names that several stages have.

    Raises:
        InputError: a parameter's, or of buffers that differ in shape or dtype.
    """
    first: dict[str, tuple[int, Saved]] = {}
    common = set()
    for stage in sorted(stages):
        for tensor in stages[stage]:
            for name in tensor.names:
                other, held = first.setdefault(name, (stage, tensor))
                if other == stage:
                    continue
                common.add(name)
                if tensor.is_parameter or held != tensor:
                    raise InputError(
                        f"stages {other} and {stage} both have {name.removeprefix(MODEL)!r}, with shapes "
                        f"{held.entry.shape} and {tensor.entry.shape}; of the whole model there is one. Parameters of "
                        f"stages must have the names that they have in the whole model (keep blocks in a ModuleDict by "
                        f"their number), and buffers of one name must be the same"
                    )
    return frozenset(common)
