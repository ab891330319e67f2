"""Values that a model on the meta device will have: each rank reads its own slices once there are shards.

[Note: Promised] Whoever builds a model on the meta device may promise, module by module, where the values of a tensor
are. A promised parameter gets no memory until it is sharded and is neither initialised nor sent; then every rank fills
its slice, so that none has more than its shard. The promise is kept with the module that owns the tensor: it goes with
the module into wrappers, and with copies of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from zeromesh.engine.engine import Engine
from zeromesh.engine.spread import local_of
from zeromesh.errors import ModelError
from zeromesh.model.module_units import clean_name

_KEPT = "_zeromesh_promised"
_ORIGIN = "_zeromesh_origin"


class Promised(nn.Parameter):
    """A parameter without memory. Libraries move what they make beside it, such as adapters, to its device; on the meta
    device that would lose its values, so it names the host."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch has an attribute
        return torch.device("cpu")


class Source(Protocol):
    """Where a tensor's values are.

    Args:
        shape: of the whole tensor.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def fill(self, target: Tensor, start: int) -> None:
        """Elements from `start` of the flattened tensor on, into 1-D `target`, in its dtype and on its device.

        Raises:
            CheckpointError: they cannot be read.
        """


def promise(model: nn.Module, sources: Mapping[str, Source], origin: str) -> None:
    """Promises values of tensors by name; all others of the model are as fresh as any on the meta device.

    Args:
        model: on the meta device.
        sources: by the names of `state_dict()`.
        origin: of the values, for people.
    """
    made: dict[nn.Parameter, Promised] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, param in module._parameters.items():
            if param is not None and f"{prefix}.{key}".lstrip(".") in sources:
                made[param] = Promised(param.data, param.requires_grad)
                vars(made[param]).update(vars(param))
    for prefix, module in model.named_modules(remove_duplicate=False):
        module._parameters.update({k: made[p] for k, p in module._parameters.items() if p in made})
        names = {key: f"{prefix}.{key}".lstrip(".") for key in (*module._parameters, *module._buffers)}
        kept = vars(module).setdefault(_KEPT, {})
        kept.update({key: sources.get(name) for key, name in names.items()})
    object.__setattr__(model, _ORIGIN, origin)


def origin_of(module: nn.Module) -> str | None:
    """What was said of where a module's values are promised from."""
    found: str | None = vars(module).get(_ORIGIN)
    return found


def promised_of(model: nn.Module) -> dict[str, Source]:
    """What is promised of a model's tensors on the meta device, under all of their names.

    Raises:
        ModelError: a module was made on the meta device since the promise, in the place of one that has values.
    """
    by_tensor: dict[int, Source] = {}
    names: dict[int, list[str]] = {}
    unknown: dict[int, str] = {}
    for name, module, key, tensor in _meta_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        kept = vars(module).get(_KEPT)
        if kept is None or key not in kept:
            unknown.setdefault(id(tensor), name)
        elif kept[key] is not None:
            by_tensor.setdefault(id(tensor), kept[key])
            if kept[key].shape != tuple(tensor.shape):
                raise ModelError(
                    f"{name} has shape {tuple(tensor.shape)}, and the values that it was promised {kept[key].shape}"
                )
    origins = {clean_name(name): origin for name, part in model.named_modules() if (origin := origin_of(part))}
    for held, name in unknown.items():
        for prefix, origin in origins.items() if held not in by_tensor else ():
            if not prefix or name.startswith(f"{prefix}."):
                raise ModelError(
                    f"{name} is on the meta device and was not there when the model's values were promised from "
                    f"{origin}, so it would begin anew: what is made since (new tokens, adapters, heads) must have "
                    f"values of its own; or load the whole model, with from_pretrained of transformers"
                )
    return {name: source for held, source in by_tensor.items() for name in names[held]}


def _meta_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(name, owner, key, tensor) of all that a state dict holds and that has no values."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        buffers = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is not None and tensor.is_meta:
                yield clean_name(f"{prefix}.{key}".lstrip(".")), module, key, tensor


@torch.no_grad()
def read_promised(model: nn.Module, engine: Engine, promised: Mapping[str, Source]) -> None:
    """Fills this rank's slices, and what is whole on every rank.

    Args:
        model: sharded.
        engine: its own.
        promised: what `promised_of` has found before it was.

    Raises:
        CheckpointError: something cannot be read.
    """
    whole = dict(promised)
    modules = {clean_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    for buffer in (buffer for unit in engine.units for buffer in unit.buffers):
        for place, param in zip(buffer.places, buffer.optimizer_params, strict=True):
            sources = [source for name in place.info.names if (source := whole.pop(name, None))]
            for row in param.piece(place.info.name, param.local).rows() if sources else ():
                if row.local.numel():
                    sources[0].fill(row.local, row.start)
    for name, source in whole.items():  # buffers, and parameters of dtypes that are not sharded
        prefix, _, key = name.rpartition(".")
        module = modules[prefix]
        tensor = local_of(module._parameters.get(key, module._buffers.get(key)))
        values = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        source.fill(values, 0)
        tensor.data.copy_(values.view(tensor.shape))
    for module in model.modules():
        vars(module).pop(_KEPT, None)
