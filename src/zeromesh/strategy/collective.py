"""The ways to run collectives over several levels, as far as layouts depend on them. A strategy chooses one with
`collective=`; `zeromesh.collectives` implements them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import ClassVar


class Collective:
    """One way, without state."""

    name: ClassVar[str]  # as the notation spells it
    # Whether it works level by level, as a `zeromesh.collectives.ByLevel`. The engine runs only these; the others can
    # be predicted, for other engines.
    by_level: ClassVar[bool] = False
    # Whether two neighbouring steps run at once if both scatter or both gather, lossless and with no copy in between.
    # Replicated buffers are then scattered over every level and gathered again. Plans try it by default where ranks
    # exchange messages.
    pairs: ClassVar[bool] = False
    # A `zeromesh.cost.JointCost`, or its "module:class", so that the engine does not import it.
    costs: ClassVar[str | type]


HOMES = {
    "flat": "zeromesh.collectives:Flat",
    "hierarchical": "zeromesh.collectives:Hierarchical",
    "ho_ring": "zeromesh.collectives.ho_ring:HoRing",
}
"""Where each is defined; it is imported when first asked for."""

AUTO = "auto"
"""Level by level. Where another engine is predicted that issues one collective over several axes, that one."""

_FOUND: dict[str, Collective] = {}


def collectives() -> tuple[str, ...]:
    """The names that the notation accepts."""
    return (AUTO, *dict.fromkeys([*HOMES, *_FOUND]))


def find_collective(name: str) -> Collective:
    """The collective that a strategy names; KeyError where there is none."""
    name = "hierarchical" if name == AUTO else name
    if name not in _FOUND:
        _FOUND[name] = resolve_name(HOMES[name])()
    return _FOUND[name]


@contextmanager
def registered_collective(collective: Collective) -> Iterator[None]:
    """A further collective, for as long as this is open."""
    _FOUND[collective.name] = collective
    try:
        yield
    finally:
        del _FOUND[collective.name]
