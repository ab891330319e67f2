"""The ways to carry out collectives over several levels, as far as layouts depend on them: a strategy's `collective=`
names one. `zeromesh.collectives` has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import ClassVar


class Collective:
    """One way, without state."""

    name: ClassVar[str]  # as the notation spells it
    # It sends the bytes of level after level, and is a `zeromesh.collectives.ByLevel`; others can be predicted for
    # other engines, and not run.
    by_level: ClassVar[bool] = False
    # Two neighbouring steps run at once where both scatter or both gather, lossless and with no copy between them.
    # Replicated buffers are then scattered over every level and gathered again. Plans try it unasked where ranks
    # exchange messages.
    pairs: ClassVar[bool] = False
    # A `zeromesh.cost.JointCost`, or "module:class" of one, which whoever only runs it never imports.
    costs: ClassVar[str | type]


HOMES = {
    "flat": "zeromesh.collectives:Flat",
    "hierarchical": "zeromesh.collectives:Hierarchical",
    "ho_ring": "zeromesh.collectives.ho_ring:HoRing",
}
"""Where each is defined; it is imported when first asked for."""

AUTO = "auto"
"""Level after level; to engines that issue one collective over several axes, that."""

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
