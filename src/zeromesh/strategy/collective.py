"""How collectives over several levels are carried out: what a strategy's `collective=` names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from zeromesh.engine.chain import Step
    from zeromesh.schedule import Route, Transfer


class Collective:
    """One way, without state.

    Args:
        name: as the notation spells it.
        by_level: it sends what level after level would; others can be predicted for other engines, and not run.
        pairs: its `grouped` has two neighbouring steps run at once where both scatter or both gather, lossless and with
            no copy between them. What is replicated is then scattered over every level and gathered again. Plans try
            it unasked where ranks exchange messages.
        costs: a `zeromesh.cost.JointCost`, or "module:class" of one, which whoever only runs it never imports.
    """

    name: ClassVar[str]
    by_level: ClassVar[bool] = True
    pairs: ClassVar[bool] = False
    costs: ClassVar[str | type]

    def grouped(self, route: Route, *, messages: bool) -> tuple[tuple[Transfer, ...], ...]:
        """The steps of `route` as they are carried out: two that run at once stand together.

        Args:
            route: of one flat buffer.
            messages: whether ranks exchange messages.
        """
        return tuple((step,) for step in route.steps)

    def bind(self, route: Route, steps: Sequence[Step]) -> tuple[Step, ...]:
        """The same with those that run at once joined, of the steps of `route` bound to their tensors one by one."""
        return tuple(steps)


HOMES = {
    "flat": "zeromesh.collectives.hierarchical:Flat",
    "hierarchical": "zeromesh.collectives.hierarchical:Hierarchical",
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
        module, _, attribute = HOMES[name].partition(":")
        _FOUND[name] = getattr(importlib.import_module(module), attribute)()
    return _FOUND[name]


@contextmanager
def registered_collective(collective: Collective) -> Iterator[None]:
    """A further collective, for as long as this is open."""
    _FOUND[collective.name] = collective
    try:
        yield
    finally:
        del _FOUND[collective.name]
