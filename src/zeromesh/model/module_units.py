"""Cuts a module into units, by the engine's rule, and finds modules that recompute. Imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from zeromesh.model.spec import UnitKind
from zeromesh.modules import CHECKPOINTED, WRAPPERS, clean_name, find_blocks, find_edges, is_sharded, unwrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class CutUnit:
    """A module that is one unit. The root has the parameters that are in no other unit."""

    name: str
    kind: UnitKind
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def cut(module: nn.Module) -> list[CutUnit]:
    """Returns the units of `module`: the root first, if it holds parameters, then the others in order of
    registration."""
    uses = _uses(module)
    inner: list[CutUnit] = []
    claimed: set[int] = set()
    for name, kind, part in _candidates(module):
        within = _uses(part)
        named = ((clean_name(key), p) for key, p in part.named_parameters() if is_sharded(p))
        own = tuple((key, p) for key, p in named if uses[id(p)] == within[id(p)])
        inner.append(CutUnit(name=clean_name(name), kind=kind, module=part, parameters=own))
        claimed.update(id(p) for _, p in own)
    left = ((name, p) for name, p in module.named_parameters() if id(p) not in claimed)
    rest = tuple((clean_name(name), p) for name, p in left if is_sharded(p))
    root = [CutUnit(name="", kind=UnitKind.ROOT, module=module, parameters=rest)] if rest else []
    return [*root, *inner]


def _uses(module: nn.Module) -> Counter[int]:
    """Counts the places that hold each parameter."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def _candidates(module: nn.Module) -> Iterator[tuple[str, UnitKind, nn.Module]]:
    blocks = find_blocks(module)
    kinds = dict.fromkeys(blocks, UnitKind.BLOCK)
    for edge, kind in zip(find_edges(module, blocks), (UnitKind.EMBEDDING, UnitKind.HEAD), strict=True):
        if edge is not None:
            kinds[edge] = kind
    for name, part in module.named_modules():
        if part in kinds and part is not module:
            yield name, kinds[part], part


def recomputes(module: nn.Module) -> bool:
    """Whether parts of the module recompute activations, by a checkpoint wrapper or by the flag of transformers."""
    return any(
        CHECKPOINTED in part._modules or getattr(part, "gradient_checkpointing", False) is True
        for part in module.modules()
    )


def without_recomputation(module: nn.Module) -> nn.Module:
    """Removes checkpoint wrappers and recomputation from `module` in place, and returns it."""
    for part in list(module.modules()):
        if getattr(part, "gradient_checkpointing", False) is True:
            part.gradient_checkpointing = False  # type: ignore[assignment]  # neither a parameter nor a module
        for key, child in part._modules.items():
            if child is not None and key not in WRAPPERS:
                part._modules[key] = unwrapped(child)
    return unwrapped(module)
