"""Dtypes, wrappers, blocks and edges of a module, for both engine and planner. Imports torch.

Blocks are the modules that Hugging Face's `_no_split_modules` names, else the outermost members of repeated lists: of
each `ModuleList` or `Sequential` with two or more members, all of one class, that hold parameters. The model's input
embedding and output head are separate units, unless they share a parameter with another module. The root holds the
rest. Wrappers for checkpointing and compilation are looked through.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes in which models compute and are trained."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

UnitClasses = Sequence[type[nn.Module] | str]
"""Classes, or their names, of the modules that are units."""

FROZEN_DTYPES = {
    "code i8": torch.int8,
    "code i16": torch.int16,
    "code i32": torch.int32,
    "code i64": torch.int64,
    "code u8": torch.uint8,
    "code bool": torch.bool,
    "code e4m3": torch.float8_e4m3fn,
    "code e5m2": torch.float8_e5m2,
}
"""Dtypes of frozen parameters that layers dequantise. They are never cast. Frozen parameters of other dtypes stay whole
on every rank."""

CHECKPOINTED = "_checkpoint_wrapped_module"
WRAPPERS = ("_orig_mod", CHECKPOINTED)
"""Names under which compile and checkpoint wrappers register the module that they wrap."""


def clean_name(name: str) -> str:
    """Returns a qualified name without the parts that compile and checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside compile and checkpoint wrappers."""
    for wrapper in WRAPPERS:
        inner = module._modules.get(wrapper)
        if inner is not None:
            return unwrapped(inner)
    return module


def is_sharded(param: torch.Tensor) -> bool:
    """Whether strategies shard the parameter. If not, it stays whole on every rank."""
    return param.dtype in DTYPE_NAMES or (not param.requires_grad and param.dtype in FROZEN_DTYPES.values())


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the model's blocks, as the module's docstring defines them."""
    named = getattr(model, "_no_split_modules", None)
    if named:
        found = [module for module in model.modules() if type(module).__name__ in set(named)]
        if found:
            return _outer(model, found)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    members = [[unwrapped(child) for child in every._modules.values() if child is not None] for every in lists]
    alike = [group for group in members if len(group) > 1 and len({type(child) for child in group}) == 1]
    return _outer(model, [child for group in alike if next(group[0].parameters(), None) is not None for child in group])


def find_edges(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[nn.Module | None, nn.Module | None]:
    """Returns the input embedding and the output head, as a Hugging Face model names them. In other models, the first
    embedding before the blocks and the last linear layer after them.

    Both are None if there are no blocks. One is None if it is tied to another module, or has no forward of its own:
    then no call tells when its parameters are needed.
    """
    inside = {inner for block in blocks for inner in block.modules()}
    holders = _holders(model)

    def own(edge: nn.Module | None) -> nn.Module | None:
        if edge is None or edge in inside or type(edge).forward is nn.Module.forward:
            return None
        return edge if all(len(holders[param]) == 1 for param in edge.parameters()) else None

    if not blocks:
        return None, None
    if hasattr(model, "get_input_embeddings"):
        return own(_accessor(model, "get_input_embeddings")), own(_accessor(model, "get_output_embeddings"))
    order = {module: index for index, module in enumerate(model.modules())}
    places = [order[block] for block in blocks]
    ahead = [module for module in order if order[module] < min(places)]
    behind = [module for module in order if order[module] > max(places) and module not in inside]
    return own(_first(ahead, nn.Embedding)), own(_first(behind[::-1], nn.Linear))


def _outer(model: nn.Module, found: Sequence[nn.Module]) -> list[nn.Module]:
    names = {module: name for name, module in model.named_modules()}
    return [m for m in found if not any(names[m].startswith(f"{names[other]}.") for other in found)]


def _accessor(model: nn.Module, name: str) -> nn.Module | None:
    try:
        module = getattr(model, name)()
    except (AttributeError, NotImplementedError):
        return None
    return module if isinstance(module, nn.Module) else None


def _first(modules: Sequence[nn.Module], kind: type[nn.Module]) -> nn.Module | None:
    return next((module for module in modules if isinstance(module, kind)), None)


def _holders(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    holders: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                holders[param].append(module)
    return holders


def give_method(model: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Makes `model.name(...)` call `function(model, ...)`. A weak reference does not keep the model alive."""
    reference = weakref.ref(model)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(reference(), *args, **kwargs)

    object.__setattr__(model, name, method)


ORIGIN = "_zeromesh_origin"
"""Attribute of a module with lazy values: their location, for messages."""


class Source(Protocol):
    """The values of one tensor, in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def fill(self, target: Tensor, start: int) -> None:
        """Fills 1-D `target`, in its dtype and on its device, with elements of the flattened tensor from `start` on.
        Raises CheckpointError if they cannot be read."""


class Lazy:
    """Marks a tensor whose values are still in files: `zeromesh.engine.lazy`."""

    @property
    def source(self) -> Source | None:
        """Where the values are; None once they have been read."""
        raise NotImplementedError

    def in_dtype(self) -> Source | None:
        """The values in the tensor's dtype, since `source` may have a higher precision. None if no file has them."""
        raise NotImplementedError

    def meta(self) -> Tensor:
        """Returns a tensor like it on the meta device."""
        raise NotImplementedError

    @property
    def whole(self) -> Tensor:
        """A tensor with the values, which are read now if necessary."""
        raise NotImplementedError


def lacks_values(tensor: Tensor) -> bool:
    """Whether a tensor has no values yet: it is lazy, or on the meta device."""
    return tensor.is_meta or (isinstance(tensor, Lazy) and tensor.source is not None)


def tensors_of(model: nn.Module, *, persistent: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors under each of their names. With `persistent`, only those buffers that a state dict has."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        left_out = module._non_persistent_buffers_set if persistent else ()
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and key not in left_out:
                yield clean_name(f"{prefix}.{key}".lstrip(".")), tensor
