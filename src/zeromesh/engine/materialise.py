"""Gives parameters and buffers on the meta device memory, a unit at a time, and on the first rank values.

A fresh tensor holds NaN (integers and flags: a pattern of bits) until its initialisation has run, so an initialisation
that forgets a tensor is noticed. A tensor that has values keeps them when an initialisation overwrites it: adapters
beside weights that come later, a weight beside a new bias. The first rank holds back an error until all ranks can hear
of it, as the others wait for its values meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeromesh.engine.flat import FlatShards
from zeromesh.engine.leaf import bytes_of, local_of
from zeromesh.engine.units import ModuleUnit, walk
from zeromesh.errors import ModelError
from zeromesh.modules import ORIGIN, Lazy, Source, clean_name, lacks_values, tensors_of

Init = Callable[[nn.Module], None]

_UNTOUCHED = 0xA5  # each byte of a fresh tensor of integers; of flags too, which then are neither true nor false


class Materialiser:
    """Materialises the parts of one model in turn. `init` initialises one module's own parameters, in place, and
    buffers, also by assigning others. Default: Hugging Face's `_init_weights` of the nearest model around the module,
    else its `reset_parameters`."""

    def __init__(
        self,
        model: nn.Module,  # any of it may be on the meta device
        units: Sequence[ModuleUnit],  # each module belongs to the innermost around it
        device: torch.device,
        init: Init | None,
        first: bool,  # whether this rank is the one whose values count
        lazy: Container[str],  # tensors that get values later; those that are sharded stay on the meta device
    ) -> None:
        self.device, self.first, self.lazy = device, first, lazy
        self.error = ""
        self.cause: Exception | None = None
        self._init = init
        self._names = {module: clean_name(name) for name, module in model.named_modules()}
        self._rules: dict[nn.Module, Init | None] = {}
        self._owners = {id(module._parameters): module for module in self._names}
        self._infos = {id(i.param): i for u in units for infos in u.groups.values() for i in infos}
        self._inside = _modules_by_unit(model, units)
        self._done: set[nn.Module] = set()
        self._order = list(self._postorder(model, None))

    def _postorder(self, module: nn.Module, rule: Init | None) -> Iterator[nn.Module]:
        """Inner modules first, as Hugging Face does: outer ones then adapt their inner ones' values."""
        if module in self._rules:
            return
        with suppress(AttributeError, TypeError):  # one without an argument is about something else
            signature(module._init_weights).bind(module)  # type: ignore[arg-type]
            rule = module._init_weights  # type: ignore[assignment]
        self._rules[module] = rule
        for child in module.children():
            yield from self._postorder(child, rule)
        yield module

    def unit(self, unit: ModuleUnit) -> None:
        """Materialises the parameters of `unit`, and all that its modules, and modules that share parameters, hold."""
        infos = [info for group in unit.groups.values() for info in group]
        sharing = {self._owners[id(params)] for info in infos for params, _ in info.sites}
        self._run({*self._inside[unit.name], *sharing})

    def _run(self, wanted: set[nn.Module]) -> None:
        modules = [module for module in self._order if module in wanted and module not in self._done]
        self._done.update(modules)
        fresh = {module: list(self._fresh(module)) for module in modules}
        if self.first and any(fresh.values()) and not self.error:
            with torch.no_grad(), _values_kept(fresh):
                self.error = self._initialise(fresh)

    def _fresh(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for key, param in list(module._parameters.items()):
            lazy = self._label(module, key) in self.lazy
            if param is not None and lacks_values(param) and not (lazy and id(param) in self._infos):
                made = nn.Parameter(self._empty(param), requires_grad=param.requires_grad)
                info = self._infos.get(id(param))
                for params, name in info.sites if info else ((module._parameters, key),):
                    params[name] = made
                if not lazy:
                    yield key, made
        for key, buffer in module._buffers.items():
            if buffer is not None and lacks_values(buffer):
                made_buffer = module._buffers[key] = self._empty(buffer)
                if self._label(module, key) not in self.lazy:
                    yield key, made_buffer

    def _empty(self, meta: Tensor) -> Tensor:
        # All of a DTensor: an initialisation of the whole parameter is right for any part of it.
        if isinstance(meta, DTensor):
            whole = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        else:
            whole = meta.meta() if isinstance(meta, Lazy) else meta
        empty = torch.empty_like(whole, device=self.device).detach()
        if empty.is_floating_point():
            return empty.fill_(torch.nan)
        bytes_of(empty.untyped_storage()).fill_(_UNTOUCHED)
        return empty

    def _initialise(self, fresh: dict[nn.Module, list[tuple[str, Tensor]]]) -> str:
        for module, tensors in fresh.items():
            rule = self._init or self._rules[module]
            if not tensors and (self._init or not rule):
                continue
            if rule is None and not hasattr(module, "reset_parameters"):
                return (
                    f"{self._label(module, tensors[0][0])} is on the meta device and {type(module).__name__} has no "
                    f"reset_parameters(); pass init=..., a function that initialises one module in place"
                )
            try:
                rule(module) if rule else module.reset_parameters()  # type: ignore[operator]  # tested above
            except Exception as error:  # the other ranks wait for this one's values
                self.cause = error
                name = self._names[module] or "the model"
                return f"the initialisation of {name} raised {type(error).__name__}: {error}"
            _take_assigned(module, tensors)
        for module, tensors in fresh.items():
            for tensor in tensors:
                if _is_fresh(tensor[1]):
                    return (
                        f"{self._label(module, tensor[0])} was on the meta device and its initialisation left it, or "
                        f"part of it, without values: pass init=..., a function that initialises one module's own "
                        f"parameters and buffers"
                    )
        return ""

    def _label(self, module: nn.Module, key: str) -> str:
        return ".".join(part for part in (self._names[module], key) if part)


def _modules_by_unit(model: nn.Module, units: Sequence[ModuleUnit]) -> dict[str, list[nn.Module]]:
    """Every module under the name of the innermost unit that holds it; one registered in several, under each."""
    names = {clean_name(name): module for name, module in model.named_modules()}
    found: dict[str, list[nn.Module]] = {unit.name: [] for unit in units}
    by_module = {names[name]: unit for unit in units for name in unit.names}
    for module, _, home in walk(model, names[""], by_module):
        found[by_module[home].name].append(module)
    return found


@contextmanager
def _values_kept(fresh: Mapping[nn.Module, Sequence[tuple[str, Tensor]]]) -> Iterator[None]:
    """Restores afterwards everything in these modules except the fresh tensors."""
    made = {id(tensor) for tensors in fresh.values() for _, tensor in tensors}
    held = [
        (tensors, key, tensor, tensor.detach().clone())
        for module in fresh
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items()
        if tensor is not None and not lacks_values(tensor) and id(tensor) not in made
    ]
    yield
    for tensors, key, tensor, values in held:
        tensors[key] = tensor  # type: ignore[assignment]  # an initialisation may have replaced it
        tensor.copy_(values)


def _take_assigned(module: nn.Module, tensors: list[tuple[str, Tensor]]) -> None:
    """A buffer that was given another tensor, as in ``self.cache = self.compute()``, has its values in its own memory,
    which is the same on all ranks."""
    for key, made in tensors:
        found = module._buffers.get(key)
        if found is not None and found is not made and found.shape == made.shape and not found.is_meta:
            module._buffers[key] = made.copy_(found)


def _is_fresh(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return bool(tensor.numel()) and bool((bytes_of(tensor.untyped_storage()) == _UNTOUCHED).all())


@torch.no_grad()
def read_lazy(model: nn.Module, buffers: Iterable[FlatShards], lazy: Mapping[str, Source]) -> None:
    """Fills this rank's slices, and tensors that are whole on every rank, from `lazy`: sources by name, as
    `lazy_sources` found them before the model was sharded.

    Raises:
        CheckpointError: something cannot be read.
    """
    whole = dict(lazy)
    modules = {clean_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    for buffer in buffers:
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


def lazy_sources(model: nn.Module) -> dict[str, Source]:
    """The lazy tensors of a model, under all of their names; tensors take the place of those whose values were read.

    Raises:
        ModelError: a module was made on the meta device since the promise, in the place of one that has values.
    """
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            values: dict[str, Any] = tensors
            for key, tensor in values.items():
                if isinstance(tensor, Lazy) and tensor.source is None:
                    values[key] = tensor.whole
    found: dict[str, Source] = {}
    parts = {clean_name(name): vars(part) for name, part in model.named_modules()}
    origins = {name: part[ORIGIN] for name, part in parts.items() if ORIGIN in part}
    for name, tensor in tensors_of(model, persistent=True):
        if isinstance(tensor, Lazy):
            source = tensor.in_dtype()
            found |= {} if source is None else {name: source}
        elif tensor.is_meta:
            for prefix, origin in origins.items():
                if not prefix or name.startswith(f"{prefix}."):
                    raise ModelError(
                        f"{name} is on the meta device and was not there when the model was made with lazy values from "
                        f"{origin}, so it would begin anew: tensors made since then (new tokens, adapters, heads) must "
                        f"have values of their own; or load the whole model, with from_pretrained of transformers"
                    )
    return found
