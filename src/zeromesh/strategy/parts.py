"""Parts of a model with a strategy of their own: as users give them, and their layouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from zeromesh.errors import MeshError, NotationError, nearest
from zeromesh.strategy.layout import Layout
from zeromesh.strategy.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Sizes = Sequence[tuple[str, int]]
"""(name, size) of a mesh's axes, innermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The sharding of a part of a model: the modules of a pattern or class, with everything inside them.

    Args:
        mesh: mesh of the ranks that share the part's parameters: some of the model's ranks, including this one. Use it
            if other ranks hold other parameters, as with expert parallelism. None: the model's mesh.
        strategy: strategy on the axes of that mesh. None if the notation of the model's strategy gives it.

    Examples:
        >>> import zeromesh as zm
        >>> parts = {"*.embed_tokens": zm.Part(strategy="node=0,cluster=0")}
    """

    mesh: DeviceMesh | None = None
    strategy: str | Strategy | None = None


Parts = Mapping[str | type, Part]
"""Parts by pattern of module names, or by class."""


def part_name(key: str | type) -> str:
    """How the notation names a part: by the pattern, or the class in angle brackets."""
    return key if isinstance(key, str) else f"<{key.__name__}>"


def belongs(part: str, module: str, kind: str) -> bool:
    """Whether `part` names a module of this qualified name and class."""
    return kind == part[1:-1] if part.startswith("<") else fnmatchcase(module, part)


def with_given(strategy: Strategy, parts: Mapping[str, Part], axes: Mapping[str, Sequence[str]]) -> Strategy:
    """`strategy` with the strategies that `parts`, by name, gives beside the notation. For presets, `axes` has
    the names of the axes of the mesh that each is on, innermost first.

    Raises:
        NotationError: a part has two strategies, or none.
    """
    found = dict(strategy.parts)
    for name, part in parts.items():
        if part.strategy is None and name not in found:
            raise NotationError(
                f"part {name} has no strategy: give zm.Part(strategy=...), or write it after the model's, as in "
                f"{strategy} | {name}: {strategy.with_parts({})}"
            )
        if part.strategy is not None:
            given = Strategy.parse(part.strategy, axes[name])
            if found.setdefault(name, given) != given:
                raise NotationError(f"part {name} has two strategies, {found[name]} and {given}")
    return strategy.with_parts(found)


def layouts_of(strategy: Strategy, mesh: Sizes, meshes: Mapping[str, Sizes]) -> dict[str, Layout]:
    """The layout of each part, on its mesh of `meshes` if it has one, and under "" that of all other modules.

    Raises:
        MeshError: a part's strategy or mesh does not fit; names the part.
    """
    layouts = {"": Layout.of(strategy.with_parts({}), mesh)}
    world = layouts[""].world
    for name, own in strategy.parts:
        sizes = meshes.get(name, mesh)
        try:
            layouts[name] = Layout.of(own, sizes, part=name, feeders=world)
        except MeshError as error:
            hint = "" if name in meshes else "; for other axes give zm.Part(mesh=...)"
            raise MeshError(f"part {name}: {error}{hint}") from None
    return layouts


def require_known(names: Iterable[str], modules: Mapping[str, str]) -> None:
    """Raises NotationError for a part that none of the modules, class names by qualified name, belongs to."""
    for part in names:
        if not any(belongs(part, module, kind) for module, kind in modules.items()):
            layers = {re.sub(r"\.\d+(?=\.|$)", ".*", module) for module in modules} - {""}
            known = {f"<{kind}>" for kind in modules.values()} if part.startswith("<") else layers
            raise NotationError(f"part {part} matches no module of the model: {nearest(part, known)}")
