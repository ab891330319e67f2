"""The tensors of a transformers model as its published files have them: renamed, and packed weights split.

Functions of transformers define the conversion, as renamings and operations. Here they run on tensors without values.
If a tensor of the files is a view of a box of a model's tensor, the ranks that hold the elements write it. Others, such
as transposed ones, are computed on the first rank from whole tensors, for one unit at a time.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from zeromesh.checkpoint.full_state import buffers_of, full_state_dict, persistent_buffers
from zeromesh.checkpoint.safetensors import Spec
from zeromesh.engine.api import engine_of
from zeromesh.engine.flat import FlatShards, ParamRange
from zeromesh.errors import ModelError
from zeromesh.modules import clean_name
from zeromesh.pieces.boxes import runs_of
from zeromesh.pieces.piece import Piece, whole
from zeromesh.pieces.region import Region


def published(model: nn.Module, specs: Sequence[Spec], pieces: Sequence[Piece]) -> tuple[list[Spec], Iterable[Piece]]:
    """Returns the specs of the tensors in the files, and this rank's pieces of them; `specs` and `pieces` are the
    model's. All ranks iterate over the pieces together, since computed tensors are gathered.

    Raises:
        ModelError: tensors of several units are mixed.
    """
    ties = getattr(model, "all_tied_weights_keys", {})  # name that is left out -> name that is written
    kept = {place.info.name: min(place.info.names, key=ties.__contains__) for _, _, place in places_of(model)}
    wanted = {
        kept.get(spec.name, spec.name): torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs
    }
    stands, units = stands_of(model), defaultdict[int, dict[str, Tensor]](dict)
    unit_of = {name: at for at, unit in enumerate(engine_of(model).units) for name in _names(unit.buffers)}
    for name, stand in wanted.items():
        units[unit_of.get(name, -1)][name] = stand
    with shown_as(model, stands), _Views():
        found: dict[str, Tensor] = revert_weight_conversion(model, dict(wanted))
        of_units = [(own, revert_weight_conversion(model, dict(own))) for own in units.values()]
    boxes = defaultdict[str, list[tuple[str, Region]]](list)
    computed: list[tuple[list[str], list[str]]] = []  # names in the model, names in the files that they make
    for own, made in of_units:
        of_memory, others = {_memory(stand): name for name, stand in own.items()}, list[str]()
        for name, tensor in made.items():
            source = of_memory.get(_memory(tensor))
            box = None if source is None else _box(tensor, wanted[source])
            if source is None or box is None:
                others.append(name)
            else:
                boxes[source].append((name, box))
        computed += [([*own], others)] if others else []
    sizes = {name: tensor.shape for _, made in of_units for name, tensor in made.items()}
    if sizes != {name: tensor.shape for name, tensor in found.items()}:
        raise ModelError(
            f"files of {type(model).__name__} mix tensors of several of its units: save it with "
            f"save_original_format=False, under its own names"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}

    def apart() -> Iterator[Piece]:
        for piece in pieces:
            for name, box in boxes[kept.get(piece.name, piece.name)]:
                for first, length, at in runs_of(box.shape, box.offsets, box.sizes):
                    start, stop = max(first, piece.start), min(first + length, piece.stop)
                    if start < stop:
                        local = piece.local[start - piece.start : stop - piece.start]
                        yield Piece(name=name, shape=shapes[name], start=at + start - first, local=local)
        for names, others in computed:
            state = full_state_dict(model, names=frozenset(names))  # empty on other ranks
            if state:
                with shown_as(model, stands):  # operations may ask for shapes
                    made = revert_weight_conversion(model, {name: state[name] for name in names})
                yield from (whole(name, made[name]) for name in others)

    return [Spec(name=n, shape=shapes[n], dtype=tensor.dtype) for n, tensor in found.items()], apart()


class _Views(TorchFunctionMode):
    """Makes `contiguous()` return the view itself, without a copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _box(view: Tensor, tensor: Tensor) -> Region | None:
    """Returns the box of a contiguous tensor that `view` shows with its elements in order; None if there is none."""
    if view.is_contiguous() and view.numel() == tensor.numel():
        return Region.whole(tuple(tensor.shape))
    left, offsets, sizes, dim = int(view.storage_offset()), list[int](), [1] * tensor.dim(), 0
    for stride in tensor.stride():
        at, left = divmod(left, stride)
        offsets.append(at)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        while dim < tensor.dim() and (tensor.stride(dim) != stride or tensor.shape[dim] == 1):
            dim += 1
        if dim == tensor.dim() or offsets[dim] + size > tensor.shape[dim]:
            return None
        sizes[dim], dim = size, dim + 1
    return Region(shape=tuple(tensor.shape), offsets=tuple(offsets), sizes=tuple(sizes))


def _names(buffers: Iterable[FlatShards]) -> Iterator[str]:
    return (name for buffer in buffers for place in buffer.places for name in place.info.names)


def places_of(model: nn.Module) -> Iterator[tuple[str, FlatShards, ParamRange]]:
    """Yields every name of every parameter of a sharded model, with its buffer and place."""
    for buffer in buffers_of(engine_of(model)):
        for place in buffer.places:
            for name in place.info.names:
                yield name, buffer, place


def stands_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns whole meta tensors in the shapes of a sharded model's state dict, by name."""
    stands: dict[str, Tensor] = {
        name: nn.Parameter(torch.empty(place.global_shape, device="meta"), requires_grad=False)
        for name, _, place in places_of(model)
    }
    return stands | {name: torch.empty_like(held, device="meta") for name, held in persistent_buffers(model)}


@contextmanager
def shown_as(model: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Puts `values` in the place of a sharded model's tensors, by name. Its modules then compute as plain ones do."""
    with ExitStack() as stack:
        for prefix, module in model.named_modules():
            for kind in ("_parameters", "_buffers"):
                held = vars(module)[kind]
                dot = f"{prefix}." if prefix else ""
                own = {key: values.get(clean_name(dot + key), tensor) for key, tensor in held.items()}
                stack.callback(vars(module).__setitem__, kind, held)
                vars(module)[kind] = own
            for kind in ("_forward_pre_hooks", "_forward_hooks"):
                stack.callback(vars(module).__setitem__, kind, vars(module)[kind])
                vars(module)[kind] = OrderedDict()
        yield
