"""A sharded model and its optimizers as named pieces of tensors, for this rank to write and fill.

For a checkpoint, the ranks of a pipeline are one more axis that the model is spread over: [Note: Beyond] of
`zeromesh.engine.control`. A rank writes and reads the tensors of its own stages, and knows the names of the others.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.checkpoint.full_state import buffers_of, persistent_buffers, require_names, require_own
from zeromesh.checkpoint.manifest import DamagedError, TensorEntry
from zeromesh.checkpoint.read import Reader, require_match
from zeromesh.checkpoint.states import EXTRA, Own, extra_names, is_plain_number
from zeromesh.engine.api import engine_of
from zeromesh.engine.control import Control, gather_over
from zeromesh.engine.engine import Engine, Pipeline
from zeromesh.engine.flat import FlatShards
from zeromesh.engine.optim import WHOLE, is_number, take_slices
from zeromesh.engine.param import ShardedParameter, Slice
from zeromesh.engine.steps import require_joint
from zeromesh.engine.vouched import stored
from zeromesh.errors import CheckpointError, InputError
from zeromesh.owners.optimizer import OwnerOptimizer
from zeromesh.pieces.piece import DTYPE_NAMES, DTYPES, Piece, share, whole
from zeromesh.pieces.region import Region

MODEL = "model."
STATE = "optim.state."


# ---- inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A parameter or buffer in a checkpoint: its names (a tied parameter has several) and an entry without chunks."""

    names: tuple[str, ...]
    entry: TensorEntry
    is_parameter: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """This rank's part of a save or load."""

    models: tuple[nn.Module, ...]  # a model, or this rank's stages
    engines: tuple[Engine, ...]
    control: Control  # over all ranks of all stages
    stages: Mapping[int, Sequence[Saved]] = field(default_factory=dict)  # in a pipeline, the tensors of all its stages
    common: frozenset[str] = frozenset()  # names that several stages have, with equal values

    @classmethod
    def of(cls, models: nn.Module | Sequence[nn.Module], directory: str | os.PathLike[str]) -> Self:
        """All ranks call this, each with a model or its pipeline stages, and with the directory for saving. Raises
        ModelError if a model is not sharded. Raises InputError, on all ranks, if there are no models, they are not all
        of this rank's stages, or they cannot be saved as one model."""
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
        extras = [EXTRA + name for model in own for name in extra_names(model)]
        stages: dict[int, Sequence[Saved]] = {}
        states = list[str]()
        for found, names in gather_over(pipeline.group, (held, extras)):
            stages |= found
            states += names
        common = _common(stages) | {name for name in states if states.count(name) > 1}
        control = replace(control, beyond=(*control.beyond, pipeline.group))
        return cls(models=own, engines=engines, control=control, stages=stages, common=common)

    def tensors(self) -> list[Saved]:
        """Returns all parameters and buffers of the model, in all stages."""
        if self.stages:
            return [tensor for stage in sorted(self.stages) for tensor in self.stages[stage]]
        return [*_tensors(self.models[0], self.engines[0])]

    def params(self) -> Iterator[tuple[ShardedParameter, tuple[str, ...]]]:
        """Yields this rank's slices, each with all of its parameter's names."""
        for engine in self.engines:
            for buffer in buffers_of(engine):
                for param, place in zip(buffer.optimizer_params, buffer.places, strict=True):
                    yield param, place.info.names

    def names(self) -> dict[Tensor, Sequence[str]]:
        return dict(self.params())


