"""Cuts a module into units, by the rule that the engine follows too. Imports torch.

Blocks are the modules that Hugging Face's `_no_split_modules` names, else the children of the outermost `ModuleList`
(or `Sequential`) of two or more of one class. Input embedding and output head are units of their own unless they share
a parameter with anything else; the root holds the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from zeromesh.model.spec import UnitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUnit:
    """A module that is one unit. The root's parameters are those of no other unit."""

    name: str
    kind: UnitKind
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def cut(module: nn.Module) -> list[ModuleUnit]:
    """The units of `module`: root first, then in order of registration."""
    uses = _uses(module)
    inner: list[ModuleUnit] = []
    claimed: set[int] = set()
    for name, kind, part in _candidates(module):
        own = tuple((key, p) for key, p in part.named_parameters() if uses[id(p)] == _uses(part)[id(p)])
        if kind is not UnitKind.BLOCK and len(own) < len(list(part.parameters())):
            continue  # tied: it stays with the root
        inner.append(ModuleUnit(name=name, kind=kind, module=part, parameters=own))
        claimed.update(id(p) for _, p in own)
    rest = tuple((name, p) for name, p in module.named_parameters() if id(p) not in claimed)
    root = [ModuleUnit(name="", kind=UnitKind.ROOT, module=module, parameters=rest)] if rest else []
    return [*root, *inner]


def _uses(module: nn.Module) -> Counter[int]:
    """How many places hold each parameter."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def _candidates(module: nn.Module) -> Iterator[tuple[str, UnitKind, nn.Module]]:
    blocks = {id(block) for block in _blocks(module)}
    embedding, head = _ends(module, blocks)
    for name, part in module.named_modules():
        if id(part) in blocks:
            yield name, UnitKind.BLOCK, part
        elif embedding is not None and part is embedding:
            yield name, UnitKind.EMBEDDING, embedding
        elif head is not None and part is head:
            yield name, UnitKind.HEAD, head


def _blocks(module: nn.Module) -> list[nn.Module]:
    classes = getattr(module, "_no_split_modules", None)
    if classes:
        named = [part for part in module.modules() if type(part).__name__ in set(classes)]
        if named:
            return named
    return list(_repeated(module))


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    repeats = isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1
    if repeats and len({type(child) for child in children}) == 1 and any(True for _ in children[0].parameters()):
        yield from children
        return
    for child in children:
        yield from _repeated(child)


def _ends(module: nn.Module, blocks: set[int]) -> tuple[nn.Module | None, nn.Module | None]:
    """The input embedding and the output head: as the module says, else the first embedding and the last linear layer
    outside the blocks; none where there are no blocks."""
    if not blocks:
        return None, None
    outside = list(_outside(module, blocks))
    embedding, head = _ask(module, "get_input_embeddings"), _ask(module, "get_output_embeddings")
    if embedding is None:
        embedding = next((part for part in outside if isinstance(part, nn.Embedding)), None)
    if head is None:
        head = next((part for part in reversed(outside) if isinstance(part, nn.Linear)), None)
    return embedding, head


def _ask(module: nn.Module, method: str) -> nn.Module | None:
    getter = getattr(module, method, None)
    try:
        found = getter() if callable(getter) else None
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Module) else None


def _outside(module: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in blocks:
            yield from _outside(child, blocks)
