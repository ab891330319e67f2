"""A mesh for another number of ranks than it was written for. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zeromesh.errors import InputError, MeshError
from zeromesh.strategy import Strategy, layouts_of


def resize_mesh(mesh: Mapping[str, int], world: int, strategy: str | None) -> dict[str, int]:
    """The mesh with the same axes for `world` ranks.

    Inner axes, whose links are fast, keep as much of their size as divides: from the innermost on, each takes the
    largest divisor of what is left that its size allows, and the outermost takes the rest. Where the strategy does not
    fit that (`node[4]=3,node[*]=1`), the next largest is taken.

    >>> resize_mesh({"cluster": 4, "node": 8}, 24, "node=3,cluster=1")
    {'cluster': 3, 'node': 8}
    >>> resize_mesh({"cluster": 2, "node": 2}, 3, "node=3,cluster=1")
    {'cluster': 3, 'node': 1}

    Args:
        mesh: sizes by axis name, outermost first.
        world: ranks there are.
        strategy: in the notation, or a preset's name; None where it is chosen after the mesh.

    Raises:
        MeshError: the strategy fits no mesh of `world` ranks; says what is wrong with the first.
    """
    names, sizes = list(mesh)[::-1], list(mesh.values())[::-1]
    reason: InputError | None = None
    for candidate in _candidates(sizes, world):
        resized = tuple(zip(names, candidate, strict=True))
        try:
            if strategy is not None:
                layouts_of(Strategy.parse(strategy, names), resized, {})
        except InputError as error:
            reason = reason or error
        else:
            return dict(resized[::-1])
    raise MeshError(f"the mesh {mesh_text(mesh)} cannot be re-sized to {world} ranks for {strategy}: {reason}")


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Sizes by axis, outermost first.

    >>> mesh_text({"cluster": 2, "node": 8})
    'cluster=2 x node=8'
    """
    return " x ".join(f"{name}={size}" for name, size in mesh.items())


def _candidates(sizes: Sequence[int], world: int) -> Iterator[tuple[int, ...]]:
    """Sizes, innermost first, whose product is `world`, the preferred first."""
    if len(sizes) == 1:
        yield (world,)
        return
    for size in range(min(sizes[0], world), 0, -1):
        if world % size == 0:
            for rest in _candidates(sizes[1:], world // size):
                yield (size, *rest)