def _require_joint(engines: Sequence[Engine], pipeline: Pipeline, directory: str) -> None:
    """Raises InputError on all ranks of the pipeline unless they can save together.

    This comes before any exchange over all ranks: only the ranks along the pipeline are sure to be there.
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
            entry = TensorEntry(dtype=DTYPE_NAMES[param.local.dtype], shape=place.region.shape, chunks=())
            yield Saved(names=tuple(MODEL + name for name in place.info.names), entry=entry, is_parameter=True)
    for name, held in persistent_buffers(model):
        entry = TensorEntry(dtype=DTYPE_NAMES[held.dtype], shape=tuple(held.shape), chunks=())
        yield Saved(names=(MODEL + name,), entry=entry, is_parameter=False)


def _common(stages: Mapping[int, Sequence[Saved]]) -> frozenset[str]:
    """Returns the names that several stages have. Raises InputError if such a name is a parameter's, or that of buffers
    with different shapes or dtypes."""
    first: dict[str, tuple[int, Saved]] = {}
    common = set()
    for stage, tensor, name in ((s, t, name) for s in sorted(stages) for t in stages[s] for name in t.names):
        other, held = first.setdefault(name, (stage, tensor))
        if other == stage:
            continue
        common.add(name)
        if tensor.is_parameter or held != tensor:
            raise InputError(
                f"stages {other} and {stage} both have {name.removeprefix(MODEL)!r}, with shapes {held.entry.shape} "
                f"and {tensor.entry.shape}; of the whole model there is one. Parameters of stages must have the names "
                f"that they have in the whole model (keep blocks in a ModuleDict by their number), and buffers of one "
                f"name must be the same"
            )
    return frozenset(common)


# ---- writing


def replica_of(buffer: FlatShards) -> tuple[int, int]:
    """Returns (this rank's index, count) among the ranks of the mesh that hold the same slices."""
    held = {axis.name for axis in buffer.optimizer_shard[1]}
    index, count = 0, 1
    for axis in buffer.placed.layout.axes:
        if axis.name not in held:
            index, count = index * axis.size + buffer.coordinates[axis.name], count * axis.size
    return index, count


def param_piece(param: ShardedParameter, prefix: str = MODEL) -> Piece:
    """A parameter's slice as a piece that shares its memory."""
    return param.piece(prefix + param.full_name, param.local)


def param_rows(buffer: FlatShards, names: Collection[str] | None = None) -> Iterator[Piece]:
    """Yields ranges of whole parameters (of those in `names`, if given) under their own names. Replicas share the work:
    each element is on one rank."""
    params = [p for p in buffer.optimizer_params if p.writes and (names is None or p.full_name in names)]
    for piece in share([param_piece(param, prefix="") for param in params], *replica_of(buffer)):
        yield from piece.rows()


def collect(held: Held, optimizers: Sequence[Optimizer], *, frozen: bool) -> Iterator[Piece]:
    """The pieces that this rank writes: parameters, `frozen` ones only if asked for, buffers and optimizer states.

    Together, the pieces of all ranks cover every tensor once. A tensor without elements may come from several ranks.
    """
    states = _states(optimizers)
    for model, engine in zip(held.models, held.engines, strict=True):
        require_own(engine)
        for buffer in buffers_of(engine):
            pieces, numbers, wanted = list[Piece](), list[Piece](), frozen or buffer.spec.trainable
            for param in buffer.optimizer_params:
                own = states.pop(param, {})  # frozen ones may have states: Adagrad's do
                if wanted and param.writes:
                    pieces.append(param_piece(param))
                    for key, (value, region) in sorted(own.items()):
                        found = _state_pieces(param, key, value, region)
                        (pieces if value.dim() or region is not None else numbers).extend(found)
            yield from share([piece for piece in pieces if prod(piece.shape)], *replica_of(buffer))
            yield from (piece for piece in pieces if not prod(piece.shape))
            yield from numbers if engine.control.first else ()
        unsharded = [whole(MODEL + name, tensor) for name, tensor in persistent_buffers(model)]
        yield from unsharded if engine.control.first else ()  # made on all ranks, so that all raise its errors
    known, others = held.names(), {param for param in states if not isinstance(param, ShardedParameter)}
    for params in ({p for group in each.param_groups for p in group["params"]} for each in optimizers):
        if params.isdisjoint(known):  # a group of another sharded model is saved with that model
            others |= params & states.keys()
    if others:
        names = sorted({getattr(param, "full_name", type(param).__name__) for param in others})
        raise CheckpointError(
            f"an optimizer has states of others than this model's parameters ({', '.join(names[:3])}): make it from "
            f"parameters after zm.shard, of this model alone or of several sharded ones"
        )


def aliases_of(held: Held, *, frozen: bool) -> dict[str, str]:
    """Returns further names of tied parameters, each with the name that the tensor is saved under."""
    known = [names for param, names in held.params() if frozen or param.requires_grad]
    return {MODEL + alias: MODEL + names[0] for names in known for alias in names[1:]}


def _states(optimizers: Sequence[Optimizer]) -> dict[Tensor, dict[str, tuple[Tensor, Region | None]]]:
    """Returns by parameter its states on this rank, each with its region (None: the slice's)."""
    states: dict[Tensor, dict[str, tuple[Tensor, Region | None]]] = {}
    for optimizer in optimizers:
        take_slices(optimizer)
        for param, values in optimizer.state.items():
            region = WHOLE.get(optimizer, {}).get(param)  # type: ignore[call-overload]  # others have none
            found = states[param] = {}
            for key, value in values.items():
                if isinstance(value, Tensor):
                    parts = stored(key, value.local if isinstance(value, Slice) else value)
                    found.update({name: (part, region) for name, part in parts.items()})
                elif is_plain_number(value):
                    dtype = torch.float64 if isinstance(value, float) else torch.int64  # as exact as in Python
                    found[key] = torch.tensor(value, dtype=dtype, device="cpu"), region
                elif value is not None:
                    raise CheckpointError(
                        f"states of {type(optimizer).__name__} must be tensors or numbers to be saved; {key!r} is "
                        f"{type(value).__name__}"
                    )
    return states


def number_names(optimizers: Sequence[Optimizer], own: Own) -> list[str]:
    """Names of this rank's states that are Python numbers, not tensors. Torch computes with integer tensors in fp32, so
    a run resumed with tensors would round differently."""
    states = [item for optimizer in optimizers for item in optimizer.state.items()]
    return [
        f"{STATE}{own[param][0]}.{key}"
        for param, values in states
        for key, value in values.items()
        if param in own and is_plain_number(value)
    ]


def _saved_numbers(reader: Reader) -> frozenset[str]:
    """The results of `number_names` of all ranks. Older checkpoints, and those of other tools, have none."""
    found = reader.manifest.state.get("numbers", [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise DamagedError(f"{reader.where}: the names of its numbers cannot be read")
    return frozenset(name for name in found if name in reader.manifest.tensors and not reader.entry(name).shape)


def _state_pieces(param: ShardedParameter, key: str, value: Tensor, region: Region | None) -> list[Piece]:
    """The pieces of a state of this rank's slice, or of its owned region: a whole tensor, or a batch of parts that the
    optimizer treats as tensors. A 0-d state is the same for all of the batch, and is written with the first part."""
    name = f"{STATE}{param.full_name}.{key}"
    if region is not None and region.batch:
        if not value.dim():
            return [] if any(region.offsets) else [whole(name, value)]
        if tuple(value.shape[: region.batch]) != region.sizes[: region.batch]:
            raise CheckpointError(f"{name} of {tuple(value.shape)} must have something for each of {region}")
        return [whole(name, value, region.of(region.whole_shape(value.shape)))]
    if region is not None or not value.dim():
        return [whole(name, value)]
    local = value if type(value) is Tensor and not value.requires_grad else value.as_subclass(Tensor).detach()
    if local.shape != param.local.shape:
        raise CheckpointError(
            f"state {key!r} of {param.full_name} must be 0-d or have an element for each of the slice's "
            f"{param.local.numel()}; it has shape {tuple(value.shape)}"
        )
    return [param.piece(name, local)]


# ---- reading


def restore_models(held: Held, reader: Reader) -> None:
    """Loads parameters and buffers in place.

    The caller tells the engines of the change after all ranks have succeeded: that runs collectives, and a single rank
    may find a file damaged. Raises CheckpointError, on all ranks and without changing anything, for a checkpoint of
    another model; ModelError if modules of the model were moved after `zm.shard`.
    """
    for engine in held.engines:
        require_names(engine)
    entries = reader.manifest.tensors
    elsewhere = left_out(reader.manifest.state, reader.where)
    known, wanted = set[str](), dict[str, TensorEntry]()
    for tensor in held.tensors():
        known.update(tensor.names)
        if tensor.names[0].removeprefix(MODEL) not in elsewhere:
            wanted[next((name for name in tensor.names if name in entries), tensor.names[0])] = tensor.entry
    compared = {name: entry for name, entry in entries.items() if name not in known or name in wanted}
    require_match(reader.where, compared, wanted, MODEL)
    for engine in held.engines:
        engine.at_rest()
    pieces = list[Piece]()
    for param, names in held.params():
        if names[0] not in elsewhere:
            name = next(MODEL + name for name in names if MODEL + name in entries)
            pieces.append(param.piece(name, param.local))
    buffers = [(buffer, name) for model in held.models for name, buffer in persistent_buffers(model)]
    read = [whole(MODEL + name, torch.empty_like(buffer)) for buffer, name in buffers]
    reader.fill([*pieces, *read])
    for (buffer, _), piece in zip(buffers, read, strict=True):
        buffer.copy_(piece.local.view(buffer.shape))


def restore_optimizers(held: Held, optimizers: Sequence[Optimizer], reader: Reader) -> None:
    """Replaces the optimizers' states by those of the checkpoint, in the layout of this run.

    States that are there already are filled in place: no rank holds two copies. Saved states of parameters that are
    frozen here are passed over, and a parameter without saved states starts without any. Raises CheckpointError, and
    changes nothing, if trained parameters have saved states that no optimizer has, or of other shapes.
    """
    saved: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for name, entry in reader.manifest.tensors.items():
        if name.startswith(STATE):
            saved[name.removeprefix(STATE).rpartition(".")[0]][name] = entry
    fresh: dict[Optimizer, dict[Tensor, dict[str, Any]]] = {}
    pieces: list[Piece] = []
    single, read = _saved_numbers(reader), list[tuple[dict[str, Any], str]]()
    known = held.names()
    for optimizer in optimizers:
        states = fresh[optimizer] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                found = next((saved.pop(name) for name in known.get(param, ()) if name in saved), None)
                if found and param in WHOLE.get(optimizer, (param,)):
                    present, owned = optimizer.state.get(param, {}), WHOLE.get(optimizer, {}).get(param)
                    coded = any(":" in name.rpartition(".")[2] for name in found)
                    if not present and coded and isinstance(optimizer, OwnerOptimizer):
                        present = optimizer.made_state(param)  # only the class can make its quantised states
                    targets, states[param] = _state_targets(param, group, found, reader, present, owned)
                    pieces += targets
                    read += [(states[param], name.rpartition(".")[2]) for name in found if name in single]
    own = {name for names in known.values() for name in names}
    passed = {name.removeprefix(MODEL) for tensor in held.tensors() for name in tensor.names} - own  # other stages'
    passed.update(name for param, names in known.items() if not param.requires_grad for name in names)
    if strange := [name for name in saved if name not in passed]:
        raise CheckpointError(
            f"{reader.where} has optimizer states of {len(strange)} parameters that the optimizer does not have, such "
            f"as {strange[0]}: give all optimizers that were saved, over the same parameters"
        )
    reader.fill(pieces)
    for values, key in read:
        values[key] = values[key].item()
    for optimizer, states in fresh.items():
        kept = {param: values for param, values in optimizer.state.items() if param not in known}  # other models'
        optimizer.state.clear()
        optimizer.state.update(kept | states)


def _state_targets(
    param: ShardedParameter,
    group: Mapping[str, Any],
    found: Mapping[str, TensorEntry],
    reader: Reader,
    present: Mapping[str, Any],
    owned: Region | None,
) -> tuple[list[Piece], dict[str, Any]]:
    """Returns the pieces that a parameter's states are read into, and the states themselves. They are of the `owned`
    region, which may be the whole tensor, or of this rank's slice."""
    targets, states = list[Piece](), dict[str, Any]()
    local, shape = param.local, tuple(param.shape)
    number_device = local.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
    for name, entry in found.items():
        key, dtype = name.rpartition(".")[2], DTYPES[reader.entry(name).dtype]
        state = key.partition(":")[0]
        if owned is not None and state != key and key not in present:
            held = present.get(state)
            part = stored(state, held).get(key) if isinstance(held, Tensor) else None
            if part is None or (tuple(part.shape), part.dtype) != (entry.shape, dtype):
                raise CheckpointError(
                    f"{reader.where}: {name} is part of a quantised state, {entry.dtype} of shape {entry.shape}, and "
                    f"the optimizer here has none such: make it with the options that it was saved with"
                )
            targets.append(whole(name, part))
            states[state] = present[state]
            continue
        number = entry.shape == () and (shape != () or is_number(key, torch.empty((), dtype=dtype)))
        fits = entry.shape == shape if owned is None else owned.is_part_of(entry.shape)
        if not number and not fits:
            raise CheckpointError(f"{reader.where}: {name} must have shape {shape} or (); it has {entry.shape}")
        model = reader.manifest.tensors.get(MODEL + name.removeprefix(STATE).rpartition(".")[0])
        if not number and model is not None and entry.dtype == model.dtype:
            dtype = local.dtype  # as the optimizer makes states; the parameter may have had another one
        region = None if number or owned is None else owned.of(entry.shape)
        sizes = entry.shape if number else (local.numel(),) if region is None else region.sizes
        tensor = _in_place(present.get(key), sizes, dtype, number_device if number else local.device)
        all_of_it = Piece(name=name, shape=entry.shape, start=0, local=tensor.view(-1), within=region)
        targets.append(all_of_it if number or owned is not None else param.piece(name, tensor))
        states[key] = tensor
    return targets, states


def _in_place(held: Any, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    fits = type(held) is Tensor and (held.shape, held.dtype, held.device) == (sizes, dtype, device)
    return held if fits and held.is_contiguous() else torch.empty(sizes, dtype=dtype, device=device)


# ---- frozen parameters that are left out: a number for each, equal under every layout

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD = -0x61C8864680B583EB
"""An odd number with well mixed bits: 2**64 over the golden ratio, as a signed integer (Knuth, volume 3, 6.4)."""

_CHUNK = 1 << 20


def checksums(held: Held) -> dict[str, int]:
    """Returns, by name, a checksum of every frozen parameter of all stages. It is the sum modulo 2**64 of one number
    per element, from the element's position and bits.

    Collective. A sum does not depend on order, so it is the same on any number of ranks.
    """
    sums: dict[str, int] = {}
    for engine in held.engines:
        frozen = [buffer for buffer in buffers_of(engine) if not buffer.spec.trainable]
        sums |= checksums_of(engine, [place.info.name for buffer in frozen for place in buffer.places])
    pipeline = held.engines[0].pipeline
    stages = gather_over(None if pipeline is None else pipeline.group, sums)
    return {name: total for each in stages for name, total in each.items()}


def checksums_of(engine: Engine, names: Sequence[str]) -> dict[str, int]:
    """Returns the checksums of one model's parameters of these names. Collective: all its ranks pass the same names."""
    order = {name: index for index, name in enumerate(names)}
    sums = torch.zeros(len(names), dtype=torch.int64, device=engine.control.device)
    for buffer in buffers_of(engine):
        for row in param_rows(buffer, order):
            sums[order[row.name]] += _checksum(row)
    engine.control.reduce_all(sums)
    return dict(zip(names, sums.tolist(), strict=True))


def _checksum(row: Piece) -> Tensor:
    bits = row.local.view(_BITS[row.local.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        first = row.start + start
        places = torch.arange(first, first + part.numel(), device=bits.device)
        mixed = (part + 1) * _SPREAD * (2 * places + 1)
        total += (mixed ^ (mixed >> 29)).sum()  # so that the highest bits do not depend on an element's bits alone
    return total


def left_out(state: Mapping[str, Any], where: str) -> dict[str, int]:
    """Returns the checksums in a manifest's state; none if the checkpoint has all parameters. Raises DamagedError if
    they were not made by `checksums`."""
    found = state.get("frozen", {})
    if not isinstance(found, dict) or not all(type(value) is int for value in found.values()):
        raise DamagedError(f"{where}: what it says of frozen parameters cannot be read")
    return found


def require_same(held: Held, saved: Mapping[str, int], where: str) -> None:
    """Raises CheckpointError, on all ranks, unless the model's frozen parameters are those of the saved checksums.
    Collective."""
    if not saved:
        return
    own = checksums(held)
    differ = [name for name, value in saved.items() if own.get(name) != value]
    if differ:
        raise CheckpointError(
            f"{where} holds what is trained alone, and was saved beside other values of {len(differ)} of "
            f"{len(saved)} frozen parameters than the model has here, such as {differ[0]}: make the model of the same "
            f"pretrained files, in the same param_dtype"
        )
